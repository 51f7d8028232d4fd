"""Looped stacks: repeated layers share parameters, whose gradients are summed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.command_line import typed
from helpers.small_runs import data_of, small, weights_of
from torch.func import functional_call

import deepstack
from deepstack.errors import ConfigError
from deepstack.model import build_model
from deepstack.tasks import task_of

LOOPED = {
    "model__scheme": "looped", "model__depth": 6, "model__unique_layers": 2, "train__steps": 4,
    "task__name": "markov", "task__seq_len": 8, "task__states": 5,
}  # fmt: skip
SGD = {"train__optimizer": "sgd", "train__clip": None, "train__schedule": "constant",
       "train__warmup_steps": 0, "train__lr": 0.3}  # fmt: skip


def tied_sgd(config: Any) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Train two layers that a plain loop runs three times; return weights and gradient norms."""
    task, model = task_of(config), build_model(config, vocab_size=6).model
    prefix, unique = "encoder.layers.", config.model.unique_layers
    named = {name: p.detach().clone() for name, p in model.named_parameters()}
    free = {
        name: p.requires_grad_()
        for name, p in named.items()
        if not name.startswith(prefix) or int(name.split(".")[2]) < unique
    }

    def source(name: str) -> str:
        if not name.startswith(prefix):
            return name
        layer, rest = name.removeprefix(prefix).split(".", 1)
        return f"{prefix}{int(layer) % unique}.{rest}"

    norms = []
    for step in range(1, config.train.steps + 1):
        batch = task.train_batch(step, config.train.batch_size)
        tied = {name: free[source(name)] for name in named}
        logits = functional_call(model, tied, (torch.from_numpy(batch.inputs),))
        loss = F.cross_entropy(logits.flatten(0, 1), torch.from_numpy(batch.targets).flatten())
        gradients = torch.autograd.grad(loss, list(free.values()))
        norms.append(float(torch.stack([g.norm() for g in gradients]).norm()))
        with torch.no_grad():
            for p, g in zip(free.values(), gradients, strict=True):
                p -= config.train.lr * g
    return {name: free[source(name)].detach() for name in named}, norms


def test_training_is_that_of_shared_parameters(tmp_path: Path) -> None:
    config = small(**LOOPED | SGD)
    run = deepstack.train(config, out=tmp_path)
    wanted, norms = tied_sgd(config)
    assert run.steps["grad_norm"].to_numpy() == pytest.approx(norms, rel=1e-4)
    got = weights_of(run)
    for name, value in wanted.items():
        side, _, rest = name.partition("layers.")
        layer, _, rest = rest.partition(".")
        row = got[f"{side}layers.{rest}"][int(layer)] if rest else got[name][0]
        assert torch.allclose(row, value, atol=2e-5), name


@pytest.mark.parametrize(
    "settings",
    [
        {"train__steps": 55},  # replayed
        {"train__optimizer": "muon", "runtime__banks": False},
        {"model__scheme": "admin", "runtime__fused": False},
    ],
    ids=str,
)
def test_copies_stay_equal_and_every_path_computes_the_same(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    run = deepstack.train(small(**LOOPED | settings), out=tmp_path / "one")
    other = {"runtime__banks": settings.get("runtime__banks") is False, "runtime__replay": False}
    plain = deepstack.train(small(**LOOPED | settings | other), out=tmp_path / "two")
    assert data_of(run) == data_of(plain)
    for name, values in weights_of(run).items():
        if ".layers." in name:
            assert torch.equal(values[:2].repeat(3, *[1] * (values.ndim - 1)), values), name
    assert run.meta["parameters"]["q"] == 2 * 16 * 16
    _, norms = run.layers("param_update_norm")
    assert norms.shape[1] == 6 and (norms[-1][:2] == norms[-1][2:4]).all() and norms[-1].all()
    _, gradients = run.layers("grad_norm")  # of each use of the parameters
    assert len(set(gradients[-1].tolist())) == 6


def test_a_plan_of_looped_stacks_counts_each_parameter_once_and_times_other_depths() -> None:
    grid = "model.depth=6,12", "model.unique_layers=3"
    plan = json.loads(typed("sweep", "quick", *grid, "--dry-run", "--json").stdout)
    once, whole = (row["parameters"] for row in plan[:2])
    assert once == whole < 60_000


def test_the_looped_scheme_scales_by_repetitions_and_layers() -> None:
    for unique, factor in ((2, 1 / (3 * 2**0.5)), (1, 1 / 6), (None, 6**-0.5)):
        scheme = build_model(small(**LOOPED | {"model__unique_layers": unique}), vocab_size=6)
        assert scheme.model.schemes[5].factor == pytest.approx(factor)


def test_repeated_layers_exclude_a_spectral_penalty(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="it excludes"):
        deepstack.train(small(**LOOPED, train__spectral_penalty=0.1), out=tmp_path)
