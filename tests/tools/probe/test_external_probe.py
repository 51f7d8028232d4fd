"""`deepstack.probe` measures somebody else's model and disturbs nothing."""

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from helpers.probe_models import D, WithHead, adamw, batch_of, encoder, loop, probe_of, probed
from torch import Tensor, nn

import deepstack
from deepstack.base.errors import ConfigError
from deepstack.model.module_calls import tensor_of

# -- training goes on as it would have -------------------------------------------------------------


def test_training_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    ends: list[dict[str, Any]] = []
    for watched in (False, True):
        model = encoder().train()
        model.layers[1].eval()  # somebody's frozen part keeps its mode
        optimizer = adamw(model)
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(7)
        if watched:
            with deepstack.probe(model, batch_of(0), optimizer, out=tmp_path / "run") as probe:
                loop(model, optimizer, 6, probe.step)
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


# -- the numbers -----------------------------------------------------------------------------------


def norm(tensors: Any) -> float:
    return torch.cat([t.detach().double().flatten() for t in tensors]).norm().item()


def test_steps_and_layers_are_what_they_are_called(tmp_path: Path) -> None:
    model, losses = encoder(first=True, dropout=0.0), []
    models = [copy.deepcopy(model)]  # after each step, with its gradients

    def after(probe: Any, loss: Tensor) -> None:
        probe.step(loss)
        losses.append(loss.item())
        models.append(copy.deepcopy(model))
        for own, p in zip(models[-1].parameters(), model.parameters(), strict=True):
            own.grad = p.grad.clone()

    run = probed(tmp_path / "run", 5, model, after, layers_every=2)
    F = torch.stack([m.eval()(batch_of(0)).detach() for m in models])
    moved = F[1:] - F[0]
    expected = {
        "loss": losses,
        "lr": [0.01] * 5,
        "grad_norm": [norm(p.grad for p in m.parameters()) for m in models[1:]],
        "model_update": moved.norm(dim=-1).mean(dim=(1, 2)).tolist(),
        "model_update_step": F.diff(dim=0).norm(dim=-1).mean(dim=(1, 2)).tolist(),
        "model_update_fro": moved.flatten(1).norm(dim=1).tolist(),
        "model_update_rel": (moved.flatten(1).norm(dim=1) / F[0].norm()).tolist(),
    }
    for name, wanted in expected.items():
        assert run.steps[name].tolist() == pytest.approx(wanted, rel=2e-5, abs=1e-6), name
    for row, step in enumerate([2, 4], start=1):
        x, layers = batch_of(0), []
        for now, before in zip(models[step].layers, models[step - 1].layers, strict=True):
            x = now(x).detach()
            pairs = zip(now.parameters(), before.parameters(), strict=True)
            layers.append(
                {
                    "stream_norm": x.norm(dim=-1).mean().item(),
                    "grad_norm": norm(p.grad for p in now.parameters()),
                    "param_norm": norm(now.parameters()),
                    "param_update_norm": norm(p - q for p, q in pairs),
                }
            )
        for name in layers[0]:
            steps, values = run.layers(name)
            assert steps.tolist() == [0, 2, 4]
            wanted = [layer[name] for layer in layers]
            assert values[row].tolist() == pytest.approx(wanted, rel=2e-5), name
    assert np.isnan(run.layers("grad_norm")[1][0]).all()
    assert not run.layers("param_update_norm")[1][0].any()
    assert len(run.timing) == 5 and (run.timing["step_ms"] > 0).all()


@pytest.mark.parametrize(("dtype", "scale"), [(torch.bfloat16, 1.0), (torch.float16, 1e3)])
def test_norms_of_a_model_in_half_precision_are_taken_in_full(
    dtype: torch.dtype, scale: float, tmp_path: Path
) -> None:
    model, x = encoder().to(dtype), batch_of(1).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 / scale)
    before = [p.detach().double() for p in model.layers[1].parameters()]
    with deepstack.probe(model, x, optimizer, out=tmp_path / "run", layers_every=1) as probe:
        (scale * model(x).sum()).backward()  # of fp16, with a norm that fp16 does not know
        optimizer.step()
        probe.step(1.0)

    own = list(model.layers[1].parameters())
    moved = [p.detach() - b for p, b in zip(own, before, strict=True)]
    gradients = norm(p.grad for p in model.parameters())
    assert probe.run.steps["grad_norm"][0] == pytest.approx(gradients, rel=1e-6)
    for name, tensors in (("param_norm", own), ("param_update_norm", moved)):
        assert probe.run.layers(name)[1][1, 1] == pytest.approx(norm(tensors), rel=1e-6)


