"""The interval of a margin, after each setting's value was chosen by the losses compared.

`python tests/runs/test_margin_coverage.py` prints the table of docs/answer.md.
"""

import math
import random

import pytest
from helpers.sampling import rotating, some

from deepstack.runs.best import bests_of
from deepstack.runs.margin import margin_of
from deepstack.runs.outcomes import Result

STUDIES = 1000
SPREADS = (0.0, 0.3, 1.0, 3.0)
"""Deviations of settings' and values' true means, in deviations of a seed."""
LOST = 0.2  # probability that a seed of a setting is missing
SHARED = 0.5  # part of a seed's variance that is equal in all settings and values


def holds(
    rng: random.Random, settings: int, values: int, seeds: int, spread: float, lost: float = 0.0
) -> bool:
    """Simulate a study; return whether the interval holds the true difference.

    This is the difference of the true means of rival and leader at the values that were chosen.

    lost: probability that a seed of a setting and value is missing; without an interval it holds.
    """
    means: dict[tuple[str, float], float] = {}
    noise = [rng.gauss(0, SHARED**0.5) for _ in range(seeds)]
    results = []
    for name in "ABCDE"[:settings]:
        level = rng.gauss(0, spread)
        for rate in range(1, values + 1):
            mean = level + (rng.gauss(0, spread) if values > 1 else 0.0)
            means[name, rate] = mean
            for seed in range(seeds):
                loss = 2 + 0.01 * (mean + noise[seed] + rng.gauss(0, (1 - SHARED) ** 0.5))
                if lost and rng.random() < lost:
                    continue
                results.append(Result(name, name, 6, rate, seed, "done", loss, 4.0))
    found = margin_of(bests_of(results))
    if lost and (found is None or not math.isfinite(found.gap.low)):
        return True
    assert found is not None
    leader, rival = ((one.label, one.value) for one in (found.leader, found.rival))
    return found.gap.low <= 0.01 * (means[rival] - means[leader]) <= found.gap.high


def coverage(
    settings: int,
    values: int,
    seeds: int,
    spread: float,
    studies: int = STUDIES,
    lost: float = 0.0,
) -> float:
    """Return the share of simulated studies whose interval holds the true difference."""
    rng = random.Random(f"{settings} {values} {seeds} {spread}")
    held = [holds(rng, settings, values, seeds, spread, lost) for _ in range(studies)]
    return sum(held) / studies


@pytest.mark.parametrize(("settings", "values", "seeds"), [(2, 1, 3), (2, 3, 5), (3, 5, 3)])
def test_the_interval_of_a_margin_holds_after_the_choice_of_rates(
    settings: int, values: int, seeds: int
) -> None:
    """250 studies: 0.95 would lie below 0.91 once in 500 tries."""
    assert coverage(settings, values, seeds, 0.3, 250) >= 0.91


@pytest.mark.parametrize("spread", some(SPREADS, 4, 1))
@pytest.mark.parametrize("settings", [2, 3])
def test_it_holds_where_a_fifth_of_the_seeds_is_missing(settings: int, spread: float) -> None:
    """250 studies of twelve seeds, of which all but a few have an interval."""
    assert coverage(settings, 1, 12, spread, 250, LOST) >= 0.91


@pytest.mark.parametrize("spread", rotating(SPREADS, len(SPREADS)))
@pytest.mark.parametrize("seeds", [3, 5, 12])
@pytest.mark.parametrize("values", [1, 3, 5])
@pytest.mark.parametrize("settings", [2, 3, 5])
def test_it_holds_for_every_number_of_settings_values_and_seeds(
    settings: int, values: int, seeds: int, spread: float
) -> None:
    """0.93, less three standard errors of the simulation."""
    assert coverage(settings, values, seeds, spread, 400) >= 0.93 - 0.033


if __name__ == "__main__":
    for settings in (2, 3, 5):
        for values in (1, 3, 5):
            row = [
                [coverage(settings, values, seeds, spread) for spread in SPREADS]
                for seeds in (3, 5, 12)
            ]
            cells = [f"{100 * min(one):.1f} to {100 * max(one):.1f} %" for one in row]
            print("|", " | ".join([str(settings), str(values), *cells]), "|", flush=True)
    for settings in (2, 3, 5):
        shares = [100 * coverage(settings, 1, 12, spread, lost=LOST) for spread in SPREADS]
        print(f"{settings} settings, seeds missing: {min(shares):.1f} to {max(shares):.1f} %")
