"""Run folders with known power laws, and ways to look into a chart: for the tests of charts."""

import json
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pandas as pd
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.text import Text

from deepstack.plots import CHARTS, Chart, Options
from deepstack.records import (
    EVALS_COLUMNS,
    STEPS_COLUMNS,
    Analysis,
    RunFolder,
    find_runs,
    write_analysis,
)
from deepstack.schemes import SCHEMES

DEPTHS = (6, 18, 48, 100)


def update(depth: int, step: int = 1, *, factor: float = 0.01, power: float = 0.5) -> float:
    return factor * depth**power * step


START = 6.0  # validation loss before training


def make_run(
    root: Path,
    *,
    scheme: str = "deepnorm",
    depth: int = 6,
    seed: int = 0,
    lr: float = 1e-3,
    d_ff: int = 256,
    steps: int = 5,
    state: str = "done",
    updates: list[float] | None = None,
    normalised: bool = True,
    losses: list[float] | None = None,
    masked: float | None = 2.5,
    layers: np.ndarray | None = None,
    references: dict[str, float] | None = None,
    optimal: float | None = None,
    solved: float | None = None,
    config: dict[str, Any] | None = None,
    defaults: dict[str, Any] | None = None,
    flops: int | None = 10**9,
) -> Path:
    """A run folder as training leaves it; updates[t-1] is the model update after step t.

    config: more keys of it, dotted.  defaults: of options, as columns.json has them.
    flops: of a step.
    """
    folder = RunFolder(root / "-".join(map(str, (scheme, f"d{depth}", f"s{seed}", lr))))
    sections: dict[str, Any] = {
        "model": {"scheme": scheme, "depth": depth, "d_model": 64, "d_ff": d_ff},
        "task": {"name": "text"},
        "train": {"lr": lr, "steps": steps},
    }
    for key, value in (config or {}).items():
        *outer, last = key.split(".")
        place = sections
        for name in outer:
            place = place.setdefault(name, {})
        place[last] = value
    folder.write_config(json.dumps({"seed": seed, **sections}, ensure_ascii=False))
    known = {"unigram_entropy": 3.26, "context_free_entropy": 2.98}
    kind = SCHEMES[scheme]
    about = {"name": scheme, "label": kind.label, "paper": kind.paper, "normalised": normalised}
    folder.write_columns(
        {
            "columns": {"model_update": {"symbol": "‖ΔF‖", "unit": ""}},
            "layers": {"grad_norm": {"symbol": "‖∂L/∂θ_l‖", "unit": ""}},
            "scheme": about,
            "f0_norm": 8.0,
            "defaults": defaults or {},
            "stacks": {"encoder": depth},
            "references": known if references is None else references,
        }
    )
    values = updates or [update(depth, t) for t in range(1, steps + 1)]
    taken = list(enumerate(values, start=1))
    shown = losses or [4.0 - 0.1 * step for step, _ in taken]
    write_table(
        folder, "steps", STEPS_COLUMNS,
        [(t, shown[t - 1], lr, 1.0, value, value, 4 * value, value / 8) for t, value in taken],
    )  # fmt: skip
    cells = {"loss": 2.0, "loss_masked": masked, "optimal_loss": optimal, "solved": solved}
    kept = {k: v for k, v in cells.items() if v is not None or k in EVALS_COLUMNS}
    losses_of_start = ("loss", "loss_masked")
    starts = kept | {k: START + 0 * kept[k] for k in losses_of_start if kept[k] is not None}
    ends = [(0, *starts.values()), (len(values), *kept.values())]
    write_table(folder, "evals", ("step", *kept), ends)
    if layers is not None:
        parts = product(("bound", "beta_ln", "beta_rc"), ("attention", "feed_forward"))
        sizes = [f"{name}_{part}" for name, part in parts]
        sizes += ["stream_variance", "token_distance", "stream_grad"]
        records = {"grad_norm": layers, "stream_norm": -layers}
        records |= dict.fromkeys(sizes, np.abs(layers))
        folder.write_layers(records, list(range(1, len(layers) + 1)))
        write_table(
            folder, "attribution", ("step", "q", "w2", "norm_gain", "whole"),
            [(t, 0.1 * value, 0.5 * value, 0.7 * value, value) for t, value in taken],
        )  # fmt: skip
        threshold = 2 / lr if lr else None
        write_table(
            folder, "sharpness", ("step", "preconditioned_sharpness", "stability_threshold"),
            [(0, None, threshold), *((t, depth + t, threshold) for t, _ in taken)],
        )  # fmt: skip
        write_analyses(folder, depth, used=1.0 if scheme == "deepnorm" else 0.5)
    if flops is not None:
        folder.write_meta({"flops": {"step": flops}})
    folder.write_status(state, len(values))
    return folder.path