def test_a_layer_that_runs_three_times_has_three_streams(tmp_path: Path) -> None:
    layer = encoder(1, first=True, dropout=0.0).layers[0]
    model = nn.Sequential(layer, layer, layer)
    x, norms = batch_of(0), []
    for _ in range(3):
        x = layer.eval()(x).detach()
        norms.append(x.norm(dim=-1).mean().item())
    for count in (1, 3):  # listed once: the last of its streams
        run = probed(tmp_path / str(count), 0, model, layers=[layer] * count)
        assert run.layers("stream_norm")[1][0].tolist() == pytest.approx(norms[-count:])


def test_a_mapping_with_the_last_hidden_state_holds_f() -> None:
    F = torch.ones(2, 3, D)
    assert tensor_of({"logits": 2 * F, "last_hidden_state": F}) is F


@pytest.mark.parametrize(
    "after", [nn.ReLU(inplace=True), nn.Dropout(0.0, inplace=True), nn.Hardtanh(inplace=True)]
)
def test_f_is_read_before_a_later_module_overwrites_it(after: nn.Module, tmp_path: Path) -> None:
    norm = nn.LayerNorm(D)
    model = nn.Sequential(encoder(2, dropout=0.0), norm, after, nn.Linear(D, D)).eval()
    x = batch_of(0)

    def literal() -> Tensor:
        return nn.functional.layer_norm(model[0](x), (D,), norm.weight, norm.bias).detach()

    start = literal()
    run = probed(tmp_path / "run", 3, model, hidden="1")
    moved = (literal() - start).norm(dim=-1).mean().item()
    assert run.steps["model_update"].iloc[-1] == pytest.approx(moved, rel=2e-5)


def test_attribution_equals_the_distance_of_a_model_with_one_group_changed(tmp_path: Path) -> None:
    model = encoder(dropout=0.0)
    start = copy.deepcopy(model)
    given = {"attention": "*.self_attn.*", "feed_forward": ["*.linear1.*", "*.linear2.*"]}
    run = probed(tmp_path / "run", 3, model, groups=given, attribution_every=3)
    now, groups = dict(model.named_parameters()), run.meta["groups"]
    assert sorted(n for names in groups.values() for n in names) == sorted(now)
    F_0 = start.eval()(batch_of(0)).detach()
    changes = {}
    for name, members in groups.items():
        mixed = copy.deepcopy(start)
        mixed.load_state_dict({n: now[n].detach() for n in members}, strict=False)
        changes[name] = mixed.eval()(batch_of(0)).detach() - F_0
    moved = model.eval()(batch_of(0)).detach() - F_0
    changes |= {"whole": moved, "unexplained": moved - sum(changes.values())}
    assert list(changes) == [*given, "rest", "whole", "unexplained"]
    sizes = {name: change.norm(dim=-1).mean().item() for name, change in changes.items()}
    (row,) = pd.read_csv(run.path / "attribution.csv").to_dict("records")
    assert row == pytest.approx({"step": 3} | sizes, rel=1e-3)


def test_a_child_named_as_a_column_has_a_group_with_another_name(tmp_path: Path) -> None:
    names = ("step", "whole", "unexplained")
    model = nn.Sequential()
    for name in names:
        model.add_module(name, nn.Linear(D, D))
    run = probed(tmp_path / "run", 2, model, layers=())
    table = pd.read_csv(run.path / "attribution.csv")
    assert list(table) == ["step", *(f"{name}_" for name in names), "whole", "unexplained"]
    assert table["step"].tolist() == [1, 2]


