"""Diagnostics of signals, each against a slow version written from its definition."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.command_line import typed
from helpers.sampling import some
from helpers.small_runs import step_of
from helpers.snapshots import CPU, Look
from torch.autograd.functional import jacobian

import deepstack
from deepstack.cli.list_command import diagnostic_rows
from deepstack.config import Config, with_overrides
from deepstack.diagnostics import DIAGNOSTICS, describe
from deepstack.diagnostics import stream as stream_module
from deepstack.diagnostics.spectral import spectral_norms
from deepstack.fast import FastPaths, enable_fast_paths
from deepstack.schemes import SCHEMES
from deepstack.training import to_device


def test_the_prediction_of_beta_ln_is_near_it_at_initialisation() -> None:
    """x of variance 1 and independent of G(x), gains 1: what DS-Init's analysis supposes.

    Not in the first layer, whose x is no norm's output, nor in the last, whose gradient is the
    head's.
    """
    for scheme, at_most in (("post_ln", 1.0), ("deepnorm", 0.7)):
        look = Look(model__scheme=scheme, model__d_model=64, task__seq_len=32, model__depth=5)
        with torch.no_grad():
            for own in look.model.schemes:
                for norms in own.norm_functions:
                    norms[0].gain.fill_(1.0)
                    norms[0].bias.zero_()
        found = look.values()
        for name in ("attention", "feed_forward"):
            measured, predicted = (
                found[f"{k}_{name}"][1:-1] for k in ("beta_ln", "beta_ln_predicted")
            )
            assert (measured / predicted - 1).abs().max() < 0.1
            assert (measured < at_most).all()


@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize("kind", ["layer", "rms", "batch", "dynamic_tanh"])
def test_ln_jacobian_is_the_norm_of_the_jacobian(kind: str, equal: bool) -> None:
    look = Look(model__norm={"kind": kind})
    with torch.no_grad():
        for scheme in look.model.schemes:
            for (norm,) in scheme.norm_functions:
                norm.gain.fill_(1.7) if equal else norm.gain.uniform_(0.5, 1.5)
    values = look.values()
    layer, x = look.model.layers[0], look.model.start(look.tokens)
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
        if equal:
            assert value == pytest.approx(mean, rel=1e-4)
        else:
            assert value * (gains[-3] / gains[-1]).item() < mean < value * (1 + 1e-6)


def test_grad_norm_predicted_is_what_deepnorm_s_matrices_have(tmp_path: Path) -> None:
    """Of all parameters it is not: the gain and bias of the stack's last norm have large ones."""
    config = with_overrides(
        Config(),
        {
            "model.scheme": "deepnorm", "model.depth": 12, "model.d_model": 64, "train.steps": 1,
            "train.eval_batches": 1, "train.eval_every": 0, "task.seq_len": 32,
        },
    )  # fmt: skip
    run = deepstack.train(config, out=tmp_path)
    measured, predicted = (
        run.layers(name)[1][0] for name in ("matrix_grad_norm", "grad_norm_predicted")
    )
    assert np.abs(measured / predicted - 1).max() < 0.2
    whole = run.layers("grad_norm")[1][0]
    assert (measured < whole).all() and whole[-1] > 2 * measured[-1]


def test_the_list_of_diagnostics_keeps_the_former_key_in_json_alone() -> None:
    assert all(row["beat"] == row["interval"] for row in diagnostic_rows())
    assert "beat" in json.loads(typed("list", "diagnostics", "--json").stdout)[0]
    header = typed("list", "diagnostics", "--markdown").stdout.splitlines()[0]
    assert "interval" in header and "beat" not in header


@pytest.mark.parametrize("scheme", some(SCHEMES.names(), 3, 2))
def test_every_scheme_can_be_looked_at_and_is_left_as_it_was(scheme: str) -> None:
    """Files that describe themselves, and a next step with the same bits, seen or not."""
    family = "encoder_decoder" if "encoder_decoder" in SCHEMES[scheme].families else "encoder"
    losses = []
    listed = {row["name"] for row in diagnostic_rows()}
    for measures in (False, True):
        look = Look(model__scheme=scheme, model__family=family, skipped=2)
        enable_fast_paths(
            look.model, FastPaths(fused=True, compiled=False, captured=False), 0, print
        )
        step = step_of(look.built, look.config)
        torch.manual_seed(3)
        rows = []
        for number in range(3):
            batch = to_device(look.task.train_batch(number + 1, 4), CPU)
            rows.append([float(m) for m in step(*batch, 1e-3)[:2]])
            if measures:
                state = torch.get_rng_state()
                found = look.values()
                assert set(found) <= set(describe()) & listed
                depth = len(look.model.layers)
                assert all(values.shape == (depth,) for values in found.values())
                every_layer = ("grad_norm", "param_norm", "stream_norm", "effective_rank")
                assert all(found[name].isfinite().all() for name in every_layer)
                branches = [found[f"branch_ratio_{n}"] for n in ("attention", "feed_forward")]
                if scheme == "residual":  # its sublayers are joined to two streams at once
                    assert torch.stack(branches).isnan().all()
                else:
                    assert torch.stack(branches).isfinite().all()
                assert found["skip_loss"].isfinite().sum() == 2
                assert torch.equal(torch.get_rng_state(), state)
                assert all(own.tap is None for own in look.model.schemes)
        losses.append(rows)
    assert losses[0] == losses[1]


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
