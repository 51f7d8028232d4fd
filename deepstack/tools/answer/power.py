"""The number of seeds that would decide a question, by the power of the paired t test."""

from __future__ import annotations

import math

from deepstack.runs import LEAST_SEEDS
from deepstack.tools.answer.looks import COMPARED, FIXED, Looks

POWER = 0.8
MOST_SEEDS = 64  # beyond this number no further runs are advised


def power_of(seeds: int, effect: float, deviation: float, looks: Looks = FIXED) -> float:
    """Return the probability that the interval of a mean over `seeds` excludes 0 at this look.

    effect: true mean.
    deviation: standard deviation of one seed's value.

    From the noncentral t distribution with seeds - 1 degrees of freedom and noncentrality
    √seeds · |effect| / deviation (Cohen 1988, Statistical Power Analysis, section 2.2).
    """
    from scipy.special import nctdtr

    if deviation == 0:
        return float(effect != 0)
    shift = math.sqrt(seeds) * abs(effect) / deviation
    return 1 - float(nctdtr(seeds - 1, shift, looks.critical(seeds)))


def seeds_needed(
    effect: float, deviation: float, power: float = POWER, looks: Looks = FIXED
) -> int | None:
    """Return the least number of seeds with this power; None above MOST_SEEDS or the last look.

    effect and deviation: as measured so far, taken for the true ones.
    """
    if not (math.isfinite(effect) and math.isfinite(deviation)):
        return looks.least
    numbers = COMPARED if looks.repeated else range(LEAST_SEEDS, MOST_SEEDS + 1)
    return next((n for n in numbers if power_of(n, effect, deviation, looks) >= power), None)
