"""The contribution of a layer: the probe loss without it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from helpers.snapshots import ToyModel

from deepstack.diagnostics.snapshot import divide_evenly


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
def test_the_loss_without_a_layer_is_that_of_a_model_that_passes_it_by(
    scheme: str, family: str
) -> None:
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
