"""Two columns of the table of `compare` against each other, a point for each setting and depth."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import pandas as pd

from deepstack.base.errors import ConfigError
from deepstack.base.registry import unknown
from deepstack.base.text import counted
from deepstack.config.key import Key
from deepstack.plots.chart import Chart, Options, in_style
from deepstack.plots.drawing import Drawing
from deepstack.plots.style import is_wide, number_axis, scheme_style
from deepstack.runs.captions import means_note
from deepstack.runs.comparison import comparison, number_of
from deepstack.runs.runs import Runs
from deepstack.runs.settings import SCHEME, require, scheme_label
from deepstack.runs.statistics import mask_note

AXIS_LABELS = {
    "depth": "depth N (layers)",
    "val_loss": "validation loss (nats)",
    "val_sd": "standard deviation of the validation loss (nats)",
    "val_low": "validation loss, lower end of the 95 % interval (nats)",
    "val_high": "validation loss, upper end of the 95 % interval (nats)",
    "n": "seeds that are done",
    "unigram": "loss without context (nats)",
    "update_first": "{measure} after the first step",
    "update_last": "{measure} after the last step",
    "step_ms": "time of a step (ms)",
    "flops": "FLOPs of all training steps",
}


@in_style
def scatter(runs: Runs, x: str, y: str, *, options: Options) -> Chart:
    """Draw a numeric column of `deepstack compare` against another, with a colour a scheme.

    x, y: columns; a point is a row of the table, a setting at a depth.

    Raises ConfigError for a column without numbers, NothingMatchedError without a point.
    """
    rows = comparison(runs)
    for row in rows:
        row["depth"] = number_of(row, "depth")
    names = [name for name in rows[0] if any(is_number(row[name]) for row in rows)]
    for axis, name in (("x", x), ("y", y)):
        if name not in names:
            raise ConfigError(f"--{axis}: {unknown('numeric column of compare', name, names)}")
    points = pd.DataFrame(
        [
            {
                "x": float(row[x]),
                "y": float(row[y]),
                "n": row["seeds"],
                "mark": f"{row['setting']}, N = {row['depth']}",
                "scheme": one.runs[0].get(SCHEME),
                "label": scheme_label(one.runs[0]),
            }
            for row, one in zip(rows, runs.bests(()), strict=True)
            if is_number(row[x]) and is_number(row[y])
        ]
    )
    require(len(points), f"no row of compare has both {x} and {y}")
    drawing = Drawing(runs, options)
    for panel, _ in drawing.arrange([None], published=False):
        for scheme in dict.fromkeys(points["scheme"]):
            chosen = points[points["scheme"] == scheme]
            label, look = chosen["label"].iloc[0], scheme_style(str(scheme))
            style: Any = {"color": look["color"], "marker": look["marker"], "ls": "none", "ms": 4}
            panel.lines(label, chosen[["x", "y", "n", "mark"]], kind="point", ends=False, **style)
            drawing.entry(label, **style)
        values = points["x"].tolist()
        number_axis(panel.axes, "x", values, is_wide(values))
        panel.axes.set_xlabel(label_of(x, runs, rows))
    drawing.value_axis(label_of(y, runs, rows), drawing.panels)
    left_out = counted("{} rows", len(rows) - len(points))
    drawing.note(f"left out: {left_out} of compare without a value", when=len(rows) > len(points))
    across, up = (label_of(name, runs, rows).partition(" (")[0] for name in (x, y))
    return drawing.finish(f"{up[0].upper()}{up[1:]} against {across}", *means_note(runs))


def is_number(value: Any) -> bool:
    """Return whether a cell is a finite number."""
    is_numeric = isinstance(value, Real) and not isinstance(value, bool)
    return is_numeric and math.isfinite(value)


def label_of(column: str, runs: Runs, rows: list[dict[str, Any]]) -> str:
    """Return the label of the axis of a column."""
    text = AXIS_LABELS.get(column, Key(column).words)
    text = text.replace("validation loss", f"validation loss{mask_note(runs)}")
    return text.format(measure=rows[0].get("update_measure", ""))
