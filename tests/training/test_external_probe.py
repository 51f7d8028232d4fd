"""`deepstack.probe`: what it measures of somebody else's model, and that it disturbs nothing."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from helpers.probe_models import (
    GROUPS,
    D,
    WithHead,
    adamw,
    batch_of,
    encoder,
    loop,
    probe_of,
    probed,
)
from torch import Tensor, nn

import deepstack
from deepstack.diagnostics.external_model import tensor_of
from deepstack.errors import ConfigError

# -- training goes on as it would have -------------------------------------------------------------


class Drawing(nn.Module):
    """A model that draws numbers of every kind in evaluation mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = encoder(2)
        self.layers = self.inner.layers

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.rand(x.shape) + random.random() + float(np.random.rand())
        out: Tensor = self.inner(x + 0.1 * noise)
        return out


@pytest.mark.parametrize("make", [encoder, Drawing])
def test_training_is_the_same_bit_for_bit(make: Callable[[], Any], tmp_path: Path) -> None:
    ends: list[dict[str, Any]] = []
    for watched in (False, True):
        model = make().train()
        model.layers[1].eval()  # somebody's frozen part keeps its mode
        optimizer = adamw(model)
        torch.manual_seed(7)
        random.seed(7)
        np.random.seed(7)
        if watched:
            with deepstack.probe(model, batch_of(0), optimizer, out=tmp_path / "run") as probe:
                loop(model, optimizer, 6, probe.step)
            assert len(probe.run.steps) == 6
        else:
            loop(model, optimizer, 6)
        ends.append(
            {
                "parameters": [p.detach().tolist() for p in model.parameters()],
                "gradients": [p.grad.tolist() for p in model.parameters()],
                "moments": [v.tolist() for s in optimizer.state.values() for v in s.values()],
                "random": torch.get_rng_state().tolist(),
                "plain random": random.getstate(),
                "numpy": np.random.get_state()[1].tolist(),  # type: ignore[index, union-attr]
                "modes": [m.training for m in model.modules()],
                "hooks": [len(m._forward_hooks) for m in model.modules()],
            }
        )
    assert ends[0] == ends[1]


def test_f_is_taken_in_evaluation_mode(tmp_path: Path) -> None:
    """Dropout would make another F of every look."""
    model = encoder(dropout=0.5)
    probe = probe_of(tmp_path, model)
    assert torch.equal(probe.subject.hidden(), probe.subject.initial)
    expected = model.eval()(batch_of(0)).detach()
    torch.testing.assert_close(probe.subject.initial, expected)


# -- the numbers -----------------------------------------------------------------------------------


def norm(tensors: Any) -> float:
    return torch.cat([t.detach().double().flatten() for t in tensors]).norm().item()


def test_steps_and_layers_are_what_they_are_called(tmp_path: Path) -> None:
    model = encoder(first=True, dropout=0.0)
    optimizer = adamw(model)
    models = [copy.deepcopy(model)]  # after each step
    rows: list[dict[str, float]] = []
    seen: list[dict[str, list[float]]] = []

    def after(loss: Tensor) -> None:
        probe.step(loss)
        models.append(copy.deepcopy(model))
        F, F_0, F_1 = (m.eval()(batch_of(0)).detach() for m in (models[-1], models[0], models[-2]))
        gradients = [[p.grad for p in layer.parameters()] for layer in model.layers]
        rows.append(
            {
                "loss": float(loss.detach()),
                "lr": 0.01,
                "grad_norm": norm(p.grad for p in model.parameters() if p.grad is not None),
                "model_update": float((F - F_0).norm(dim=-1).mean()),
                "model_update_step": float((F - F_1).norm(dim=-1).mean()),
                "model_update_fro": float((F - F_0).norm()),
                "model_update_rel": float((F - F_0).norm() / F_0.norm()),
            }
        )
        x, stream, moved = batch_of(0), [], []
        for now, before in zip(models[-1].layers, models[-2].layers, strict=True):
            x = now(x).detach()
            stream.append(float(x.norm(dim=-1).mean()))
            pairs = zip(now.parameters(), before.parameters(), strict=True)
            moved.append(norm(p - q for p, q in pairs))
        seen.append(
            {
                "stream_norm": stream,
                "grad_norm": [norm(each) for each in gradients],
                "param_norm": [norm(layer.parameters()) for layer in model.layers],
                "param_update_norm": moved,
            }
        )

    with deepstack.probe(
        model, batch_of(0), optimizer, out=tmp_path / "run", layers_every=2
    ) as probe:
        loop(model, optimizer, 5, after)
    run = probe.run
    for name in rows[0]:
        expected = [row[name] for row in rows]
        assert run.steps[name].tolist() == pytest.approx(expected, rel=2e-5, abs=1e-6), name
    for name in seen[0]:
        steps, values = run.layers(name)
        assert steps.tolist() == [0, 2, 4]
        for at, value in zip(steps[1:], values[1:], strict=True):
            assert value.tolist() == pytest.approx(seen[at - 1][name], rel=2e-5), name
    assert np.isnan(run.layers("grad_norm")[1][0]).all()
    assert not run.layers("param_update_norm")[1][0].any()
    assert len(run.timing) == 5 and (run.timing["step_ms"] > 0).all()


