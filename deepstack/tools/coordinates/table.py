"""The size of the stream and of its change by layer, and their exponents in width and depth.

A parameterisation is right for width if neither depends on width after a few steps: the coordinate
check of Yang et al. 2022, arXiv:2203.03466, appendix D.1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from deepstack.base import signed_text
from deepstack.records import Run
from deepstack.runs import (
    SEED,
    WIDTH,
    Runs,
    depth_of,
    has_diverged_by,
    layers_at,
    require,
    seed_coefficient,
)

if TYPE_CHECKING:
    import pandas as pd

OF_WIDTH = (WIDTH, "model.d_ff", "model.n_heads")
"""The settings that may change with width and make no setting of their own."""
QUANTITIES = {"stream_norm": "size", "stream_update": "update"}
LAYERS = ("first", "middle", "last")
TOLERANCE = 0.1  # the size of an exponent that counts as none; wrong factors give 1/2 or 1


def coordinates(runs: Sequence[Run], at_step: int | None = None) -> pd.DataFrame:
    """Return a row for each run, quantity and layer: width, depth, seed, step, value.

    value: the 2-norm of a token over sqrt(width), mean over probe tokens, at `at_step` or the last
    recorded step: of the stream (`size`) and of its change since the start (`update`).  layer:
    'first', 'middle' or 'last' of the stack, or 'F', the last hidden state.  Runs that have
    diverged by then are left out.  Raises NothingMatchedError if no run has a value.
    """
    import pandas as pd

    rows: list[dict[str, Any]] = []
    for run in runs:
        width = int(run.get(WIDTH, 0))
        labels = {"width": width, "depth": depth_of(run), "seed": int(run.get(SEED, 0))}
        for name, quantity in QUANTITIES.items():
            snapshot = layers_at(run, name, at_step)
            if snapshot is None or has_diverged_by(run, snapshot[0]):
                continue
            step, by_layer = snapshot
            at = labels | {"step": step, "quantity": quantity}
            places = (0, (len(by_layer) - 1) // 2, len(by_layer) - 1)
            sizes = dict(zip(LAYERS, by_layer[list(places)], strict=True))
            if quantity == "size":
                rows += [at | {"layer": k, "value": v / width**0.5} for k, v in sizes.items()]
                moved = run.steps[run.steps["step"] == step]["model_update"]
                sizes = {"F": float(moved.iloc[0])} if len(moved) else {}
                at["quantity"] = "update"
            rows += [at | {"layer": k, "value": v / width**0.5} for k, v in sizes.items()]
    at_which = f" at step {at_step}" if at_step is not None else ""
    return pd.DataFrame(require(rows, f"no run has a record of every layer{at_which}"))


def coordinate_slopes(table: pd.DataFrame, over: str) -> list[dict[str, Any]]:
    """Return the exponent of each quantity in `over` (width or depth), and the verdict.

    table: from `coordinates`, of one setting.  A row for each quantity, layer and value of the
        other one of width and depth: exponent with its 95 % interval (Student's t over three seeds
        or more), verdict, least and greatest mean, number of seeds.
    """
    other = "depth" if over == "width" else "width"
    rows = []
    for key, part in table.groupby(["quantity", "layer", other, "step"], sort=False):
        quantity, layer, at, step = key
        wide = part.pivot_table(index="seed", columns=over, values="value").dropna()
        slope, means = seed_coefficient(wide), wide.mean()
        if slope.n == 0:
            continue
        rows.append(
            {
                "quantity": quantity,
                "layer": layer,
                "over": over,
                other: at,
                "step": step,
                "exponent": slope.value,
                "low": slope.low,
                "high": slope.high,
                "verdict": verdict(slope.value, slope.low, slope.high, over),
                "smallest": float(means.min()),
                "largest": float(means.max()),
                "seeds": slope.n,
            }
        )
    order = [*LAYERS, "F"]
    return sorted(rows, key=lambda r: (r["quantity"], r[other], order.index(r["layer"])))


def verdict(exponent: float, low: float, high: float, over: str) -> str:
    """Return whether a value depends on width or depth, by the interval of its exponent.

    It does not if the interval lies within ±0.1; it grows or falls if the interval excludes 0.
    """
    if -TOLERANCE < low and high < TOLERANCE:
        return f"does not depend on {over}"
    if low > 0 or high < 0:
        return f"{'grows' if exponent > 0 else 'falls'} with {over}"
    return "undecided"


def slope_text(row: dict[str, Any]) -> str:
    """Return a verdict with its numbers: `does not depend on width: 0.02 (−0.01 to 0.05)`."""
    value = signed_text(row["exponent"], 2)
    if math.isnan(row["low"]):
        return f"{row['verdict']}: {value}"
    return (
        f"{row['verdict']}: {value} ({signed_text(row['low'], 2)} to {signed_text(row['high'], 2)})"
    )


def swept(table: pd.DataFrame) -> list[str]:
    """Return which of width and depth have two values or more."""
    return [name for name in ("width", "depth") if table[name].nunique() > 1]


def coordinate_table(runs: Runs) -> list[dict[str, Any]]:
    """Return `coordinate_slopes` of every setting, over width and over depth.

    Raises NothingMatchedError if no setting has two widths or two depths.
    """
    rows = []
    for series in runs.series(but=OF_WIDTH):
        table = coordinates(series.runs)
        for over in swept(table):
            rows += [{"setting": series.label} | row for row in coordinate_slopes(table, over)]
    return require(rows, "needs runs of two widths (model.d_model) or two depths")
