"""Learning-rate schedules: one class each, lr(t) after the warm-up as a function of the step."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal, NamedTuple

from pydantic import Field

from deepstack.base.errors import ConfigError
from deepstack.base.kinds import Definition, Kind
from deepstack.config import Config, Train


class AfterWarmup(NamedTuple):
    """A step after the warm-up.

    lr: the rate after the warm-up, `train.lr`.
    s: steps since the end of the warm-up, from 0 on.
    S: the s one step after the last of the run.
    train: all settings of the training.
    """

    lr: float
    s: int
    S: int
    train: Train


SCHEDULES: Kind[Schedule] = Kind("schedule", "train.schedule")


class Schedule(Definition, kind=SCHEDULES):
    """The learning rate after the warm-up; each schedule is a subclass with a name.

    ends: whether the rate reaches 0 one step after the last.  Such a rate depends on the number of
        steps, and `train.final_lr_factor` raises its end.
    """

    ends: ClassVar[bool] = False

    def rate(self, at: AfterWarmup) -> float:
        """Return the rate of a step, lr at s = 0."""
        raise NotImplementedError

    @classmethod
    def check(cls, config: Config) -> None:
        """Raise ConfigError for a final rate of a schedule that has no end."""
        if (factor := config.train.final_lr_factor) and not cls.ends:
            able = " or ".join(name for name, schedule in SCHEDULES.items() if schedule.ends)
            raise ConfigError(
                f"train.final_lr_factor: found {factor:g}, unused under train.schedule={cls.name}, "
                f"which has no end; allowed 0, or train.schedule={able}",
                key="train.final_lr_factor",
            )


class Constant(Schedule, name="constant"):
    """lr."""

    def rate(self, at: AfterWarmup) -> float:
        return at.lr


class Linear(Schedule, name="linear"):
    """lr (1 - s/S)."""

    ends = True

    def rate(self, at: AfterWarmup) -> float:
        return at.lr * (at.S - at.s) / at.S


class Cosine(Schedule, name="cosine"):
    """lr (1 + cos(pi s/S))/2.  Loshchilov & Hutter 2017, arXiv:1608.03983, equation 5."""

    ends = True

    def rate(self, at: AfterWarmup) -> float:
        return at.lr * (1 + math.cos(math.pi * at.s / at.S)) / 2


class InverseSqrt(Schedule, name="inverse_sqrt"):
    """lr sqrt(P/(P + s)), P = `train.decay_period`, or the steps of the warm-up.

    P = w gives sqrt(w/t): Vaswani et al. 2017, arXiv:1706.03762, section 5.3; w = 1 and P = 4000:
    T-Fixup's code.
    """

    def rate(self, at: AfterWarmup) -> float:
        period = at.train.decay_period or max(at.train.warmup_steps, 1)
        return at.lr * (period / (period + at.s)) ** 0.5


class WarmupStableDecay(Schedule, name="wsd"):
    """lr, then lr f(u) in the last share `decay` of the steps, u from 0 to 1.

    Warm-up, stable, decay: Hu et al. 2024, arXiv:2404.06395, section 4.2.  Their f is any
    decreasing function, in their runs an exponential.  Here f(u) = 1 - u, or 1 - sqrt(u) as in
    Hägele et al. 2024, arXiv:2405.18392.
    """

    ends = True
    decay: Annotated[float, Field(gt=0, le=1, description="share of the steps that decay")] = 0.1
    shape: Annotated[Literal["linear", "sqrt"], Field(description="1 - u or 1 - sqrt(u)")] = (
        "linear"
    )

    def rate(self, at: AfterWarmup) -> float:
        length = self.decay * at.S
        u = max(1 - (at.S - at.s) / length, 0.0)
        return at.lr * (1 - (u if self.shape == "linear" else u**0.5))
