"""Diagnostics of the stream and of matrices, against slow versions and known shapes."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.snapshots import Look

from deepstack.diagnostics import DIAGNOSTICS
from deepstack.diagnostics import stream as stream_module
from deepstack.diagnostics.spectral import spectral_norms


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
    monkeypatch.setattr(stream_module, "AT_ONCE", 3 * 3 * 16 * 16)
    for name, values in zip(names, whole, strict=True):
        assert torch.equal(DIAGNOSTICS[name](snapshot), values)
    snapshot.states[4, 0, 0, 0] = math.inf
    assert DIAGNOSTICS["effective_rank"](snapshot).isnan().tolist() == [i == 3 for i in range(7)]
    assert DIAGNOSTICS["angular_distance"](snapshot).isnan().tolist() == [
        i in (3, 4) for i in range(7)
    ]


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
