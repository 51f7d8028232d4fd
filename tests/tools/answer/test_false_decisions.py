"""Studies of two settings with equal expected losses: how often a growing study names one better.

The losses come from twelve kinds of distributions whose means are known in closed form; nothing of
the product's statistics is used to make or to judge them.  docs/answer.md has the table, which
`python tests/tools/answer/test_false_decisions.py` prints.
"""

import math
from collections.abc import Callable, Sequence
from itertools import count

import numpy as np
import pytest
from numpy.typing import NDArray

from deepstack.runs.outcomes import Result
from deepstack.tools.answer.grow import Point, grow
from deepstack.tools.answer.looks import growing
from deepstack.tools.answer.sentence import find

SEEDS = 32  # the most of a growing study
STUDIES = 300
NOISE = 0.03  # nats
LOSS, CHANCE = 2.6, 3.4
Losses = NDArray[np.float64]
Draw = Callable[[np.random.Generator], tuple[Losses, Losses]]
"""The deviations of two settings' losses from their common mean, a value for each seed."""


def normal(rng: np.random.Generator, deviation: float = NOISE) -> Losses:
    return rng.normal(0, deviation, SEEDS)


def tight(rng: np.random.Generator) -> Losses:
    return normal(rng, NOISE / 3)


def contaminated(rng: np.random.Generator, share: float, far: float) -> Losses:
    """Normal losses, of which a share lies so many deviations higher."""
    is_bad = rng.random(SEEDS) < share
    return normal(rng) + far * NOISE * (is_bad - share)


def correlated(rng: np.random.Generator) -> tuple[Losses, Losses]:
    """Losses of which a seed shares 90 % of the variance between settings."""
    shared = normal(rng, math.sqrt(0.9) * NOISE)
    return shared + normal(rng, math.sqrt(0.1) * NOISE), shared + normal(
        rng, math.sqrt(0.1) * NOISE
    )


KINDS: dict[str, Draw] = {
    "normal": lambda rng: (normal(rng), normal(rng)),
    "normal, one three times as wide": lambda rng: (tight(rng), normal(rng)),
    "lognormal (σ = 1) beside tight": lambda rng: (
        tight(rng),
        NOISE * (rng.lognormal(0, 1, SEEDS) - math.exp(0.5)),
    ),
    "5 % of seeds 10 deviations worse": lambda rng: (normal(rng), contaminated(rng, 0.05, 10)),
    "20 % of seeds 10 deviations worse": lambda rng: (normal(rng), contaminated(rng, 0.2, 10)),
    "two modes beside tight": lambda rng: (
        tight(rng),
        tight(rng) + 3 * NOISE * rng.choice([-1, 1], SEEDS),
    ),
    "t with 2 degrees beside tight": lambda rng: (tight(rng), NOISE * rng.standard_t(2, SEEDS)),
    "t with 3 degrees beside tight": lambda rng: (tight(rng), NOISE * rng.standard_t(3, SEEDS)),
    "rounded to 0.05 nats, with ties": lambda rng: (
        0.05 * np.round(normal(rng) / 0.05),
        0.05 * np.round(normal(rng) / 0.05),
    ),
    "uniform beside tight": lambda rng: (tight(rng), 2 * NOISE * rng.uniform(-1, 1, SEEDS)),
    "exponential beside tight": lambda rng: (tight(rng), NOISE * (rng.exponential(1, SEEDS) - 1)),
    "seeds share 90 % of the variance": correlated,
}
BEYOND = {
    "5 % of seeds 20 deviations worse": lambda rng: (normal(rng), contaminated(rng, 0.05, 20)),
    "20 % of seeds 20 deviations worse": lambda rng: (normal(rng), contaminated(rng, 0.2, 20)),
}
"""Kinds for which the promise does not hold: rare seeds lie further off than the rule expects."""


def results_of(losses: Sequence[Losses], seeds: Sequence[tuple[str, int]]) -> list[Result]:
    """Results of two settings A and B with so many seeds."""
    return [
        Result(name, name, 6, 1e-3, seed, "done", LOSS + losses["AB".index(name)][seed], CHANCE)
        for name, seed in seeds
    ]


def is_decided(losses: Sequence[Losses]) -> bool:
    """Whether a study that begins with three seeds of each setting ends with a decision."""
    known = [(name, seed) for name in "AB" for seed in range(3)]

    def measure(points: Sequence[Point]) -> list[Result]:
        known.extend((point.setting, point.seed) for point in points)
        return results_of(losses, known)

    found = grow(measure, growing()).found
    return found.decided and "is better than" in found.sentence


def is_decided_by(losses: Sequence[Losses], seeds: int) -> bool:
    """Whether a study of a fixed number of seeds names a better setting."""
    known = [(name, seed) for name in "AB" for seed in range(seeds)]
    return find(results_of(losses, known)).decided


def wrong_decisions(
    kind: str, studies: int, judge: Callable[[Sequence[Losses]], bool] = is_decided
) -> int:
    """The number of studies without a difference that name a better setting."""
    draw = (KINDS | BEYOND)[kind]
    wrong = 0
    for study in range(studies):
        rng = np.random.default_rng((study, *map(ord, kind)))
        pair = draw(rng)
        wrong += judge(pair if study % 2 else pair[::-1])
    return wrong


def test_the_means_of_each_kind_are_equal() -> None:
    for number, (kind, draw) in zip(count(), (KINDS | BEYOND).items(), strict=False):
        rng = np.random.default_rng(number)
        pairs = [draw(rng) for _ in range(4000)]
        differences = np.array([a - b for a, b in pairs]).ravel()
        bound = 5 if "2 degrees" in kind else 4  # its variance is infinite
        error = differences.std() / math.sqrt(len(differences))
        assert abs(differences.mean()) < bound * error, kind


WORST = list(KINDS)[2:6]


def test_skewed_and_contaminated_studies_are_mostly_undecided() -> None:
    """40 studies of the four worst kinds; the slow test has all, with its 7 %."""
    wrong = sum(wrong_decisions(kind, 40) for kind in WORST)
    assert wrong <= 15, wrong


@pytest.mark.slow
def test_at_most_7_percent_of_studies_without_a_difference_are_decided() -> None:
    wrong = {kind: wrong_decisions(kind, STUDIES) for kind in KINDS}
    assert sum(wrong.values()) <= 0.07 * STUDIES * len(KINDS), wrong
    # Each kind too, with 3 standard errors of 300 studies.
    worst = max(wrong.values())
    assert worst <= STUDIES * (0.07 + 3 * math.sqrt(0.07 * 0.93 / STUDIES)), wrong


if __name__ == "__main__":
    for each in KINDS | BEYOND:
        numbers = [
            wrong_decisions(each, STUDIES),
            wrong_decisions(each, STUDIES, lambda pair: is_decided_by(pair, 5)),
        ]
        print(each, *(f"{100 * number / STUDIES:.1f} %" for number in numbers), sep=" | ")
