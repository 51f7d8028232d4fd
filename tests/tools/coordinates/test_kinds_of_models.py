"""Models under autocast, without a residual path and with frozen parameters."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import deepstack
from deepstack.base.errors import ConfigError
from deepstack.tools.coordinates.result import CoordinateCheck

BASE = 16


class Layer(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.norm, self.w = nn.LayerNorm(width), nn.Linear(width, width, bias=False)
        self.multiplier = 2 / depth

    def forward(self, x: Tensor) -> Tensor:
        branch: Tensor = self.w(self.norm(x))
        return x + self.multiplier * branch


def residual(width: int, depth: int, seed: int) -> nn.Module:
    layers = [Layer(width, depth) for _ in range(depth)]
    return nn.Sequential(nn.Linear(8, width), *layers, nn.Linear(width, 4))


def plain(width: int, depth: int, seed: int) -> nn.Module:
    pairs = [one for _ in range(depth) for one in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Linear(8, width), *pairs, nn.Linear(width, 4))


def batch(seed: int) -> tuple[Tensor, Tensor]:
    return torch.randn(8, 8), torch.randint(4, (8,))


def loss(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(data[0]), data[1])


def adam(model: nn.Module, width: int, depth: int) -> torch.optim.Optimizer:
    return torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def check(build: Any, **more: Any) -> CoordinateCheck:
    return deepstack.coordinates(
        build, batch, seeds=3, steps=[1, 2], **{"loss": loss, "optimizer": adam} | more
    )


def test_own_changes_under_autocast_are_those_without_it_to_the_rounding_of_bf16() -> None:
    def autocast(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss(model, data)

    sizes: Any = {"widths": [16, 32, 64], "depths": 2, "rule": "mup"}
    exact, rounded = (
        check(residual, loss=one, **sizes).values.set_index(
            ["width", "seed", "module", "quantity", "step"]
        )["value"]
        for one in (loss, autocast)
    )
    assert list(exact.index) == list(rounded.index)
    own = exact.index.get_level_values("quantity") == "own"
    assert (exact[own] > 0).all()
    assert ((rounded / exact)[own] - 1).abs().median() < 0.01
    assert not (rounded == exact)[own].any()


def test_depths_of_a_model_without_a_residual_path_are_refused() -> None:
    with pytest.raises(ConfigError, match="no layer adds to its input"):
        check(plain, widths=16, depths=[2, 4, 8])


def test_layers_that_do_not_add_to_their_input_have_no_branch_and_are_named() -> None:
    def build(width: int, depth: int, seed: int) -> nn.Module:
        model = plain(width, depth, seed)
        assert isinstance(model, nn.Sequential)
        return nn.Sequential(*model[:-1], *(Layer(width, depth) for _ in range(depth)), model[-1])

    found = check(build, widths=16, depths=[4, 8])
    branches = set(found.values[found.values["quantity"] == "branch"]["module"])
    (note,) = (note for note in found.notes if note.startswith("not judged as residual layers"))
    assert branches and not any(name in note for name in branches), (branches, note)


def test_a_norm_after_the_sum_leaves_a_layer_a_residual_one() -> None:
    """Two such norms let the input's coefficient fall to about one half, as an activation's is."""

    class PostNorm(Layer):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2):
                x = F.layer_norm(x + self.w(x), x.shape[-1:])
            return x

    def build(width: int, depth: int, seed: int) -> nn.Module:
        layers = [PostNorm(width, depth) for _ in range(depth)]
        for layer in layers:
            nn.init.normal_(layer.w.weight, std=width**-0.5)
        return nn.Sequential(nn.Linear(8, width), *layers, nn.Linear(width, 4))

    found = check(build, widths=16, depths=[4, 8, 16])
    assert not any("residual layers" in note for note in found.notes)
    branches = found.values[found.values["quantity"] == "branch"]["module"]
    assert branches.nunique() >= 2


def test_modules_with_frozen_parameters_are_named_where_their_output_changes() -> None:
    def build(width: int, depth: int, seed: int) -> nn.Module:
        model = residual(width, depth, seed)
        model[1].requires_grad_(False)  # type: ignore[index]
        return model

    found = check(build, widths=[16, 32], depths=2, rule="mup")
    reason = "no change by their own parameters, which are not trained"
    assert found.left_out[reason] == ["1.norm", "1.w"]


def test_a_model_with_frozen_parameters_alone_is_refused() -> None:
    def build(width: int, depth: int, seed: int) -> nn.Module:
        return residual(width, depth, seed).requires_grad_(False)

    with pytest.raises(ConfigError, match="no parameter is trained"):
        check(build, widths=[16, 32], depths=2, rule="mup")
