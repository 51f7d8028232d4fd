"""Micro-batches: the gradient of a batch, added up in parts that follow one another."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.small_runs import data_of, interrupted, small

import deepstack
from deepstack.base.errors import ConfigError
from deepstack.config import Config, config_hash, memory_terms, with_overrides
from deepstack.fast import FastPaths, enable_fast_paths, make_step
from deepstack.fast.accelerate import step_recorder
from deepstack.tasks import IGNORE, task_of
from deepstack.training import make_optimizer, mean_loss, to_device


def gradients_of(config: Config, replay: str = "") -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Return loss and gradients of the first batch by deepstack's step, and the built model."""
    task = task_of(config)
    built = deepstack.build_model(config, vocab_size=task.vocab_size)
    paths = FastPaths(
        True, False, False, bool(replay), executor="C++" if replay == "native" else ""
    )
    enable_fast_paths(built.model, paths, print, config)
    step = make_step(
        lambda inputs, targets, *count: mean_loss(built.model(inputs), targets, *count),
        built,
        make_optimizer(config.train, built, capturable=bool(replay)),
        config.train.model_copy(update={"clip": None}),
        capture=step_recorder(built.model, config, paths, print, 1),
    )
    batch = to_device(task.train_batch(1, config.train.batch_size), torch.device("cpu"))
    loss = step(*batch, 0.0).loss.clone()
    return loss, torch.cat([bank.gradients().flatten() for bank in built.banks]), (built, batch)


@pytest.mark.parametrize("replay", ["", "python", "native"])
def test_micro_batches_equal_accumulation_in_plain_pytorch(replay: str) -> None:
    config = small(train__micro_batches=4, train__optimizer="sgd", train__lr=1e-9, model__depth=2)
    loss, gradients, (built, (inputs, targets)) = gradients_of(config, replay)
    parameters = list(built.model.parameters())
    total, positions = 0.0, (targets != IGNORE).sum()
    sums = [torch.zeros_like(p) for p in parameters]
    with built.model.unfused():
        for x, y in zip(inputs.chunk(4), targets.chunk(4), strict=True):
            logits = built.model(x).flatten(0, 1)
            part = F.cross_entropy(logits, y.flatten(), ignore_index=IGNORE, reduction="sum")
            part = part / positions
            total += part.item()
            for sum_, more in zip(sums, torch.autograd.grad(part, parameters), strict=True):
                sum_ += more
    for parameter, sum_ in zip(parameters, sums, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, sum_, rtol=1e-4, atol=1e-6)
    assert loss.item() == pytest.approx(total, rel=1e-6)
    _, whole, _ = gradients_of(with_overrides(config, {"train.micro_batches": 1}), replay)
    assert 0 < float((gradients - whole).norm() / whole.norm()) < 1e-6


def test_micro_batches_and_shards_name_one_experiment(tmp_path: Path) -> None:
    micro = small(train__micro_batches=2, train__steps=3, model__depth=2, runtime__threads=1)
    shards = with_overrides(micro, {"train.micro_batches": 1, "train.shards": 2})
    assert config_hash(micro) == config_hash(shards) != config_hash(small())
    one, two = (deepstack.train(c, out=tmp_path / n) for c, n in ((micro, "a"), (shards, "b")))
    assert data_of(one) == data_of(two)
    before = data_of(two)
    assert deepstack.train(micro, out=tmp_path / "b").path == two.path and data_of(two) == before


def test_only_shards_in_threads_need_further_gradients() -> None:
    def terms(**changes: Any) -> dict[str, int]:
        return memory_terms(small(**{"train__batch_size": 8, "runtime__device": "cpu"} | changes))

    once = terms(train__batch_size=2)
    micro = terms(train__micro_batches=4)
    names = ("gradients", "activations", "logits, their softmax and their gradient")
    assert [micro[name] for name in names] == [once[name] for name in names]
    replayed = {"runtime__replay": True, "runtime__threads": 2}
    assert terms(train__shards=4, **replayed)["gradients"] == 4 * once["gradients"]
    assert terms(train__shards=4, runtime__replay=False)["gradients"] == once["gradients"]
    assert terms(train__micro_batches=4, **replayed)["gradients"] == once["gradients"]


def test_unequal_and_double_parts_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"train.micro_batches.*found 3; allowed a divisor of"):
        small(train__micro_batches=3)
    with pytest.raises(ConfigError, match=r"found 2 beside train.micro_batches=4; allowed one of"):
        small(train__micro_batches=4, train__shards=2)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"model__dropout": 0.1}], ids=str)
@pytest.mark.parametrize("replay", [False, "python", "native"])
def test_a_run_in_micro_batches_resumes_and_evaluates_as_the_whole_batch(
    changes: dict[str, Any], replay: Any, tmp_path: Path
) -> None:
    config = small(train__micro_batches=2, runtime__replay=replay, **changes)
    config = with_overrides(config, {"task.seq_len": 1100, "train.steps": 4, "model.depth": 1})
    run = deepstack.train(config, out=tmp_path / "once")
    interrupted(config, tmp_path / "twice", at=2)
    again = deepstack.train(config, out=tmp_path / "twice")
    assert data_of(run) == data_of(again)
    if not changes:
        whole = deepstack.train(with_overrides(config, {"train.micro_batches": 1}), out=tmp_path)
        torch.testing.assert_close(
            run.evals.loss.iloc[-1], whole.evals.loss.iloc[-1], rtol=1e-5, atol=0
        )