# -- kinds of models and batches -------------------------------------------------------------------


TOKENS = torch.arange(6).view(2, 3)


@pytest.mark.parametrize(
    "batch",
    [TOKENS, (TOKENS, 2.0), [TOKENS], {"tokens": TOKENS, "scale": 0.5}],
    ids=["tensor", "tuple", "list", "mapping"],
)
@pytest.mark.parametrize("hidden", ["name", "module", "function"])
def test_batches_and_hidden_states_of_every_kind(batch: Any, hidden: str, tmp_path: Path) -> None:
    model = WithHead()
    given = {
        "name": "encoder.norm",
        "module": model.encoder,
        "function": lambda m, b: m.encoder(m.embedding(TOKENS)),
    }[hidden]
    expected = model.eval().encoder(model.embedding(TOKENS))
    probe = probe_of(tmp_path, model.train(), batch, hidden=given)
    torch.testing.assert_close(probe.subject.initial, expected.detach())
    assert probe.subject.normalised and probe.config["model"]["d_model"] == D
    assert probe.config["model"]["depth"] == 2
    assert list(probe.groups) == [  # children of a layer, and of the model
        "embedding", "self_attn", "linear1", "linear2", "norm1", "norm2", "encoder", "head",
    ]  # fmt: skip


def test_the_probe_batch_is_a_copy_and_f_without_a_last_norm_has_no_scale(tmp_path: Path) -> None:
    model, batch = encoder(first=True), batch_of(0)
    model.norm = None
    subject = probe_of(tmp_path, model, batch).subject
    batch.zero_()
    assert torch.equal(subject.hidden(), subject.initial) and not subject.normalised


MISTAKES: list[tuple[Callable[[], nn.Module], dict[str, Any], str]] = [
    (lambda: nn.Linear(D, D).requires_grad_(False), {}, "Linear without a trained parameter"),
    (encoder, {"batch": "abc"}, r"batch: found str; allowed a tensor, given as model\(batch\)"),
    (lambda: nn.Linear(D, D), {}, r"no ModuleList; .*layers='blocks', or layers=\(\)"),
    (WithHead, {}, r"shape \(2, 3, 11\), no hidden state of width 16; .*hidden='encoder'"),
    (WithHead, {"hidden": "encodr"}, "unknown module 'encodr'; did you mean 'encoder'"),
    (WithHead, {"hidden": "zzz"}, "unknown module 'zzz'; allowed a name of model.named_modules"),
    (WithHead, {"hidden": lambda m, b: 3}, "found int, no hidden state of width 16"),
    (WithHead, {"hidden": "encoder", "layers": "head"}, "layers: 'head' holds no modules"),
    (WithHead, {"hidden": "encoder", "layers": [nn.Linear(2, 2)]}, "number 1 of those given"),
    (encoder, {"groups": {"a": "*.self_atn.*"}}, "groups: a: no parameter is named"),
    (encoder, {"groups": {"a": "*", "b": "*bias"}}, "is in a and in b"),
    (encoder, {"groups": {"a,b": "*"}}, "found the name 'a,b'"),
    (encoder, {"groups": {"whole": "*"}}, "found the name 'whole'"),
    (encoder, {"every": 0}, "every: found 0"),
    (encoder, {"every": 2.5}, "every: found 2.5"),
    (encoder, {"config": {"model.d_ff": np.int64(3)}}, "config: model.d_ff: Object of type int64"),
    (encoder, {"layers_every": "often"}, "layers_every: found 'often'"),
]


@pytest.mark.parametrize("make, options, message", MISTAKES, ids=[m[2][:30] for m in MISTAKES])
def test_mistakes_are_answered_with_what_to_type(
    make: Callable[[], nn.Module], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model = make()
    given = {"batch": TOKENS if isinstance(model, WithHead) else batch_of(0)} | options
    with pytest.raises(ConfigError, match=message):
        deepstack.probe(model, optimizer=adamw(encoder(1)), out=tmp_path / "run", **given)
    assert not (tmp_path / "run").exists()
    assert model.training
