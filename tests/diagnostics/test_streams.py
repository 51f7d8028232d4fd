"""The mixing of several streams against plain loops over known matrices."""

from typing import Any

import pytest
import torch
from helpers.small_runs import small
from helpers.snapshots import ToyModel
from torch import Tensor

from deepstack.base.errors import ConfigError
from deepstack.diagnostics import evaluate, take
from deepstack.diagnostics.streams import stream_mixing

N = 4


def logged_values(toy: ToyModel) -> dict[str, Tensor]:
    values = [bank.values().clone() for bank in toy.banks]
    mixing = {"mixing": stream_mixing(toy.model, toy.tokens)}
    snapshots = take(
        toy.model, toy.banks, toy.tokens, toy.loss, before=None, initial=values, added=mixing
    )
    return evaluate(snapshots)


def sublayer_matrices(toy: ToyModel) -> list[Tensor]:
    """Give each sublayer of hyper-connections a random static A_r; return the transposed A_r."""
    random = torch.Generator().manual_seed(1)
    maps = []
    for scheme in toy.model.schemes:
        for connections in scheme.per_sublayer("connections"):
            A_r = torch.randn(N, N, generator=random)
            with torch.no_grad():
                connections.static[:, 0, 0, 1 : 1 + N] = A_r - torch.eye(N)
            maps.append(A_r.T.double())
    return maps


def test_gains_and_distances_are_those_of_the_products_of_known_matrices() -> None:
    options = {"model__scheme_options__dynamic": False}
    toy = ToyModel(model__scheme="hyper_connections", **options)
    maps, logged = sublayer_matrices(toy), logged_values(toy)
    for layer in range(3):
        product = torch.eye(N, dtype=torch.float64)
        for A in maps[2 * layer :]:
            product = A @ product
        rows = max(sum(abs(a) for a in row) for row in product.tolist())
        columns = max(sum(abs(a) for a in column) for column in product.T.tolist())
        assert logged["composite_gain_forward"][layer].item() == pytest.approx(rows, rel=1e-5)
        assert logged["composite_gain_backward"][layer].item() == pytest.approx(columns, rel=1e-5)
        assert abs(rows - columns) > 0.01 * rows
        for part, A in zip(("attention", "feed_forward"), maps[2 * layer :], strict=False):
            apart = (A - torch.eye(N)).norm().item() / N**0.5
            assert logged[f"mixing_distance_{part}"][layer].item() == pytest.approx(apart, rel=1e-5)


def test_the_share_is_the_largest_streams_power_in_all_streams() -> None:
    toy = ToyModel(model__scheme="hyper_connections", model__scheme_options__dynamic=False)
    sublayer_matrices(toy)
    streams: list[Tensor] = []
    for layer in toy.model.layers:
        layer.register_forward_hook(lambda module, args, out: streams.append(out[1].detach()))
    share = logged_values(toy)["stream_share_attention"]
    assert share[0].item() == pytest.approx(1 / N)  # H starts as n copies of x_0
    powers = [(H**2).sum().item() for H in streams[0]]
    assert max(powers) / sum(powers) > 0.3
    assert share[1].item() == pytest.approx(max(powers) / sum(powers), rel=1e-5)


@pytest.mark.parametrize(
    ("scheme", "options"),
    [
        ("mhc", {}),
        ("mhc", {"model__scheme_options__mixing": "cayley"}),
        pytest.param("frac_connections", {}, marks=pytest.mark.slow),
        pytest.param(
            "hyper_connections", {"model__family": "encoder_decoder"}, marks=pytest.mark.slow
        ),
    ],
)
def test_mixings_start_near_the_identity(scheme: str, options: dict[str, Any]) -> None:
    toy = ToyModel(model__scheme=scheme, **options)
    logged = logged_values(toy)
    for name in ("mixing_distance_attention", "mixing_distance_feed_forward"):
        assert logged[name].max() < 0.2
    for name in ("composite_gain_forward", "composite_gain_backward"):
        assert logged[name].min() > 0.5 and logged[name].max() < 3


def test_an_orthogonal_mixing_keeps_the_norm_of_all_streams() -> None:
    toy = ToyModel(model__scheme="mhc", model__scheme_options__mixing="cayley")
    with torch.no_grad():
        for scheme in toy.model.schemes:
            for connections in scheme.per_sublayer("connections"):
                connections.bias += 5 * torch.randn(connections.bias.shape)
    (mixing,) = stream_mixing(toy.model, toy.tokens).values()
    assert mixing.distances().min() > 0.1
    for A in mixing.matrices:
        assert torch.allclose(A @ A.mT, torch.eye(N, dtype=A.dtype).expand_as(A), atol=1e-5)


def test_a_record_of_streams_needs_records_of_layers() -> None:
    with pytest.raises(ConfigError, match=r"log\.streams: found true, unused under"):
        small(log__streams=True, log__layers_every=0)
