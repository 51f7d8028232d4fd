"""The gradient noise scale, against gradients of single sequences taken one by one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers.sampling import some
from helpers.snapshots import ToyModel
from torch import Tensor, nn

from deepstack.diagnostics.noise_scale import GradientNoise, gradient_noise
from deepstack.schemes import SCHEMES
from deepstack.tasks import IGNORE
from deepstack.training import mean_loss


def measure(toy: ToyModel) -> tuple[Any, Tensor]:
    """Return the noise of a toy model and its targets, whose number differs by sequence."""
    targets = toy.targets.clone()
    targets[0, :3] = IGNORE
    count = float((targets != IGNORE).sum()) / len(targets)
    banks, unique = toy.built.trained, toy.built.banks.unique

    def loss(logits: Tensor, i: int) -> Tensor:
        return mean_loss(logits, targets[i : i + 1], count)

    return gradient_noise(toy.model, banks, toy.tokens, loss, unique), targets


@pytest.mark.parametrize(
    "changes",
    [
        *some([{"model__scheme": name} for name in SCHEMES.names()], 6, 1),
        {"model__family": "encoder_decoder", "runtime__banks": False, "model__head": "separate"},
        {"model__depth": 4, "model__unique_layers": 2},
        {"model__norm__kind": "batch", "model__dropout": 0.5, "train__trainable": ["v", "w1"]},
    ],
    ids=str,
)
def test_it_is_that_of_the_gradients_of_single_sequences(changes: dict[str, Any]) -> None:
    changes = {
        "model__family": SCHEMES[changes.get("model__scheme", "pre_ln")].families[0]
    } | changes
    toy = ToyModel(**changes)
    noise, targets = measure(toy)
    model = toy.model.eval()
    trained = {id(p): [] for p in model.parameters() if p.requires_grad}
    owners: dict[int, list[int]] = {}  # parameter -> its layers, counted over all stacks
    for layer, module in enumerate(model.layers):
        for p in module.parameters():
            owners.setdefault(id(p), []).append(layer)
    gradients = []
    for i, sequence in enumerate(toy.tokens):
        toy.built.banks.zero_gradients()
        logits = model(sequence[None])
        total = nn.functional.cross_entropy(
            logits[0], targets[i], ignore_index=IGNORE, reduction="sum"
        )
        (total * len(targets) / (targets != IGNORE).sum()).backward()
        toy.built.banks.sum_repeats()
        gradients.append({id(p): p.grad.double().clone() for p in model.parameters()
                          if p.requires_grad})  # fmt: skip
    B = len(gradients)

    def expected(chosen: list[int]) -> tuple[float, float]:
        rows = torch.stack([torch.cat([g[key].flatten() for key in chosen]) for g in gradients])
        variance = rows.var(dim=0, correction=1).sum().item()
        return variance, rows.mean(dim=0).square().sum().item() - variance / B

    measured = torch.cat(list(noise.by_layer.values()), dim=1).T
    for layer in range(len(model.layers)):
        keys = [key for key in trained if layer in owners.get(key, [])]
        assert measured[layer].tolist() == pytest.approx(expected(keys), rel=1e-3), layer
    unique = toy.built.banks.unique
    once = [key for key in trained if not unique or min(owners.get(key, [0])) < unique]
    variance, square = expected(once)
    row = noise.row()
    assert row["model_gradient_variance"] == pytest.approx(variance, rel=1e-3)
    assert row["model_gradient_square"] == pytest.approx(square, rel=1e-3, abs=1e-3 * variance)
    if square > 1e-2 * variance:
        assert row["model_noise_scale"] == pytest.approx(variance / square, rel=1e-2)


def test_a_square_that_noise_makes_negative_has_no_scale() -> None:
    row = GradientNoise(torch.tensor([2.0, -0.5]), {}).row()
    assert math.isnan(row["model_noise_scale"]) and row["model_gradient_square"] == -0.5
