"""What must hold on a GPU; skipped where there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import deepstack
from deepstack.config import Config, with_overrides
from deepstack.errors import Interrupted
from deepstack.records import Run
from deepstack.schemes import SCHEMES

pytestmark = pytest.mark.gpu

BASE = {
    "model.depth": 6, "model.d_model": 32, "task.seq_len": 32, "train.batch_size": 8,
    "train.steps": 24, "train.eval_every": 8, "runtime.device": "cuda",
}  # fmt: skip


def config(**changes: Any) -> Config:
    return with_overrides(Config(), BASE | {k.replace("__", "."): v for k, v in changes.items()})


def log_of(run: Run) -> bytes:
    return (run.path / "steps.csv").read_bytes()


@pytest.mark.parametrize("name", SCHEMES.names())
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_same_config_twice_is_the_same_bytes(name: str, precision: str, tmp_path: Path) -> None:
    given = config(model__scheme=name, train__precision=precision)
    one = deepstack.train(given, out=tmp_path / "a")
    two = deepstack.train(given, out=tmp_path / "b")
    assert one.state == two.state == "done"
    assert log_of(one) == log_of(two)


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "sgd"])
def test_banks_are_plain_parameters_bit_for_bit(optimizer: str, tmp_path: Path) -> None:
    given = config(train__optimizer=optimizer, train__momentum=0.9, train__weight_decay=0.1)
    banks = deepstack.train(given, out=tmp_path / "a")
    plain = deepstack.train(with_overrides(given, {"runtime.banks": False}), out=tmp_path / "b")
    assert log_of(banks) == log_of(plain)


@pytest.mark.parametrize("at", [3, 11, 19])
def test_interrupted_and_continued_is_uninterrupted(at: int, tmp_path: Path) -> None:
    whole = deepstack.train(config(model__dropout=0.1), out=tmp_path / "a")
    calls = iter(range(1, 10**6))
    with pytest.raises(Interrupted):
        deepstack.train(
            config(model__dropout=0.1),
            out=tmp_path / "b",
            stop=lambda: 15 if next(calls) >= at else None,
        )
    assert log_of(deepstack.train(config(model__dropout=0.1), out=tmp_path / "b")) == log_of(whole)


def test_divergence_is_found_though_rows_are_read_late(tmp_path: Path) -> None:
    run = deepstack.train(
        config(train__lr=1e5, train__optimizer="sgd", train__clip=None), out=tmp_path
    )
    assert run.state == "diverged"
    assert run.status["step"] == run.steps["step"].iloc[-1] < 24
