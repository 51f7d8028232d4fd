"""Steps too small for fp32: a gain of 1 cannot move by less than 2^-23."""

from pathlib import Path
from typing import Any

import pytest
from helpers.small_runs import interrupted, small, weights_of

import deepstack


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
def test_the_steps_are_those_whose_rate_is_too_small(
    changes: dict[str, Any], record: dict[str, int] | None, tmp_path: Path
) -> None:
    """Roles with most of their steps below it: how many steps; None: neither notice nor record."""
    run = deepstack.train(small(**{"train__steps": 3} | changes), out=tmp_path)
    assert run.columns.get("below_fp32_resolution") == record
    assert ("2^-23" in run.folder.log_path.read_text()) == (record is not None)
