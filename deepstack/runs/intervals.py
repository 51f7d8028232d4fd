"""The 95 % intervals of all estimates over seeds: none below three seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from statistics import NormalDist
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from deepstack.base.text import signed_text

if TYPE_CHECKING:
    import numpy as np

LEAST_SEEDS = 3
DRAWS = 1000  # bootstrap samples of the seeds
NORMAL = 1.959964  # the 97.5 % quantile of the normal distribution
NO_INTERVAL = "no interval: fewer than three seeds"
END_QUANTILES = (0.025, 0.975)  # quantiles

Estimate = TypeVar("Estimate")


class Interval(NamedTuple):
    """An estimate with its 95 % interval over seeds; the ends are NaN for fewer than three."""

    value: float
    low: float
    high: float

    def columns(self, name: str, low: str = "", high: str = "") -> dict[str, float]:
        """Return the estimate as columns of a table: name, name_low, name_high."""
        return dict(zip((name, low or f"{name}_low", high or f"{name}_high"), self, strict=True))

    def text(self, digits: int) -> str:
        """Return `−0.52 (−0.61 to −0.44)`, or the value alone without an interval."""
        value, low, high = (signed_text(number, digits) for number in self)
        return value if math.isnan(self.low) else f"{value} ({low} to {high})"


UNKNOWN = Interval(math.nan, math.nan, math.nan)


@cache
def student(count: int, intervals: float = 1) -> float:
    """Return the 97.5 % quantile of Student's t for the mean of so many seeds; NaN below three.

    intervals: number of intervals that hold together with 95 % (Bonferroni): the quantile is
        1 - 0.025/intervals.

    From 100 degrees of freedom on it is the series of Abramowitz and Stegun 1964, 26.7.5, which is
    exact to 1e-6 there: `deepstack train` asks for as many and would import scipy for it alone.
    """
    level, n = 1 - (1 - END_QUANTILES[1]) / intervals, count - 1
    if n >= 100:
        z = NormalDist().inv_cdf(level)
        return (
            z
            + (z**3 + z) / (4 * n)
            + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
            + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
        )
    from scipy.special import stdtrit

    return float(stdtrit(n, level)) if count >= LEAST_SEEDS else math.nan


def over_samples(
    estimate: Callable[[tuple[int, ...]], Estimate], seeds: Sequence[int], draws: int = DRAWS
) -> list[Estimate]:
    """Return an estimate from all seeds, then those from samples of them with replacement.

    estimate: a function of the seeds of a sample, in rising order.  The samples are equal for equal
        seeds.  There are none for fewer than three seeds.
    """
    import numpy as np  # not above: `deepstack ls` reads outcomes and needs no numpy

    whole = tuple(sorted(seeds))
    if len(whole) < LEAST_SEEDS:
        return [estimate(whole)]
    random = np.random.default_rng(0)
    drawn = [tuple(sorted(random.choice(whole, len(whole)).tolist())) for _ in range(draws)]
    known = {sample: estimate(sample) for sample in {whole, *drawn}}  # few seeds: few samples
    return [known[sample] for sample in (whole, *drawn)]


def interval_ends(samples: np.ndarray, seeds: int) -> tuple[np.ndarray, np.ndarray]:
    """Return both ends of the 95 % interval of an estimate from this number of seeds.

    samples: of `over_samples`, the estimate first, along the first axis.  The ends are the 2.5 %
        and 97.5 % quantiles of the bootstrap samples, at t √(n/(n − 1))/1.96 times their distance
        from the estimate, t Student's with n − 1 degrees of freedom.  The bootstrap's variance is
        (n − 1)/n of the unbiased one, and its quantiles follow a normal distribution (Efron and
        Tibshirani 1993, An Introduction to the Bootstrap, sections 5.3 and 12.5).  For a mean of
        normal values this is about Student's interval.  Over 200 made data sets the intervals of
        laws, best rates, their exponents and costs hold the truth in 93 to 98 %, and in 85 to 97 %
        near a limit (test_coverage.py).

    NaN for fewer than three seeds.
    """
    import numpy as np

    value, others = samples[0], samples[1:]
    if seeds < LEAST_SEEDS or not len(others):
        return np.full_like(value, math.nan), np.full_like(value, math.nan)
    factor = student(seeds) * math.sqrt(seeds / (seeds - 1)) / NORMAL
    low, high = np.quantile(others, END_QUANTILES, axis=0, method="nearest")
    with np.errstate(invalid="ignore"):  # an infinite estimate
        return value + factor * (low - value), value + factor * (high - value)


def interval(samples: Sequence[float], seeds: int, *, log: bool = False) -> Interval:
    """Return the first value with the ends of its interval, see `interval_ends`.

    samples: of `over_samples`; NaN is left out.
    log: for positive values, whose interval is taken for their logarithm.
    """
    import numpy as np

    known = [samples[0], *(value for value in samples[1:] if not math.isnan(value))]
    values = np.log(known) if log else np.asarray(known, float)
    low, high = interval_ends(values, seeds)
    both = np.exp([low, high]) if log else np.array([low, high])
    return Interval(samples[0], *both.tolist())
