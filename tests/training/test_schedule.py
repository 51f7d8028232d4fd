"""Learning rates, and steps too small for fp32."""

import math
from pathlib import Path
from typing import Any

import pytest
from helpers.small_runs import interrupted, small, weights_of

import deepstack
from deepstack.base.errors import ConfigError
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


def test_inverse_sqrt_has_a_separate_period() -> None:
    """lr sqrt(P/(P + t - 1)) without warm-up: the schedule of T-Fixup's code."""
    settings = {"train__schedule": "inverse_sqrt", "train__decay_period": 4000}
    train = small(train__warmup_steps=0, **settings).train
    for step in (1, 2, 4001, 12_001):
        assert learning_rate(train, step) == train.lr * (4000 / (3999 + step)) ** 0.5
    warm = small(train__warmup_steps=10, **settings).train
    assert learning_rate(warm, 4010) == warm.lr * 0.5**0.5


@pytest.mark.parametrize("shape", ["linear", "sqrt"])
def test_wsd_keeps_the_rate_and_decays_in_the_last_share_of_the_steps(shape: str) -> None:
    options = {"decay": 0.25, "shape": shape}
    train = small(
        train__steps=109, train__warmup_steps=10, train__schedule="wsd",
        train__schedule_options=options, train__lr=2.0,
    ).train  # fmt: skip
    rates = [learning_rate(train, t) for t in range(1, 111)]
    for s, rate in enumerate(rates[9:]):  # S = 100, of which the last 25 decay
        u = max(s - 75, 0) / 25
        assert rate == pytest.approx(2.0 * (1 - (u if shape == "linear" else math.sqrt(u))))
    assert rates[84] == 2.0 > rates[85]


@pytest.mark.parametrize("schedule", ["linear", "cosine", "wsd"])
def test_a_final_factor_raises_the_end_of_schedules_that_have_one(schedule: str) -> None:
    plain, raised = (
        small(train__steps=50, train__schedule=schedule, train__final_lr_factor=end).train
        for end in (0.0, 0.1)
    )
    for step in range(1, 51):
        rate, lr = learning_rate(plain, step), plain.lr
        if step > plain.warmup_steps:
            rate = 0.1 * lr + 0.9 * rate
        assert learning_rate(raised, step) == pytest.approx(rate)
    assert learning_rate(raised, 51) == pytest.approx(0.1 * plain.lr)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"schedule": "cosin"}, "train.schedule: unknown schedule 'cosin'; did you mean 'cosine'"),
        (
            {"schedule": "constant", "final_lr_factor": 0.1},
            "train.final_lr_factor: found 0.1, unused under train.schedule=constant, which has no",
        ),
        (
            {"schedule": "wsd", "schedule_options": {"decay": 0}},
            "train.schedule_options.decay: found 0; allowed a number above 0 up to 1",
        ),
        ({"schedule_options": {"decay": 0.1}}, "unknown linear option 'decay'"),
    ],
)
def test_schedules_that_do_not_exist_are_refused(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        deepstack.train(small(**{f"train__{k}": v for k, v in settings.items()}), out=tmp_path)
    assert not list(tmp_path.iterdir())


def test_an_option_equal_to_its_default_is_the_same_run(tmp_path: Path) -> None:
    plain = small(train__steps=2, train__schedule="wsd")
    run = deepstack.train(plain, out=tmp_path)
    given = small(train__steps=2, train__schedule="wsd", train__schedule_options={"decay": 0.1})
    assert deepstack.train(given, out=tmp_path).path == run.path
    assert "decay: 0.1" in run.folder.config_path.read_text()


# --- a gain of 1 cannot move by less than 2^-23 ---------------------------------------------------


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "muon"])
def test_steps_below_the_resolution_of_fp32_are_recorded_and_logged_once(
    optimizer: str, tmp_path: Path
) -> None:
    config = small(
        train__steps=3, train__optimizer=optimizer, train__lr=2e-8, train__warmup_steps=0
    )
    interrupted(config, tmp_path, at=2)  # a resumed run keeps the record
    run = deepstack.train(config, out=tmp_path)
    assert run.columns["below_fp32_resolution"] == {"norm_gain": 3}
    (line,) = [x for x in run.folder.log_path.read_text().splitlines() if "2^-23" in x]
    assert "norm_gain" in line and "step 3" in line
    gains = [value for key, value in weights_of(run).items() if key.endswith("gain")]
    assert gains and all((gain == 1).all() for gain in gains)  # indeed


@pytest.mark.parametrize(
    ("changes", "record"),
    [
        # lr(1) = 1.0e-7, lr(2) = 2.0e-7
        ({"train__warmup_steps": 4000, "train__lr": 4e-4}, {"norm_gain": 1}),
        ({"train__steps": 150, "train__warmup_steps": 4000, "train__lr": 4e-4}, None),  # 1 of 150
        (
            {"train__lr_factors": {"norm_gain": 1e-5}, "train__warmup_steps": 0},
            {"norm_gain": 3},
        ),
        (  # head scales start at 1
            {"model__scheme": "norm_former", "train__lr": 1e-8},
            {"final_norm": 3, "norm_gain": 3, "scheme": 3},
        ),
        ({}, None),
        ({"train__schedule": "cosine"}, None),  # ends near 0
        ({"train__optimizer": "sgd", "train__lr": 1e-8}, None),  # the gradient decides
        ({"train__lr_factors": {"norm_gain": 0.0}}, None),  # is not meant to move
        ({"train__lr_factors": {"q": 1e-6}}, None),  # matrices have small entries
        ({"model__norm__gain": False, "train__lr": 1e-8}, None),
        ({"train__trainable": ["q", "w1"], "train__lr": 1e-8}, None),
    ],
    ids=str,
)
def test_steps_with_too_small_a_rate_are_listed(
    changes: dict[str, Any], record: dict[str, int] | None, tmp_path: Path
) -> None:
    """Roles with most of their steps below it: how many steps; None: neither notice nor record."""
    run = deepstack.train(small(**{"train__steps": 3} | changes), out=tmp_path)
    assert run.columns.get("below_fp32_resolution") == record
    assert ("2^-23" in run.folder.log_path.read_text()) == (record is not None)
