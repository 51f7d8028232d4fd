"""Diagnostics of further passes: the gradient noise scale, and the probe loss without a layer."""

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from helpers.sampling import some
from helpers.snapshots import ToyModel
from torch import Tensor, nn

from deepstack.diagnostics.noise_scale import GradientNoise, gradient_noise
from deepstack.diagnostics.snapshot import divide_evenly
from deepstack.schemes import SCHEMES
from deepstack.tasks import IGNORE
from deepstack.training import mean_loss


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
    family = SCHEMES[changes.get("model__scheme", "pre_ln")].families[0]
    toy = ToyModel(**{"model__family": family} | changes)
    targets = toy.targets.clone()
    targets[0, :3] = IGNORE  # sequences differ in the number of their targets
    B, count = len(targets), (targets != IGNORE).sum().item()
    banks, unique = toy.built.banks, toy.built.banks.unique
    noise = gradient_noise(
        toy.model,
        toy.built.trained,
        toy.tokens,
        lambda logits, i: mean_loss(logits, targets[i : i + 1], count / B),
        unique,
    )
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
    repeats = {p for layer in toy.model.layers[unique or 99 :] for p in layer.parameters()}
    variance, square = expected([p for p in trained if p not in repeats])
    row = noise.row()
    assert row["model_gradient_variance"] == pytest.approx(variance, rel=1e-3)
    assert row["model_gradient_square"] == pytest.approx(square, rel=1e-3, abs=1e-3 * variance)
    if square > 1e-2 * variance:
        assert row["model_noise_scale"] == pytest.approx(variance / square, rel=1e-2)


def test_a_square_that_noise_makes_negative_has_no_scale() -> None:
    row = GradientNoise(torch.tensor([2.0, -0.5]), {}).row()
    assert math.isnan(row["model_noise_scale"]) and row["model_gradient_square"] == -0.5


# -- the loss without a layer ---------------------------------------------------------------------


def passed_by(layer: Any) -> dict[Any, Callable[..., Any]]:
    """Forward functions of modules with which a layer passes on the stream that it reads."""
    if layer.scheme.name in ("dlcl", "dense_former"):  # whose later layers read its output as well
        return dict.fromkeys((layer.attention, layer.feed_forward), torch.zeros_like)
    if layer.scheme.name != "attn_res":
        return {layer: lambda x, memory=None: x}

    def weigh(stream: Any, memory: Any = None) -> Any:  # of the layers below alone
        _, part, done = stream
        assert part is None
        values = torch.stack(done)
        keys = values / (values.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        weights = (keys @ layer.scheme.feed_forward_query).softmax(0)
        return (weights[..., None] * values).sum(0), None, done

    return {layer: weigh}


@pytest.mark.parametrize(
    ("scheme", "family"),
    [
        ("deepnorm", "encoder"),
        ("pre_ln", "encoder_decoder"),
        ("residual", "decoder"),
        ("real_former", "encoder"),
        ("dlcl", "encoder"),
        ("hyper_connections", "encoder"),
        ("mhc", "encoder"),
        ("dense_former", "decoder"),
        ("attn_res", "decoder"),
    ],
)
def test_the_loss_without_a_layer(scheme: str, family: str) -> None:
    toy = ToyModel(model__scheme=scheme, model__family=family, skipped=16)
    found = toy.values()
    with torch.no_grad():
        whole = toy.loss(toy.model(toy.tokens)).item()
        for index, layer in enumerate(toy.model.layers):
            changed = passed_by(layer)
            for module, forward in changed.items():
                module.forward = forward
            wanted = toy.loss(toy.model(toy.tokens)).item()
            for module in changed:
                del module.forward
            assert found["skip_loss"][index].item() == pytest.approx(wanted, rel=1e-5)
            increase = found["skip_loss_increase"][index].item()
            assert increase == pytest.approx(wanted - whole, abs=1e-5)
            assert abs(increase) > 1e-4  # a layer that does something
    assert toy.loss(toy.model(toy.tokens)).item() == whole


def test_layers_are_spread_over_the_depth() -> None:
    for total, count in product((1, 2, 6, 17, 100, 1000), range(1, 17)):
        chosen = divide_evenly(total, count)
        assert len(set(chosen)) == min(count, total) and chosen[-1] == total - 1
        gaps = np.diff(chosen)
        if 1 < count < total:
            assert chosen[0] == 0 and 0 < gaps.min() and gaps.max() - gaps.min() <= 1