@pytest.mark.parametrize(("dtype", "scale"), [(torch.bfloat16, 1.0), (torch.float16, 1e3)])
def test_norms_of_a_model_in_half_precision_are_taken_in_full(
    dtype: torch.dtype, scale: float, tmp_path: Path
) -> None:
    model = encoder().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 / scale)
    x, out = batch_of(1).to(dtype), tmp_path / "study" / "run"
    before = [p.detach().double() for p in model.layers[1].parameters()]
    with deepstack.probe(model, x, optimizer, out=out, layers_every=1) as probe:
        (scale * model(x).sum()).backward()  # of fp16, with a norm that fp16 does not know
        optimizer.step()
        probe.step(1.0)

    run, own = probe.run, list(model.layers[1].parameters())
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    moved = [p.detach() - b for p, b in zip(own, before, strict=True)]
    assert run.state == "done"
    assert run.steps["grad_norm"][0] == pytest.approx(norm(gradients), rel=1e-6)
    assert run.layers("param_norm")[1][1, 1] == pytest.approx(norm(own), rel=1e-6)
    assert run.layers("param_update_norm")[1][1, 1] == pytest.approx(norm(moved), rel=1e-6)


def test_a_layer_that_runs_three_times_has_three_streams(tmp_path: Path) -> None:
    layer = encoder(1, first=True, dropout=0.0).layers[0]
    model = nn.Sequential(layer, layer, layer)
    x, norms = batch_of(1), []
    with torch.no_grad():
        y = x
        for _ in range(3):
            y = layer.eval()(y)
            norms.append(y.norm(dim=-1).mean().item())
    for count in (1, 3):  # listed once: the last of its streams
        run = probed(tmp_path / str(count), 0, model, batch=x, layers=[layer] * count)
        assert run.layers("stream_norm")[1][0].tolist() == pytest.approx(norms[-count:])


def test_a_mapping_with_the_last_hidden_state_holds_f() -> None:
    F = torch.ones(2, 3, D)
    assert tensor_of({"logits": 2 * F, "last_hidden_state": F}) is F


def test_attribution_is_that_of_a_model_with_one_group_changed(tmp_path: Path) -> None:
    model = encoder(dropout=0.0)
    start = copy.deepcopy(model)
    run = probed(tmp_path / "run", 3, model, groups=GROUPS, attribution_every=3)
    table = pd.read_csv(run.path / "attribution.csv")
    assert list(table) == ["step", *GROUPS, "rest", "whole", "unexplained"]
    assert table["step"].tolist() == [3]
    F_0 = start.eval()(batch_of(0)).detach()
    now, total, groups = dict(model.named_parameters()), torch.zeros_like(F_0), run.meta["groups"]
    assert sorted(n for names in groups.values() for n in names) == sorted(now)
    for name, members in groups.items():
        mixed = copy.deepcopy(start)
        mixed.load_state_dict({n: now[n].detach() for n in members}, strict=False)
        change = mixed.eval()(batch_of(0)).detach() - F_0
        total += change
        assert table[name].item() == pytest.approx(float(change.norm(dim=-1).mean()), rel=1e-4)
        assert table[name].item() > 0
    moved = model.eval()(batch_of(0)).detach() - F_0
    assert table["whole"].item() == pytest.approx(float(moved.norm(dim=-1).mean()), rel=1e-4)
    assert table["whole"].item() == pytest.approx(run.steps["model_update"].iloc[-1], rel=1e-5)
    left = float((moved - total).norm(dim=-1).mean())
    assert table["unexplained"].item() == pytest.approx(left, rel=1e-3)


def test_groups_of_its_own_are_the_children_of_layer_and_model(tmp_path: Path) -> None:
    probe = probe_of(tmp_path, WithHead(), torch.arange(6).view(2, 3), hidden="encoder")
    assert list(probe.groups) == [
        "embedding", "self_attn", "linear1", "linear2", "norm1", "norm2", "encoder", "head",
    ]  # fmt: skip
    assert probe.groups["encoder"] == ["encoder.norm.weight", "encoder.norm.bias"]


