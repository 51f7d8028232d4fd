"""The gradient noise scale against the gradients of single sequences, and its rows in a run."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.sampling import some
from helpers.small_runs import interrupted, logs_of, small
from helpers.snapshots import ToyModel
from torch import Tensor, nn

import deepstack
from deepstack.base.errors import ConfigError
from deepstack.instruments.noise_scale.measure import GradientNoise, gradient_noise
from deepstack.schemes import SCHEMES
from deepstack.tasks import IGNORE
from deepstack.training import mean_loss


@pytest.mark.parametrize(
    "changes",
    [
        *some([{"model__scheme": name} for name in SCHEMES.names()], 6, 1),
        {"model__family": "encoder_decoder", "runtime__banks": False, "model__head": "separate"},
        {"model__depth": 4, "model__unique_layers": 2},
        {
            "model__depth": 6,
            "model__unique_layers": 2,
            "model__prelude_layers": 1,
            "model__coda_layers": 1,
        },
        {"model__norm__kind": "batch", "model__dropout": 0.5, "train__trainable": ["v", "w1"]},
    ],
    ids=str,
)
def test_noise_equals_the_variance_of_single_sequences(
    changes: dict[str, Any],
) -> None:
    family = SCHEMES[changes.get("model__scheme", "pre_ln")].families[0]
    toy = ToyModel(**{"model__family": family} | changes)
    targets = toy.targets.clone()
    targets[0, :3] = IGNORE  # sequences differ in the number of their targets
    B, count = len(targets), (targets != IGNORE).sum().item()
    banks, loop = toy.built.banks, toy.built.banks.loop

    def loss(logits: Tensor, i: int) -> Tensor:
        return mean_loss(logits, targets[i : i + 1], count / B)

    noise = gradient_noise(toy.model, toy.built.trained, toy.tokens, loss, loop)
    trained = [p for p in toy.model.eval().parameters() if p.requires_grad]
    gradients: list[dict[nn.Parameter, Tensor]] = []
    for sequence, answers in zip(toy.tokens, targets, strict=True):
        banks.zero_gradients()
        logits = toy.model(sequence[None])[0]
        total = nn.functional.cross_entropy(logits, answers, ignore_index=IGNORE, reduction="sum")
        (total * B / count).backward()
        banks.sum_repeats()
        gradients.append({p: p.grad.double().flatten() for p in trained if p.grad is not None})

    def expected(chosen: list[nn.Parameter]) -> tuple[float, float]:
        rows = torch.stack([torch.cat([g[p] for p in chosen]) for g in gradients])
        variance = rows.var(dim=0, correction=1).sum().item()
        return variance, rows.mean(dim=0).square().sum().item() - variance / B

    measured = torch.cat(list(noise.by_layer.values()), dim=1).T
    for index, layer in enumerate(toy.model.layers):
        own = [p for p in layer.parameters() if p.requires_grad]
        assert measured[index].tolist() == pytest.approx(expected(own), rel=1e-3), index
    layers = [*toy.model.layers]
    again = layers[loop.before + loop.length : len(layers) - loop.after] if loop else []
    repeats = {p for layer in again for p in layer.parameters()}
    variance, square = expected([p for p in trained if p not in repeats])
    row = noise.row()
    assert row["model_gradient_variance"] == pytest.approx(variance, rel=1e-3)
    assert row["model_gradient_square"] == pytest.approx(square, rel=1e-3, abs=1e-3 * variance)
    if square > 1e-2 * variance:
        assert row["model_noise_scale"] == pytest.approx(variance / square, rel=1e-2)


def test_a_square_that_noise_makes_negative_has_no_scale() -> None:
    row = GradientNoise(torch.tensor([2.0, -0.5]), {}).row()
    assert math.isnan(row["model_noise_scale"]) and row["model_gradient_square"] == -0.5


def test_a_run_records_the_noise_of_the_model_and_of_layers(tmp_path: Path) -> None:
    config = small(
        log__noise_scale=True, log__layers_every=5, model__depth=5, model__dropout=0.1,
    )  # fmt: skip
    run = deepstack.train(config, out=tmp_path / "a")
    noise, due = run.log("noise_scale"), [0, 5, 10, 12]
    assert list(noise["step"]) == due
    layers = {name: run.layers(name) for name in ("gradient_variance", "noise_scale")}
    assert all(list(steps) == due and v.shape == (4, 5) for steps, v in layers.values())
    by_layer = layers["gradient_variance"][1].sum(axis=1)
    assert (by_layer < noise["model_gradient_variance"]).all()  # and the embedding's
    assert run.columns["columns"]["model_noise_scale"]["unit"] == "sequences"
    interrupted(config, tmp_path / "b", 7)
    assert logs_of(deepstack.train(config, out=tmp_path / "b")) == logs_of(run)


def test_a_single_sequence_has_no_noise_to_measure() -> None:
    with pytest.raises(ConfigError, match=r"found true under log\.probe_sequences=1"):
        small(log__noise_scale=True, log__probe_sequences=1)
