"""Measures signals of stacks before training: runs of no step, with one snapshot each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepstack import config as conf
from deepstack.records import Run
from deepstack.runs import Runs
from deepstack.sweeps import MEASURE_ONLY, CellProgress, as_study, sweep
from deepstack.tools.signal.table import signal_layers, signal_table

if TYPE_CHECKING:
    import pandas as pd

START: Mapping[str, Any] = {
    **MEASURE_ONLY,
    "train.steps": 0,
    "log.layers_every": 1,
    "log.jacobian": True,
    "log.attribution_every": 0,
}
"""The settings of a run that measures the initial signals and nothing else."""


@dataclass(frozen=True)
class Signals:
    """The initial signals of some stacks.  runs: their run folders, which all charts read."""

    runs: list[Run]

    @cached_property
    def layers(self) -> pd.DataFrame:
        """A row per run and layer, see `deepstack.tools.signal.table.signal_layers`."""
        return signal_layers(Runs(self.runs))

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """A row per setting and depth, means over seeds."""
        return signal_table(self.layers)


def signal(
    config: conf.Config | conf.Study,
    grid: Mapping[str, Sequence[Any]] | None = None,
    *,
    depths: Sequence[int] | None = None,
    seeds: int | Sequence[int] = 3,
    study: str | None = None,
    out: str | Path = "results",
    workers: int | None = None,
    show: Callable[[Sequence[CellProgress]], None] | None = None,
) -> Signals:
    """Measure variance, correlation of tokens and gradients of every layer before training.

    grid: {dotted key: values}, as in `deepstack.sweep`.
    depths: of every cell (default: the configuration's).
    seeds: the seeds, or how many, from `seed` on.  Runs are run folders without training steps in
        `<out>/<study>`; a repeated call measures only missing ones.
    workers, show: see `deepstack.sweep`.
    """
    described = as_study(config, grid)
    base = described.base
    listed = range(base.seed, base.seed + seeds) if isinstance(seeds, int) else seeds
    axes = described.grid | {"seed": list(listed)}
    if depths is not None:
        axes["model.depth"] = list(depths)
    described = replace(described, base=conf.with_overrides(base, START), grid=axes)
    name = f"{base.name or 'runs'}_signal" if study is None else study
    return Signals(sweep(described, study=name, out=out, workers=workers, show=show))