# -- what a model and a batch may be ---------------------------------------------------------------


@pytest.mark.parametrize(
    "batch",
    [
        torch.arange(6).view(2, 3),
        (torch.arange(6).view(2, 3), 2.0),
        [torch.arange(6).view(2, 3)],
        {"tokens": torch.arange(6).view(2, 3), "scale": 0.5},
    ],
    ids=["tensor", "tuple", "list", "mapping"],
)
@pytest.mark.parametrize("hidden", ["name", "module", "function"])
def test_batches_and_hidden_states_of_every_kind(batch: Any, hidden: str, tmp_path: Path) -> None:
    model = WithHead()
    given = {
        "name": "encoder.norm",
        "module": model.encoder,
        "function": lambda m, b: m.encoder(m.embedding(torch.arange(6).view(2, 3))),
    }[hidden]
    expected = model.eval().encoder(model.embedding(torch.arange(6).view(2, 3)))
    probe = probe_of(tmp_path, model.train(), batch, hidden=given)
    torch.testing.assert_close(probe.subject.initial, expected.detach())
    assert probe.subject.normalised and probe.config["model"]["d_model"] == D
    assert probe.config["model"]["depth"] == 2


def test_the_probe_batch_is_a_copy(tmp_path: Path) -> None:
    batch = batch_of(0)
    probe = probe_of(tmp_path, batch=batch)
    batch.zero_()
    assert torch.equal(probe.subject.hidden(), probe.subject.initial)


def test_a_model_whose_output_leaves_no_norm_has_no_scale_of_its_own(tmp_path: Path) -> None:
    pre = encoder(first=True)
    pre.norm = None
    assert probe_of(tmp_path).subject.normalised
    assert not probe_of(tmp_path, pre).subject.normalised


class Frozen(nn.Linear):
    def __init__(self) -> None:
        super().__init__(D, D)
        self.requires_grad_(False)


MISTAKES: list[tuple[Callable[[], nn.Module], dict[str, Any], str]] = [
    (nn.Identity, {}, "Identity without a trained parameter"),
    (Frozen, {}, "Frozen without a trained parameter"),
    (encoder, {"batch": "abc"}, r"batch: found str; allowed a tensor, given as model\(batch\)"),
    (lambda: nn.Linear(D, D), {}, r"no ModuleList; .*layers='blocks', or layers=\(\)"),
    (WithHead, {}, r"shape \(2, 3, 11\), no hidden state of width 16; .*hidden='encoder'"),
    (WithHead, {"hidden": "encodr"}, "unknown module 'encodr'; did you mean 'encoder'"),
    (WithHead, {"hidden": "zzz"}, "unknown module 'zzz'; allowed a name of model.named_modules"),
    (WithHead, {"hidden": lambda m, b: 3}, "found int, no hidden state of width 16"),
    (WithHead, {"hidden": "encoder", "layers": "head"}, "layers: 'head' holds no modules"),
    (WithHead, {"hidden": "encoder", "layers": [nn.Linear(2, 2)]}, "number 1 of those given"),
    (encoder, {"groups": {"a": "*.self_atn.*"}}, "groups: a: no trained parameter is named"),
    (encoder, {"groups": {"a": "*", "b": "*bias"}}, "is in a and in b"),
    (encoder, {"groups": {"a,b": "*"}}, "found the name 'a,b'"),
    (encoder, {"groups": {"whole": "*"}}, "found the name 'whole'"),
    (encoder, {"every": 0}, "every: found 0"),
    (encoder, {"layers_every": "often"}, "layers_every: found 'often'"),
]


@pytest.mark.parametrize("make, options, message", MISTAKES, ids=[m[2][:30] for m in MISTAKES])
def test_mistakes_are_answered_with_what_to_type(
    make: Callable[[], nn.Module], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model = make()
    usual = torch.arange(6).view(2, 3) if isinstance(model, WithHead) else batch_of(0)
    optimizer = adamw(encoder(1))
    batch = options.pop("batch", usual)
    with pytest.raises(ConfigError, match=message):
        deepstack.probe(model, batch, optimizer, out=tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()
    assert model.training


def test_a_model_without_layers_has_steps_alone(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(D, D), nn.LayerNorm(D))
    run = probed(tmp_path / "run", 2, model, layers=())
    assert len(run.steps) == 2 and run.layer_names() == [] and run.get("model.depth") == 0
    assert run.columns["scheme"]["normalised"]
