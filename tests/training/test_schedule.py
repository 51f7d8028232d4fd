"""Learning-rate schedules, against their equations written out."""

import math

import pytest
from helpers.small_runs import small

from deepstack.training.schedule import learning_rate


@pytest.mark.parametrize(
    "schedule, after",
    [
        ("constant", 1.0),
        ("linear", (101 - 55) / 91),
        ("cosine", (1 + math.cos(math.pi * 45 / 91)) / 2),
        ("inverse_sqrt", (10 / 55) ** 0.5),
    ],
)
def test_schedules(schedule: str, after: float) -> None:
    train = small(train__steps=100, train__warmup_steps=10, train__schedule=schedule).train
    rates = [learning_rate(train, t) for t in range(1, 101)]
    assert rates[:10] == pytest.approx([train.lr * t / 10 for t in range(1, 11)])
    assert rates[54] == pytest.approx(train.lr * after)
    assert max(rates) == train.lr and min(rates) > 0


def test_inverse_sqrt_has_a_period_of_its_own() -> None:
    """lr sqrt(P/(P + t - 1)) without warm-up: the schedule of T-Fixup's code."""
    settings = {"train__schedule": "inverse_sqrt", "train__decay_period": 4000}
    train = small(train__warmup_steps=0, **settings).train
    for step in (1, 2, 4001, 12_001):
        assert learning_rate(train, step) == train.lr * (4000 / (3999 + step)) ** 0.5
    warm = small(train__warmup_steps=10, **settings).train
    assert learning_rate(warm, 4010) == warm.lr * 0.5**0.5
