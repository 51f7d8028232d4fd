"""A replayed step is the step itself: the same numbers, bit for bit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from sample import some
from torch import Tensor

import deepstack
from deepstack.config import Config, with_overrides
from deepstack.records import Run
from deepstack.schemes import SCHEMES
from deepstack.speed import Measured, replaying
from deepstack.speed.replay import Recording, bound, layout, padded, writing

BASE = {
    "model.depth": 4, "model.d_model": 24, "model.n_heads": 3, "task.name": "markov",
    "task.seq_len": 12, "train.batch_size": 4, "train.steps": 12, "train.eval_every": 5,
    "train.eval_batches": 1, "train.clip": 0.1, "log.layers_every": 4,
    "runtime.device": "cpu", "runtime.threads": 1,
}  # fmt: skip


def config(**changes: Any) -> Config:
    return with_overrides(Config(), BASE | {k.replace("__", "."): v for k, v in changes.items()})


def both(given: Config, folder: Path) -> list[Run]:
    """The run with its steps made one by one, and with all but two of them replayed."""
    runs = []
    for replay in (False, True):
        own = with_overrides(given, {"runtime.replay": replay})
        runs.append(deepstack.train(own, out=folder / str(replay)))
        assert runs[-1].meta["environment"]["replayed"] is replay
    return runs


def assert_equal(one: Run, two: Run) -> None:
    """All logs and the weights, byte for byte."""
    for name in ("steps.csv", "evals.csv"):
        assert (one.path / name).read_bytes() == (two.path / name).read_bytes(), name
    assert len(one.steps) == 12
    weights = [sorted(run.path.rglob("weights.safetensors")) for run in (one, two)]
    assert len(weights[0]) == 1
    assert weights[0][0].read_bytes() == weights[1][0].read_bytes()


KINDS: list[dict[str, Any]] = [
    {"train__optimizer": "sgd", "train__momentum": 0.9},
    {"train__optimizer": "adam", "train__clip": None},
    {"model__dropout": 0.1},
    {"train__precision": "bf16"},
    {"runtime__recompute_every": 2},
    {"runtime__banks": False},
    {"runtime__fused": False},
    {"model__norm__kind": "batch"},
    {"model__norm__kind": "rms"},
    {"model__norm__kind": "dynamic_tanh"},
    {"train__spectral_penalty": 0.1},
    {"model__family": "decoder"},
    {"model__family": "encoder_decoder", "task__name": "copy"},
    {"model__head": "bert"},
    {"train__trainable": ["q", "v", "bias"]},
    {"task__name": "copy"},
    {"train__lr_factors": {"w1": 0.5}},
    {"model__positions": "sinusoidal"},
]


@pytest.mark.parametrize("name", SCHEMES.names())
def test_every_scheme_replayed_gives_the_same_bytes(name: str, tmp_path: Path) -> None:
    assert_equal(*both(config(model__scheme=name), tmp_path))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(str, kind.values())))
def test_every_kind_of_step_replayed_gives_the_same_bytes(
    kind: dict[str, Any], tmp_path: Path
) -> None:
    assert_equal(*both(config(**kind), tmp_path))
