"""The error of an answer is shared between looks, rates, depths and exponents: known answers.

Levels come from studies that are simulated here, quantiles from scipy.
"""

import math
import re
from collections.abc import Sequence
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats
from scipy.special import stdtr

from deepstack.runs.outcomes import Result
from deepstack.tools.answer.looks import growing
from deepstack.tools.answer.sentence import find

LOOKS = (6, 8, 12, 16, 24, 32)
"""Seeds at which a growing study compares losses (docs/answer.md)."""
CHANCE = 3.25
Losses = Sequence[float] | NDArray[np.float64]


def seeds_of(setting: str, losses: Losses, rate: float = 1e-3, depth: int = 6) -> list[Result]:
    """Results of seeds 0, 1, 2, … with these losses; an infinite one diverged."""
    return [
        Result(setting, setting, depth, rate, seed, "done", float(loss), CHANCE)
        if math.isfinite(loss)
        else Result(setting, setting, depth, rate, seed, "diverged", None, CHANCE)
        for seed, loss in enumerate(losses)
    ]


def numbers(n: int, mean: float, deviation: float) -> NDArray[np.float64]:
    """Return n values with exactly this mean and this standard deviation of a sample."""
    drawn = np.random.default_rng(n).normal(size=n)
    return mean + deviation * (drawn - drawn.mean()) / drawn.std(ddof=1)


def ends_of(text: str) -> tuple[float, float]:
    """Return the ends of the first interval in a text."""
    match = re.search(r"(−?[\d.]+) to (−?[\d.]+),", text)
    assert match is not None, text
    low, high = (float(end.replace("−", "-")) for end in match.groups())
    return low, high


@cache
def smallest_levels() -> NDArray[np.float64]:
    """The least two-sided level of Student's t at any look, of 100,000 studies of normal values."""
    draws = np.random.default_rng(1).standard_normal((100_000, LOOKS[-1]))
    sums, squares = np.cumsum(draws, axis=1), np.cumsum(draws**2, axis=1)
    levels = []
    for n in LOOKS:
        mean = sums[:, n - 1] / n
        error = np.sqrt((squares[:, n - 1] - n * mean**2) / (n - 1) / n)
        levels.append(2 * stdtr(n - 1, -np.abs(mean / error)))
    return np.min(levels, axis=0)


def half_width(n: int, error: float) -> float:
    """Return half of an interval over n seeds in standard errors, over all looks together.

    Student's t at the level that all looks reach together with this error; at least as wide as one
    further seed 20 deviations away would move the mean: (n m - 20 s + m)/(n + 1) = 0.
    """
    level = float(np.quantile(smallest_levels(), error))
    return max(float(stats.t.ppf(1 - level / 2, n - 1)), 20 * math.sqrt(n) / (n + 1))


def test_the_rates_of_the_leader_share_the_error_of_the_comparison() -> None:
    """The comparison has 4 of 5 %, and each of sixteen rates a sixteenth of it."""
    n, error = 32, 0.141
    rates = [1e-3 * 1.2**i for i in range(16)]
    results = seeds_of("B", 2.8 + numbers(n, 0.0, error))
    for i, rate in enumerate(rates):
        results += seeds_of("A", np.full(n, 2.7 if i == 7 else 3.0), rate)
    sentence = find(results, looks=growing()).sentence
    assert "99.8 % interval over 6 looks" in sentence  # 1 - 0.04/16
    low, high = ends_of(sentence)
    half = half_width(n, 0.04 / 16) * error / math.sqrt(n)
    assert (high - low) / 2 == pytest.approx(half, rel=0.03)
    assert half > 1.1 * half_width(n, 0.04) * error / math.sqrt(n)


def bowls(setting: str, exponents: Losses, best: float = 4e-3) -> list[Result]:
    """Results at N = 6 and 24, three rates each: parabolas in ln lr, a power of N for each seed."""
    results: list[Result] = []
    for depth in (6, 24):
        for rate in (1e-3, 4e-3, 16e-3):
            at = [math.log(best) + one * math.log(depth / 6) for one in exponents]
            results += seeds_of(setting, [2 + (math.log(rate) - x) ** 2 for x in at], rate, depth)
    return results


def test_intervals_of_several_exponents_hold_together() -> None:
    """Bonferroni: of four exponents each has the level 1 - 0.05/4."""
    exponents = numbers(4, 0.1, 0.2)
    alone = find(bowls("A", exponents))
    beside = find([one for name in "ABCD" for one in bowls(name, exponents)])
    assert "The intervals of the 4 exponents hold together with 95 %." in beside.sure
    widths = [high - low for low, high in (ends_of(one.sentence) for one in (alone, beside))]
    quantiles = stats.t.ppf([1 - 0.025, 1 - 0.025 / 4], 3)
    assert widths[1] / widths[0] == pytest.approx(quantiles[1] / quantiles[0], rel=0.04)


