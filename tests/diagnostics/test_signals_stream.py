"""Diagnostics of the stream and of matrices, against slow versions and known shapes."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from helpers.snapshots import Look
from torch import Tensor

from deepstack.diagnostics import DIAGNOSTICS
from deepstack.diagnostics import stream as stream_room
from deepstack.diagnostics.spectral import spectral_norms


@pytest.mark.parametrize("scheme", ["deepnorm", "pre_ln", "residual", "hyper_connections"])
def test_the_stream_against_loops_over_layers(scheme: str) -> None:
    look = Look(model__scheme=scheme, task__seq_len=5)
    found = look.values()
    (stack,) = look.model.stacks.values()
    states = []
    for x in stack.stream(look.model.start(look.tokens)):
        states.append((x if isinstance(x, Tensor) else x[0]).detach().double())
    for layer, (x, y) in enumerate(pairwise(states)):
        angles = [
            math.acos(float(a @ b / (a.norm() * b.norm()))) / math.pi
            for a, b in zip(x.flatten(0, 1), y.flatten(0, 1), strict=True)
        ]
        wanted = sum(angles) / len(angles)
        assert found["angular_distance"][layer].item() == pytest.approx(wanted, rel=1e-4)
        tokens = y.flatten(0, 1)
        sigma = torch.linalg.svdvals(tokens - tokens.mean(dim=0))
        p = sigma[sigma > 1e-12] / sigma.sum()
        rank = math.exp(-(p * p.log()).sum().item())
        assert 1 < rank <= 15
        assert found["effective_rank"][layer].item() == pytest.approx(rank, rel=1e-5)
        ratios = []
        for X in y:
            both = [
                math.sqrt(
                    torch.linalg.matrix_norm(M, ord=1) * torch.linalg.matrix_norm(M, ord=math.inf)
                )
                for M in (X - X.mean(dim=0), X)
            ]
            ratios.append(both[0] / both[1])
        collapse = sum(ratios) / len(ratios)
        assert found["rank_collapse"][layer].item() == pytest.approx(collapse, rel=1e-5)


def test_the_stream_of_known_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    look = Look(model__depth=7, task__seq_len=16)
    (snapshot,) = look.snapshots()
    alike = torch.ones(8, 3, 16, 16)
    directions = torch.eye(16).repeat(8, 3, 1, 1)
    snapshot.states = alike
    assert DIAGNOSTICS["effective_rank"](snapshot).tolist() == [0.0] * 7
    assert DIAGNOSTICS["rank_collapse"](snapshot).tolist() == [0.0] * 7
    snapshot.states = directions
    assert DIAGNOSTICS["effective_rank"](snapshot).tolist() == pytest.approx([15.0] * 7)
    # a turn by t radians at every layer, down to where cos t is 1 in fp32
    for t in (1.0, 1e-2, 1e-5):
        angles = torch.arange(8.0, dtype=torch.float64) * t
        plane = torch.stack([angles.cos(), angles.sin()], dim=-1)[:, None, None, :]
        snapshot.states = plane.expand(8, 3, 16, 2)
        assert DIAGNOSTICS["angular_distance"](snapshot).tolist() == pytest.approx(
            [t / math.pi] * 7, rel=1e-6
        )
    # in small parts: the same numbers; what is not finite stays with its layer
    snapshot.states = torch.randn(8, 3, 16, 16)
    names = ("angular_distance", "effective_rank", "rank_collapse")
    whole = [DIAGNOSTICS[name](snapshot) for name in names]
    monkeypatch.setattr(stream_room, "AT_ONCE", 3 * 3 * 16 * 16)
    for name, values in zip(names, whole, strict=True):
        assert torch.equal(DIAGNOSTICS[name](snapshot), values)
    snapshot.states[4, 0, 0, 0] = math.inf
    assert DIAGNOSTICS["effective_rank"](snapshot).isnan().tolist() == [i == 3 for i in range(7)]
    assert DIAGNOSTICS["angular_distance"](snapshot).isnan().tolist() == [
        i in (3, 4) for i in range(7)
    ]


@pytest.mark.parametrize("distribution", ["xavier_normal", "ntk"])
def test_spectral_norms_of_every_role(distribution: str) -> None:
    look = Look(model__family="encoder_decoder", model__init={"distribution": distribution})
    found = look.values()
    layers = look.model.layers
    logs = torch.zeros(6, dtype=torch.float64)
    for index, layer in enumerate(layers):
        q, k, v = layer.attention.qkv.detach().chunk(3)
        matrices = {"q": q, "k": k, "v": v, "o": layer.attention.o}
        matrices |= {"w1": layer.feed_forward.w1, "w2": layer.feed_forward.w2}
        if index >= 3:
            cross = layer.cross_attention
            keys, values = cross.kv.detach().chunk(2)
            matrices |= {"cross_q": cross.q, "cross_k": keys, "cross_v": values, "cross_o": cross.o}
        for role, W in matrices.items():
            exact = torch.linalg.matrix_norm(W.detach().double(), ord=2).item()
            exact *= W.shape[1] ** -0.5 if distribution == "ntk" else 1.0
            assert found[f"spectral_norm_{role}"][index].item() == pytest.approx(exact, rel=1e-3)
            logs[index] += math.log(exact)
    assert found["spectral_norm_cross_q"][:3].isnan().all()
    assert found["spectral_log_product"].tolist() == pytest.approx(logs.tolist(), rel=1e-3)


def test_power_iteration_is_as_exact_as_it_says() -> None:
    random = torch.Generator().manual_seed(1)
    for shape in ((1000, 32, 32), (1000, 16, 64), (2, 520, 520)):
        W = torch.randn(*shape, generator=random)
        exact = torch.linalg.matrix_norm(W.double(), ord=2)
        for matrices in (W, W.transpose(1, 2), 1e-6 * W):
            short = 1 - spectral_norms(matrices) / exact / (matrices.norm() / W.norm())
            assert short.min() > -1e-5 and short.mean() < 1e-5 and short.max() < 5e-4
    assert spectral_norms(torch.zeros(2, 4, 4)).tolist() == [0.0, 0.0]
    assert spectral_norms(torch.full((1, 4, 4), torch.nan)).isnan().all()
    assert torch.equal(spectral_norms(W), spectral_norms(W))
