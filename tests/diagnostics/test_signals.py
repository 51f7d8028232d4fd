"""Diagnostics of signals, each against a slow version written from its definition."""

import json
import math

import pytest
import torch
from helpers.command_line import typed
from helpers.snapshots import ToyModel
from torch.autograd.functional import jacobian

from deepstack.cli.list_command import diagnostic_rows
from deepstack.diagnostics import DIAGNOSTICS
from deepstack.diagnostics import stream as stream_module
from deepstack.diagnostics.spectral import spectral_norms


@pytest.mark.parametrize("kind", ["layer", "rms", "batch", "dynamic_tanh"])
def test_ln_jacobian_of_unequal_gains_is_an_upper_bound(kind: str) -> None:
    toy = ToyModel(model__norm={"kind": kind})
    with torch.no_grad():
        for scheme in toy.model.schemes:
            for (norm,) in scheme.norm_functions:
                norm.gain.uniform_(0.5, 1.5)
    values = toy.values()
    layer, x = toy.model.layers[0], toy.model.start(toy.tokens)
    for name in layer.names:
        (norm,) = getattr(layer.scheme, f"{name}_norms")
        z = layer.scheme.coefficient * x + getattr(layer, name)(x)
        x, value = norm(z), values[f"ln_jacobian_{name}"][0].item()
        if kind in ("batch", "dynamic_tanh"):
            assert math.isnan(value)
            continue
        jacobians = [jacobian(norm, token).double() for token in z.detach().flatten(0, 1)]
        mean = torch.linalg.matrix_norm(torch.stack(jacobians), ord=2).mean().item()
        gains = norm.gain.detach().abs().sort().values
        assert value * (gains[-3] / gains[-1]).item() < mean < value * (1 + 1e-6)


def test_the_list_of_diagnostics_keeps_the_former_key_in_json_alone() -> None:
    assert all(row["beat"] == row["interval"] for row in diagnostic_rows())
    assert "beat" in json.loads(typed("list", "diagnostics", "--json").stdout)[0]
    header = typed("list", "diagnostics", "--markdown").stdout.splitlines()[0]
    assert "interval" in header and "beat" not in header


def test_the_stream_of_known_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    (snapshot,) = ToyModel(model__depth=7, task__seq_len=16).snapshots()
    snapshot.states = torch.ones(8, 3, 16, 16)  # tokens alike
    for name in ("effective_rank", "rank_collapse"):
        assert DIAGNOSTICS[name](snapshot).tolist() == [0.0] * 7
    # a turn by t radians at every layer, down to where cos t is 1 in fp32
    for t in (1.0, 1e-2, 1e-5):
        angles = torch.arange(8.0, dtype=torch.float64) * t
        plane = torch.stack([angles.cos(), angles.sin()], dim=-1)[:, None, None, :]
        snapshot.states = plane.expand(8, 3, 16, 2)
        turns = DIAGNOSTICS["angular_distance"](snapshot).tolist()
        assert turns == pytest.approx([t / math.pi] * 7, rel=1e-6)
    # in small parts: the same numbers; what is not finite stays with its layer
    bad_layers = {"angular_distance": [3, 4], "effective_rank": [3], "rank_collapse": [3]}
    for name, layers in bad_layers.items():
        snapshot.states = torch.randn(8, 3, 16, 16)
        whole = DIAGNOSTICS[name](snapshot)
        with monkeypatch.context() as patch:
            patch.setattr(stream_module, "AT_ONCE", 3 * 3 * 16 * 16)
            assert torch.equal(DIAGNOSTICS[name](snapshot), whole)
            snapshot.states[4, 0, 0, 0] = math.inf
            assert DIAGNOSTICS[name](snapshot).isnan().nonzero().flatten().tolist() == layers


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