def test_settings_without_an_exponent_yet_share_the_error_of_a_growing_study() -> None:
    """Later looks give them one, so that the error of all looks is divided by all settings."""
    exponents, error = numbers(6, 0.1, 0.2), 0.002
    results = bowls("A", exponents)
    alone = find(results, looks=growing(error))
    results += [one for name in "BCD" for one in bowls(name, exponents, best=64e-3)]  # at an edge
    beside = find(results, looks=growing(error))
    widths = [high - low for low, high in (ends_of(one.sentence) for one in (alone, beside))]
    expected = half_width(6, error / 4) / half_width(6, error)
    assert widths[1] / widths[0] == pytest.approx(expected, rel=0.06) and expected > 1.2


def depths_inside(shallow: float, deep: float) -> int:
    """Return how many depths divide a range, each in two at its middle, into parts of 2 at most."""
    if deep <= 2 * shallow:
        return 0
    middle = math.sqrt(shallow * deep)
    return 1 + depths_inside(shallow, middle) + depths_inside(middle, deep)


@pytest.mark.parametrize("rates", [1, 4])
@pytest.mark.parametrize("depths", [(6, 12), (6, 48), (6, 3000), (6, 48, 1000)])
@pytest.mark.parametrize("adds", [False, True])
def test_depths_and_rates_share_the_error_of_who_learns(
    rates: int, depths: tuple[int, ...], adds: bool
) -> None:
    """A lead of k by chance has the probability 4^-k; all of them together have 1 of 5 %.

    Depths that the study may add count from the beginning.
    """
    results = [
        one
        for depth in depths
        for i in range(rates)
        for one in seeds_of("A", [2.8, 2.81], 1e-3 * 2**i, depth)
    ]
    results = [one._replace(task=(("task.n", str(one.depth)),)) for one in results]  # not compared
    found = find(results, looks=growing(depths=adds))
    if rates > 1:  # then the question is whether the best rate moves
        results = [one for one in results if one.rate == 1e-3 or one.depth == depths[0]]
        found = find(results, looks=growing(depths=adds))
    [lead] = re.findall(r"once a lead of (\d+) seeds", " ".join(found.sure))
    cells = rates + len(depths) - 1
    if adds:
        inside = [depths_inside(a, b) for a, b in pairwise(depths)]
        cells += inside[0] * rates + sum(inside[1:])
    assert int(lead) == next(k for k in range(20) if cells * 0.25**k <= 0.2 * 0.05)


# --- how many seeds would show a difference -------------------------------------------------------


def power_at(n: int, effect: float, error: float = 0.04) -> float:
    """Return the share of 20,000 studies of n normal differences whose interval is above 0.

    effect: the mean difference over the deviation.
    """
    draws = np.random.default_rng(n).normal(effect, 1, (20_000, n))
    ends = draws.mean(axis=1) - half_width(n, error) * draws.std(axis=1, ddof=1) / math.sqrt(n)
    return float(np.mean(ends > 0))


@pytest.mark.parametrize("effect", [0.95, 1.15, 1.5, 2.4])
def test_the_further_seeds_show_the_difference_at_one_look_of_a_growing_study(
    effect: float,
) -> None:
    results = seeds_of("A", np.full(6, 2.7)) + seeds_of("B", numbers(6, 2.7 + 0.03 * effect, 0.03))
    more = find(results, looks=growing()).more
    enough = next(n for n in LOOKS if power_at(n, effect) >= 0.8)
    assert more is not None and more.seeds == enough - 6
    assert enough > 10  # as a study of a fixed number needs at 0.95


@pytest.mark.parametrize(("n", "effect"), [(6, 0.1), (8, 0.1), (8, 0.33), (8, 0.42), (16, 0.42)])
def test_a_growing_study_ends_where_its_last_look_would_hardly_show_more(
    n: int, effect: float
) -> None:
    """From eight seeds on, if the last look shows it in less than one of ten studies."""
    results = seeds_of("A", np.full(n, 2.7)) + seeds_of("B", numbers(n, 2.7 + 0.03 * effect, 0.03))
    goes_on = bool(find(results, looks=growing()).batch)
    assert goes_on == (n < 8 or power_at(32, effect) >= 0.1)
