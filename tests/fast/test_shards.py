"""Shards of a batch: its gradients, in parts that any number of threads computes."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from helpers.kernels import NEEDS_ONEDNN
from helpers.small_runs import data_of, small

import deepstack
from deepstack.base.errors import ConfigError
from deepstack.cli.check_command import facts_of
from deepstack.config import Config, config_hash, with_overrides
from deepstack.fast import make_step
from deepstack.tasks import task_of
from deepstack.training import make_optimizer, mean_loss, to_device

WIDE = {"model__d_model": 64, "train__batch_size": 32}
BY_ONEDNN = WIDE | {"runtime__products": "onednn"}  # by default the processor decides


def gradients(config: Config) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of the first batch and all its gradients."""
    task = task_of(config)
    built = deepstack.build_model(config, vocab_size=task.vocab_size)
    step = make_step(
        lambda inputs, targets, *count: mean_loss(built.model(inputs), targets, *count),
        built,
        make_optimizer(config.train, built),
        config.train.model_copy(update={"clip": None}),  # clipping changes gradients in place
    )
    batch = to_device(task.train_batch(1, config.train.batch_size), torch.device("cpu"))
    loss = step(*batch, 0.0).loss
    return loss, torch.cat([bank.gradients().flatten() for bank in built.banks])


@pytest.mark.parametrize("shards", [2, 4])
def test_shards_have_the_loss_and_the_gradient_of_the_batch(shards: int) -> None:
    loss, whole = gradients(small())
    loss_of_shards, added = gradients(small(train__shards=shards))
    torch.testing.assert_close(loss_of_shards, loss, rtol=1e-6, atol=0)
    assert 0 < float((added - whole).norm() / whole.norm()) < 1e-6


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param(
            {
                "train__spectral_penalty": 0.1,
                "model__family": "encoder_decoder",
                "task__name": "copy",
            },
            marks=pytest.mark.slow,
        ),
        pytest.param(BY_ONEDNN, marks=[NEEDS_ONEDNN, pytest.mark.slow]),
        WIDE | {"train__precision": "bf16"},
    ],
    ids=str,
)
def test_any_number_of_threads_gives_the_same_bytes(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    config = small(train__shards=4, train__steps=6, model__depth=2, **changes)
    executors = [(False, 2), ("python", 1), ("python", 3), ("native", 1), ("native", 3)]
    runs = [
        deepstack.train(
            with_overrides(config, {"runtime.replay": replay, "runtime.threads": threads}),
            out=tmp_path / f"{replay}-{threads}",
        )
        for replay, threads in executors
    ]
    assert len({str(data_of(run)) for run in runs[:3]}) == 1
    assert len({str(data_of(run)) for run in runs[3:]}) == 1
    assert {run.meta["environment"]["threads"] for run in runs} == {1}
    if changes is BY_ONEDNN:
        assert runs[0].meta["environment"]["products"] == "onednn_linear"
    one = deepstack.train(with_overrides(config, {"train.shards": 1}), out=tmp_path)
    loss = runs[0].steps["loss"]
    assert not loss.equals(one.steps["loss"])
    torch.testing.assert_close(loss.iloc[-1], one.steps["loss"].iloc[-1], rtol=1e-2, atol=0)


@pytest.mark.parametrize(("dropout", "threads"), [(0.0, 2), (0.0, 1), (0.1, 2)])
def test_threads_replay_the_shards_unless_they_draw_numbers(
    dropout: float, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools = Mock(wraps=ThreadPoolExecutor)
    monkeypatch.setattr("deepstack.fast.replay.ThreadPoolExecutor", pools)
    sizes = {"train__steps": 5, "model__depth": 1, "model__dropout": dropout}
    replayed = {"runtime__replay": True, "runtime__threads": threads}
    deepstack.train(small(train__shards=2, **replayed, **sizes), out=tmp_path)
    assert pools.called == (dropout == 0 and threads == 2)


def test_an_error_in_a_thread_ends_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fails(self: Any) -> None:
        raise RuntimeError("a shard failed")

    monkeypatch.setattr("deepstack.fast.replay.Bound.run", fails)
    given = small(train__shards=2, runtime__replay=True, runtime__threads=2)
    with pytest.raises(RuntimeError, match="a shard failed"):
        deepstack.train(given, out=tmp_path)


def test_shards_are_refused_where_they_are_no_equal_parts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train.shards.*found 3; allowed a divisor of"):
        small(train__shards=3)
    crossing = small(train__shards=2, model__norm__kind="batch")
    for begin in (facts_of, lambda config: deepstack.train(config, out=tmp_path)):
        with pytest.raises(ConfigError, match=r"which needs one process and train\.shards=1"):
            begin(crossing)


def test_shards_count_in_the_hash() -> None:
    assert config_hash(small()) != config_hash(small(train__shards=2))