def write_table(
    folder: RunFolder, name: str, columns: Sequence[str], table: Iterable[Sequence[Any]]
) -> None:
    (folder.path / f"{name}.csv").unlink(missing_ok=True)
    with folder.log(name, columns) as log:
        for cells in table:
            log.write(dict(zip(columns, cells, strict=True)))


def write_analyses(folder: RunFolder, depth: int, used: float = 1.0, **lens: Any) -> None:
    """The results of `deepstack analyze` on a stack that uses this share of its layers.

    lens: numbers of that analysis instead of those computed.
    """
    kl = np.maximum(1 - np.arange(depth + 1) / (used * depth), 0.0)
    reached = int(np.argmax(kl < kl.max() / 2))
    numbers = {"effective_depth": reached, "effective_depth_ratio": reached / depth}
    pairs = np.subtract.outer(np.arange(1, depth + 1), np.arange(1, depth + 1))
    effect = np.where(pairs < 0, np.exp(pairs / 5.0), np.nan)
    layers = np.arange(depth + 1)
    near = np.exp(-np.abs(np.subtract.outer(layers, layers)) / depth)
    for name, step in (("lens_at_1", 1), ("lens", 2)):
        arrays, about = {"kl": kl, "loss": 2 + kl}, {"step": step}
        write_analysis(folder, name, Analysis(arrays, numbers | lens, about=about))
    effects = {"removed": layers[1:], "effect_mean": effect}
    write_analysis(folder, "effects", Analysis(effects))
    write_analysis(folder, "similarity", Analysis({"layers": layers, "cka": near}))


def make_runs(root: Path, **settings: Any) -> list[Path]:
    """A run for each combination of the settings that are tuples.

    A setting that is a function gets the values of this combination as keywords.
    """
    axes = {key: values for key, values in settings.items() if isinstance(values, tuple)}
    paths = []
    for values in product(*axes.values()):
        cell = dict(zip(axes, values, strict=True))
        others = {k: v(**cell) if callable(v) else v for k, v in settings.items() if k not in cell}
        paths.append(make_run(root, **others | cell))
    return paths


without_layout = partial(patch.object, ConstrainedLayoutEngine, "execute")
"""Leave the panels of charts where they are: to place them takes most of a chart's time."""


def make_chart(name: str, root: Path, *, layout: bool = False, **options: Any) -> Chart:
    """Draw a chart of the runs below a folder.  layout: whether its panels are placed."""
    with nullcontext() if layout else without_layout():
        return CHARTS[name](find_runs(root), options=Options(**options))


def rows(chart: Chart, **wanted: object) -> pd.DataFrame:
    found = chart.data
    for column, value in wanted.items():
        found = found[found[column] == value]
    return found


def words(chart: Chart) -> list[str]:
    """Every text of the figure: titles, labels, legends, caption."""
    texts = chart.figure.findobj(Text)
    return [text.get_text() for text in texts if isinstance(text, Text) and text.get_text()]


def caption(chart: Chart) -> str:
    """All words of a figure in one line."""
    return " ".join(words(chart)).replace("\u00a0", " ").replace("\n", " ")
