"""Measures how far each parameter role moves F at each depth, and makes that equal at all depths.

Ordinary runs of a few small steps record an attribution of ‖ΔF‖ to every role.  After one step from
initialisation, the change of a role is the one that it has when it is trained alone.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deepstack import config as conf
from deepstack.base import ConfigError
from deepstack.config import without_snapshots
from deepstack.records import Run
from deepstack.runs import TOGETHER
from deepstack.sweeps import MEASURE_ONLY, CellProgress, sweep
from deepstack.tools.calibrate.exponents import (
    HEAD,
    DepthExponents,
)

DEPTHS = (6, 12, 24, 48, 96)
STEPS = (1, 10)
SMALL = 0.01  # the measured learning rate over the configuration's
SECOND = 10  # the rate of a second measurement over the first's; its updates grow as rate²
# The settings of a run that measures the update of each role and nothing else.
SHORT = MEASURE_ONLY | {
    "train.clip": None,
    "train.weight_decay": 0.0,
    "model.dropout": 0.0,
    **without_snapshots(),
}


@dataclass(frozen=True, kw_only=True)
class Calibration(DepthExponents):
    """Attributions at several depths, the exponents of each role, and the corrected config.

    config: the calibrated configuration.
    """

    config: conf.Config

    @property
    def corrected(self) -> conf.Config:
        """The configuration whose roles move F equally at all depths, as far as a power can.

        `train.lr_exponents` are the measured exponents, added to the configuration's.
        """
        exponents: dict[Any, float] = {**self.config.train.lr_exponents}
        sums = {role: round(exponents.get(role, 0.0) + e, 4) for role, e in self.exponents.items()}
        return conf.with_overrides(self.config, {"train.lr_exponents": exponents | sums})

    def interpolated(self, depth: int) -> conf.Config:
        """Return the configuration for one depth, with factors between the measured depths.

        If the update is not a power of N: `train.lr_factors` at `depth` give each role its
        update at `train.base_depth`.
        """
        train = self.config.train
        factors = self.factors_between(depth, train.base_depth)
        products = {role: round(train.lr_factor(role) * f, 6) for role, f in factors.items()}
        changes = {"model.depth": depth, "train.lr_factors": train.lr_factors | products}
        return conf.with_overrides(self.config, changes)


def calibrate(
    config: conf.Config,
    *,
    depths: Sequence[int] = DEPTHS,
    seeds: int | Sequence[int] = 3,
    steps: Sequence[int] = STEPS,
    lr: float | None = None,
    alone: bool = False,
    check: bool = True,
    study: str | None = None,
    out: str | Path = "results",
    workers: int | None = None,
    show: Callable[[Sequence[CellProgress]], None] = lambda progress: None,
) -> Calibration:
    """Measure the exponent in N of every role's model update, and derive rates without it.

    Every depth is trained for max(steps) steps from these seeds, at a small constant rate `lr`
    (by default a hundredth of `train.lr`) and at half of it, without warm-up and clipping.  Runs
    are ordinary run folders in `<out>/<study>_before`; a repeated call skips finished ones.
    Roles that move F from θ_0 at no step are measured a second time, in `<out>/<study>_second`.
    There the rates of the others are corrected, and a role's change is taken back from θ_t.
    In ReZero these are the matrices, because its gates are 0 in θ_0.  Their effect is a product of
    two changes.  The rate is therefore ten times larger here and in the runs that check it.

    seeds: the seeds, or how many, from `seed` on.
    alone: also train each role alone, in `<out>/<study>_alone`, and measure these runs.  Without
        them a role's part after several steps is its change beside the other roles.
    check: also run the corrected configuration, in `<out>/<study>_after`.
    workers, show: see `deepstack.sweep`.

    Raises ConfigError for fewer than two depths or a step below 1.
    """
    chosen, at = (tuple(sorted(set(numbers))) for numbers in (depths, steps))
    if len(chosen) < 2:
        raise ConfigError(f"--depths: found {list(depths)}; allowed two depths or more")
    if not at or at[0] < 1:
        raise ConfigError(f"--steps: found {list(steps)}; allowed steps from 1 on, as in 1,10")
    name = study or f"{config.name or 'runs'}_calibration"
    rate = config.train.lr * SMALL if lr is None else lr
    rates, origin = [rate, rate / 2], "initial"
    first = config.seed
    all_seeds = range(first, first + seeds) if isinstance(seeds, int) else list(seeds)

    def run(
        suffix: str, start: conf.Config, rates: Sequence[float], roles: Sequence[str] = ()
    ) -> list[Run]:
        grid: dict[str, Any] = {"train.trainable": [[role] for role in roles]} if roles else {}
        grid |= {"model.depth": chosen, "train.lr": rates, "seed": all_seeds}
        changes = {
            "train.steps": at[-1],
            "log.attribution_every": 0 if roles else math.gcd(*at),
            "log.attribution_from": origin,
        }
        short = conf.with_overrides(start, SHORT | changes)
        return sweep(short, grid, study=f"{name}_{suffix}", out=out, workers=workers, show=show)

    before = run("before", config, rates)
    measured = Calibration(config=config, depths=chosen, steps=at, before=before)
    if alone:
        moved = measured.updates["role"].unique()
        roles = [role for role in moved if role not in (TOGETHER, HEAD)]
        measured = replace(measured, alone=run("alone", config, rates, roles))
    if measured.unmoved and at[-1] > 1:
        rates, origin = [SECOND * rate for rate in rates], "current"
        measured = replace(measured, second=run("second", measured.corrected, rates))
    if check:
        measured = replace(measured, after=run("after", measured.corrected, rates[:1]))
    return measured
