"""The faster ways through decoders compute what the plain one computes."""

from __future__ import annotations

from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from helpers.configs import config_with
from helpers.sampling import some
from helpers.small_runs import interrupted, rewrite_tensors

import deepstack

FAMILIES = ("decoder", "encoder_decoder")


config = partial(config_with, {
    "model.depth": 3, "model.d_model": 16, "task.name": "markov", "task.seq_len": 8,
    "train.steps": 6, "train.batch_size": 2, "train.eval_every": 0, "train.eval_batches": 1,
    "log.probe_sequences": 1, "runtime.device": "cpu",
})  # fmt: skip


WAYS: list[dict[str, Any]] = [
    {"runtime__banks": False},
    {"runtime__fused": False},
    {"runtime__recompute_every": 2},
    {"train__lr_factors": {"v": 0.999999, "cross_v": 0.999999}},  # matrices apart
]


@pytest.mark.parametrize(("way", "family"), some(product(WAYS, FAMILIES), 3))
def test_every_way_trains_alike(family: str, way: dict[str, Any], tmp_path: Path) -> None:
    usual = deepstack.train(config(model__family=family), out=tmp_path / "a")
    other = deepstack.train(config(model__family=family, **way), out=tmp_path / "b")
    for column in ("loss", "grad_norm", "model_update"):
        ours, theirs = (run.steps[column].to_numpy() for run in (usual, other))
        if way == {"runtime__banks": False}:
            assert (ours == theirs).all()
        assert ours == pytest.approx(theirs, rel=1e-4)


@pytest.mark.parametrize("roles", [["cross_v"], ["cross_q", "embedding"]])
def test_one_role_of_the_decoder_may_be_trained_alone(roles: list[str], tmp_path: Path) -> None:
    given = config(model__family="encoder_decoder", train__trainable=roles)
    run = deepstack.train(given, out=tmp_path)
    found = run.layers("grad_norm")[1]
    assert (found[:, :3] == 0).all() and (found[:, 3:] > 0).all()


def test_a_checkpoint_from_before_there_were_decoders_goes_on(tmp_path: Path) -> None:
    given = config(model__scheme="pre_ln")
    whole = deepstack.train(given, out=tmp_path / "a")
    folder = interrupted(given, tmp_path / "b", 3)
    rewrite_tensors(
        folder.checkpoint_path(3), lambda key, value: (key.removeprefix("encoder."), value)
    )
    again = deepstack.train(given, out=tmp_path / "b")
    assert (again.path / "steps.csv").read_bytes() == (whole.path / "steps.csv").read_bytes()
