"""Diagnostics of signals, each against a slow version written from its definition."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.sampling import some
from helpers.snapshots import CPU, Look
from torch import Tensor

import deepstack
from deepstack.cli.list_command import diagnostic_rows
from deepstack.config import Config, with_overrides
from deepstack.diagnostics import describe
from deepstack.fast import FastPaths, enable_fast_paths, make_step
from deepstack.schemes import SCHEMES
from deepstack.training import make_optimizer, mean_loss, to_device

WIRINGS = {"post_ln": "post", "deepnorm": "post", "ds_init": "post", "pre_ln": "pre"}


def norm(module: Any, z: Tensor) -> Tensor:
    mean = z.mean(-1, keepdim=True)
    variance = ((z - mean) ** 2).mean(-1, keepdim=True)
    return module.gain * (z - mean) / torch.sqrt(variance + 1e-5) + module.bias


def sublayers(look: Look) -> Iterator[tuple[int, str, dict[str, Tensor]]]:
    """(layer, sublayer, its tensors) of post- or pre-norm wiring, whose gradients are kept."""
    scheme = SCHEMES[look.config.model.scheme]
    rows = []
    memory = None
    layer_number = -1
    for stack, x in zip(look.model.stacks.values(), look.model.inputs(look.tokens), strict=True):
        x = x.detach().requires_grad_()
        for layer in stack.layers:
            layer_number += 1
            for name in layer.names:
                module, own = getattr(layer, name), getattr(layer.scheme, f"{name}_norms")[0]
                G = partial(module, memory=memory) if name == "cross_attention" else module
                z = x
                if WIRINGS[scheme.name] == "post":
                    alpha = getattr(layer.scheme, "coefficient", 1.0)
                    g = G(x)
                    r = alpha * x + g
                    into = r.clone()
                    o = out = norm(own, into)
                else:
                    into = x.clone()
                    o = norm(own, into)
                    g = G(o)
                    r = out = x + g
                # out: the stream that goes on; into: what only the norm reads
                kept = {"z": z, "r": r, "o": o, "into": into, "g": g, "out": out}
                for tensor in kept.values():
                    tensor.retain_grad()
                rows.append((layer_number, name, kept))
                x = out
        memory = x if stack.final_norm is None else norm(stack.final_norm, x)
    look.loss(look.model.head(memory, look.model.embedding)).backward()
    yield from rows


@pytest.mark.parametrize("family", ["encoder", "decoder", "encoder_decoder"])
@pytest.mark.parametrize("scheme", WIRINGS)
def test_gradient_ratios_are_those_of_the_definition(scheme: str, family: str) -> None:
    look = Look(model__scheme=scheme, model__family=family)
    found = look.values()
    for layer, name, t in sublayers(look):
        size = {
            key: value.grad.double().norm().item()
            for key, value in t.items()
            if value.grad is not None
        }
        beta_ln, beta_rc = size["into"] / size["o"], size["z"] / size["r"]
        assert found[f"beta_ln_{name}"][layer].item() == pytest.approx(beta_ln, rel=1e-4)
        assert found[f"beta_rc_{name}"][layer].item() == pytest.approx(beta_rc, rel=1e-4)
        into, g = t["into"].detach().double(), t["g"].detach().double()
        variance = into.var(dim=-1, correction=0).mean().item()
        assert found[f"ln_input_variance_{name}"][layer].item() == pytest.approx(variance, rel=1e-4)
        predicted = found[f"beta_ln_predicted_{name}"][layer].item()
        if WIRINGS[scheme] == "pre":
            assert math.isnan(predicted)
        else:
            place = look.model.layers[layer].scheme.place
            alpha = SCHEMES[scheme].configure(place=place).alpha(3)
            square = (alpha or 1.0) ** 2 + g.var(dim=-1, correction=0).mean().item()
            assert predicted == pytest.approx(square**-0.5, rel=1e-4)


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


@pytest.mark.parametrize("kind", ["layer", "rms", "batch", "dynamic_tanh"])
def test_ln_jacobian_is_the_norm_of_the_jacobian(kind: str) -> None:
    look = Look(model__norm={"kind": kind})
    for equal in (True, False):
        if equal:
            with torch.no_grad():
                for scheme in look.model.schemes:
                    for norms in scheme.norm_functions:
                        norms[0].gain.fill_(1.7)
        found = look.values()
        (stack,) = look.model.stacks.values()
        x = next(iter(stack.stream(look.model.start(look.tokens))))
        layer = stack.layers[0]
        for name in layer.names:
            module = getattr(layer.scheme, f"{name}_norms")[0]
            z = layer.scheme.coefficient * x + getattr(layer, name)(x)
            value = found[f"ln_jacobian_{name}"][0].item()
            if kind in ("batch", "dynamic_tanh"):
                assert math.isnan(value)
            else:
                exact = []
                for token in z.detach().flatten(0, 1):
                    J = torch.autograd.functional.jacobian(module, token)
                    exact.append(torch.linalg.matrix_norm(J.double(), ord=2).item())
                mean, gains = sum(exact) / len(exact), module.gain.detach().abs().sort().values
                if equal:
                    assert value == pytest.approx(mean, rel=1e-4)
                else:
                    assert value * (gains[-3] / gains[-1]).item() < mean < value * (1 + 1e-6)
            x = module(z)
        with torch.no_grad():
            for scheme in look.model.schemes:
                for norms in scheme.norm_functions:
                    norms[0].gain.uniform_(0.5, 1.5)


@pytest.mark.parametrize("scheme", ["deepnorm", "post_ln", "deepnorm_tight", "admin", "pre_ln"])
@pytest.mark.parametrize("distribution", ["xavier_normal", "ntk"])
def test_grad_norm_predicted_is_the_formula_from_the_last_layer_down(
    scheme: str, distribution: str
) -> None:
    look = Look(model__scheme=scheme, model__init={"distribution": distribution}, model__depth=4)
    if scheme == "admin":  # omega is one number a sublayer, as it starts
        with torch.no_grad():
            for own in look.model.schemes:
                for number, omega in enumerate(own.each("omega")):
                    omega.fill_(1.5 + number)
    found = look.values()
    wanted, factor = [], 1.0
    for number, layer in reversed(list(enumerate(look.model.layers))):
        wanted.insert(0, found["matrix_grad_norm"][-1].item() * factor)
        A, F = layer.attention, layer.feed_forward
        W_v = A.qkv.detach().double().chunk(3)[2]
        pairs = ((W_v, A.o.detach().double(), 1.0, 1.5), (F.w1, F.w2.detach(), 0.5, 2.5))
        for inner, outer, kept, omega in pairs:
            alpha = omega if scheme == "admin" else SCHEMES[scheme].alpha(4) or 1.0
            products = [
                (W.detach().double() ** 2).mean().item()
                * (1 if distribution == "ntk" else W.shape[1])
                for W in (inner, outer)
            ]
            vw = products[0] * kept * products[1]
            factor *= math.sqrt(max(0.0, (alpha**2 - vw) / (alpha**2 + vw)))
        assert number == len(look.model.layers) - len(wanted)
    predicted = found["grad_norm_predicted"]
    if scheme == "pre_ln":
        # the last layer is what all others are compared with
        assert predicted[:-1].isnan().all()
    else:
        assert predicted.tolist() == pytest.approx(wanted, rel=1e-3, abs=1e-12)
    assert predicted[-1] == found["matrix_grad_norm"][-1]


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


def test_grad_norm_predicted_is_not_said_of_a_decoder_that_reads_an_encoder() -> None:
    found = Look(model__family="encoder_decoder").values()["grad_norm_predicted"]
    assert found[:3].isfinite().all() and found[3:].isnan().all()


def entropy(q: Tensor, k: Tensor, causal: bool, before: Tensor | None = None) -> float:
    """Mean over sequences, heads and positions, one at a time, in double precision."""
    values = []
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for i in range(q.shape[2]):
                reads = i + 1 if causal else k.shape[2]
                logits = k[b, h, :reads].double() @ q[b, h, i].double() / math.sqrt(q.shape[3])
                if before is not None:
                    logits = logits + before[b, h, i, :reads]
                p = (logits - logits.max()).exp()
                p = p / p.sum()
                values.append(-sum(float(w) * math.log(float(w)) for w in p if w > 0))
    return sum(values) / len(values)


def heads(x: Tensor, W: Tensor, b: Tensor, count: int) -> Tensor:
    return (x @ W.T + b).view(*x.shape[:2], count, -1).transpose(1, 2)


@pytest.mark.parametrize("family", ["encoder", "decoder"])
@pytest.mark.parametrize("scheme", ["deepnorm", "real_former"])
def test_attention_entropy_against_loops(family: str, scheme: str) -> None:
    look = Look(model__family=family, model__scheme=scheme, task__name="text")
    found = look.values()
    assert "attention_entropy_cross_attention" not in found
    (stack,) = look.model.stacks.values()
    before: Tensor | None = None
    states = list(stack.stream(look.model.start(look.tokens)))
    for index, layer in enumerate(stack.layers):
        x = states[index] if isinstance(states[index], Tensor) else states[index][0]
        A = layer.attention
        q, k = (heads(x, A.qkv.chunk(3)[i], A.qkv_bias.chunk(3)[i], 2).detach() for i in (0, 1))
        wanted = entropy(q, k, family == "decoder", before)
        assert found["attention_entropy_attention"][index].item() == pytest.approx(wanted, rel=1e-4)
        if scheme == "real_former":
            own = q.double() @ k.double().transpose(-1, -2) / math.sqrt(8)
            before = own if before is None else before + own


@pytest.mark.parametrize("merged", [False, True])
def test_attention_entropy_of_what_reads_an_encoder(merged: bool) -> None:
    kind = "merged" if merged else "separate"
    look = Look(
        model__family="encoder_decoder", model__decoder_attention=kind, model__scheme="post_ln"
    )
    found = look.values()
    encoder, decoder = look.model.stacks.values()
    source, target = look.model.inputs(look.tokens)
    memory = encoder(source)
    for index, layer in enumerate(decoder.layers):
        reader = layer.attention if merged else layer.cross_attention
        given = []
        handle = reader.register_forward_pre_hook(
            lambda _, args, found=given: found.append(args[0])
        )
        target = layer(target, memory)
        handle.remove()
        W_k = reader.k if merged else reader.kv.chunk(2)[0]
        b_k = reader.k_bias if merged else reader.kv_bias.chunk(2)[0]
        q = heads(given[0], reader.q, reader.q_bias, 2).detach()
        wanted = entropy(q, heads(memory, W_k, b_k, 2).detach(), False)
        name = "attention_entropy_attention" if merged else "attention_entropy_cross_attention"
        assert found[name][3 + index].item() == pytest.approx(wanted, rel=1e-4)
    assert found["attention_entropy_attention"][:3].isfinite().all()


def test_update_to_weight() -> None:
    look = Look()
    found = look.values()
    for index, layer in enumerate(look.model.layers):
        sizes = [p.detach().double() for p in layer.parameters()]
        moved = math.sqrt(sum(p.numel() * 0.01**2 for p in sizes))
        wanted = moved / math.sqrt(sum(float(p.square().sum()) for p in sizes))
        assert found["update_to_weight"][index].item() == pytest.approx(wanted, rel=1e-4)


def test_the_list_of_diagnostics_keeps_the_former_key_in_json_alone() -> None:
    assert all(row["beat"] == row["interval"] for row in diagnostic_rows(nested=True))
    assert not any("beat" in row for row in diagnostic_rows(nested=False))


@pytest.mark.parametrize("scheme", some(SCHEMES.names(), 3, 2))
def test_every_scheme_can_be_looked_at_and_is_left_as_it_was(scheme: str) -> None:
    """Files that describe themselves, and a next step with the same bits, seen or not."""
    family = "encoder_decoder" if "encoder_decoder" in SCHEMES[scheme].families else "encoder"
    losses = []
    listed = {row["name"] for row in diagnostic_rows(nested=False)}
    for looks in (False, True):
        look = Look(model__scheme=scheme, model__family=family, skipped=2)
        enable_fast_paths(
            look.model, FastPaths(fused=True, compiled=False, captured=False), 0, print
        )
        step = make_step(
            lambda x, y, m=look.model: mean_loss(m(x), y), look.built.banks, look.built.trained,
            make_optimizer(look.config.train, look.built.trained, optim=look.built.optim),
            clip=1.0, max_loss=1e9, alive=torch.ones(()),
        )  # fmt: skip
        torch.manual_seed(3)
        rows = []
        for number in range(3):
            batch = to_device(look.task.train_batch(number + 1, 4), CPU)
            rows.append([float(m) for m in step(*batch, 1e-3)[:2]])
            if looks:
                state = torch.get_rng_state()
                found = look.values()
                assert set(found) <= set(describe()) & listed
                depth = len(look.model.layers)
                assert all(values.shape == (depth,) for values in found.values())
                assert found["effective_rank"].isfinite().all()
                assert found["skip_loss"].isfinite().sum() == 2
                assert torch.equal(torch.get_rng_state(), state)
                for layer in look.model.layers:
                    assert not {"project", "weigh", "attend"} & set(vars(layer.attention))
                    assert "residual" not in vars(layer.scheme)
        losses.append(rows)
    assert losses[0] == losses[1]
