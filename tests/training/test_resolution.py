"""Steps too small for fp32: a gain of 1 cannot move by less than 2^-23."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.small_runs import interrupted, small
from safetensors.torch import load_file

import deepstack
from deepstack.records import Run
from deepstack.training.schedule import learning_rate

SIZE = 2.0**-23


def trained(tmp_path: Path, **changes: Any) -> Run:
    return deepstack.train(small(**{"train__steps": 3} | changes), out=tmp_path)


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
    lines = [line for line in run.folder.log_path.read_text().splitlines() if "2^-23" in line]
    assert len(lines) == 1 and "norm_gain" in lines[0] and "step 3" in lines[0]
    weights = load_file(run.folder.checkpoint_path(3) / "weights.safetensors")
    gains = [value for key, value in weights.items() if key.endswith("gain")]
    assert gains and all((gain == 1).all() for gain in gains)  # indeed


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({"train__warmup_steps": 4000, "train__lr": 4e-4}, 1),  # lr(1) = 1.0e-7, lr(2) = 2.0e-7
        ({"train__lr_factors": {"norm_gain": 1e-5}, "train__warmup_steps": 0}, 3),
        ({"model__scheme": "norm_former", "train__lr": 1e-8}, 3),  # head scales start at 1
    ],
    ids=["warm-up", "factor", "three roles"],
)
def test_the_steps_are_those_whose_rate_is_too_small(
    changes: dict[str, Any], steps: int, tmp_path: Path
) -> None:
    run = trained(tmp_path, **changes)
    roles = ["final_norm", "norm_gain", "scheme"] if "model__scheme" in changes else ["norm_gain"]
    assert run.columns["below_fp32_resolution"] == dict.fromkeys(roles, steps)
    train = small(**{"train__steps": 3} | changes).train
    rates = [learning_rate(train, t) * train.lr_factor("norm_gain") for t in (1, 2, 3)]
    assert [rate < SIZE for rate in rates] == [t <= steps for t in (1, 2, 3)]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"train__schedule": "cosine"},  # ends near 0
        {"train__optimizer": "sgd", "train__lr": 1e-8},  # the gradient decides
        {"train__lr_factors": {"norm_gain": 0.0}},  # is not meant to move
        {"train__lr_factors": {"q": 1e-6}},  # matrices have small entries
        {"model__norm__gain": False, "train__lr": 1e-8},
        {"train__trainable": ["q", "w1"], "train__lr": 1e-8},
        {"train__steps": 150, "train__warmup_steps": 4000, "train__lr": 4e-4},  # one of 150
    ],
    ids=str,
)
def test_other_runs_have_neither_notice_nor_record(changes: dict[str, Any], tmp_path: Path) -> None:
    run = trained(tmp_path, **changes)
    assert "below_fp32_resolution" not in run.columns
    assert "2^-23" not in run.folder.log_path.read_text()
