"""Other packages' stacks, run with the weights of a deepstack model."""

from __future__ import annotations

import importlib
import importlib.util
import math
import warnings
from collections.abc import Callable, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from deepstack.bench.peers import import_torchscale
from helpers.others_weights import (
    AFTER,
    BEFORE,
    D_FF,
    HEADS,
    OUTSIDE,
    PAIRS,
    TOKENS,
    D,
    Norms,
    Weights,
    norms_at,
    take_out_norms,
    torchscale_weights,
    x_transformers_weights,
)


def package(name: str, load: Callable[[str], Any] = importlib.import_module) -> Any:
    """A package or a part of one, or a skipped test where it is not installed.

    One that is installed and cannot be imported is an error.
    """
    if importlib.util.find_spec(name.split(".")[0]) is None:
        pytest.skip(f"{name} is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what they import is theirs
        return load(name)


def run(module: nn.Module, weights: Weights, *args: Any, **kwargs: Any) -> Any:
    """What a module gives with these weights, which must be all that it has."""
    tensors = {**dict(module.named_buffers()), **weights}
    return functional_call(module, tensors, args, kwargs, strict=True)


# -- torchscale ------------------------------------------------------------------------------------

# what their configuration calls our schemes; deepnorm and subln say where norms stand themselves
FLAGS: dict[str, dict[str, bool]] = {
    "deepnorm": {"deepnorm": True},
    "sub_ln": {"subln": True},
    "post_ln": {
        "subln": False,
        "encoder_normalize_before": False,
        "decoder_normalize_before": False,
    },
    "pre_ln": {"subln": False},
}


def torchscale(flags: dict[str, bool], family: str, depth: int, decoder_depth: int) -> list[Any]:
    """Their encoder, their decoder, or both."""
    encoder = package("torchscale", lambda name: import_torchscale())
    decoder = package("torchscale.architecture.decoder")
    sizes = {"embed_dim": D, "attention_heads": HEADS, "ffn_embed_dim": D_FF}
    both = family == "encoder_decoder"
    sides = {"encoder": encoder.Encoder, "decoder": decoder.Decoder}
    settings = package("torchscale.architecture.config").EncoderDecoderConfig(
        **{f"{side}_{key}": size for side in sides for key, size in sizes.items()},
        encoder_layers=depth,
        decoder_layers=decoder_depth,
        activation_fn="gelu",
        no_output_layer=True,
        layernorm_eps=1e-5,
        **flags,
    )
    torch.manual_seed(0)
    return [
        make(settings, is_encoder_decoder=both) for side, make in sides.items() if side in family
    ]


def by_torchscale(model: Any, stacks: list[Any]) -> Tensor:
    """F of their stacks with the weights of ours, in double precision throughout.

    Theirs takes softmax and activation to single precision; here they stay as they are.
    """
    weights = [torchscale_weights(stack) for stack in model.stacks.values()]
    source, target = model.split(model.start(PAIRS if len(stacks) == 2 else TOKENS))
    attention = package("torchscale.component.multihead_attention")
    softmax = SimpleNamespace(softmax=lambda z, dim, dtype: torch.softmax(z, dim))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "F", softmax)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        memory = None
        if hasattr(stacks[0], "build_encoder_layer"):
            read = source if len(stacks) == 2 else target
            memory = run(stacks[0], weights[0], None, token_embeddings=read, features_only=True)
            if len(stacks) == 1:
                return memory["encoder_out"]
        tokens = torch.zeros(target.shape[:2], dtype=torch.long)  # only their number is read
        given = {"token_embeddings": target, "encoder_out": memory, "features_only": True}
        return run(stacks[-1], weights[-1], tokens, **given)[0]


# -- x-transformers --------------------------------------------------------------------------------


class Wiring(NamedTuple):
    """A scheme as options of x-transformers: theirs(N) with the coefficients of the paper at N.

    norms: ours by where theirs are.  ours: our own options.  entry: a norm comes before the layers.
    first: their first layer is this one of ours.  missing: norms of theirs (sublayer of a layer,
    place) that are taken out, since their option has more of them than the paper.
    """

    norms: Callable[[Any, int], Norms]
    theirs: Callable[[int], dict[str, Any]] = lambda N: {}
    ours: Mapping[str, Any] = MappingProxyType({})
    entry: bool = False
    first: int = 1
    missing: tuple[tuple[int, int], ...] = ()


def post(**options: Any) -> dict[str, Any]:
    return {"pre_norm": False} | options


def norm_former_norms(model: Any, l: int) -> Norms:
    s = model.layers[l - 1].scheme
    (before,), (before_feed_forward,) = s.attention_norms, s.feed_forward_norms
    return {BEFORE: before, AFTER: s.after_attention}, {BEFORE: before_feed_forward}


def hybrid_norms(model: Any, l: int) -> Norms:
    last = l == len(model.layers)
    return {OUTSIDE: model.layers[l - 1].scheme.between}, (
        {OUTSIDE: model.last.final_norm} if last else {}
    )


RMS = {"model__norm__kind": "rms", "model__norm__eps": 1e-15}  # theirs has no eps
DYT = {"model__norm__kind": "dynamic_tanh", "model__norm__bias": True}

WIRINGS: dict[str, Wiring] = {
    "pre_ln": Wiring(norms_at(BEFORE)),
    "pre_ln rms": Wiring(norms_at(BEFORE), lambda N: {"use_rmsnorm": True}, RMS),
    "pre_ln dyt": Wiring(norms_at(BEFORE), lambda N: {"use_dynamic_tanh": True}, DYT),
    "post_ln": Wiring(norms_at(OUTSIDE), lambda N: post()),
    "deepnorm": Wiring(
        norms_at(OUTSIDE), lambda N: post(scale_residual_constant=(2 * N) ** (1 / 4))
    ),
    "branch_norm": Wiring(  # at step 7 of 14
        norms_at(OUTSIDE),
        lambda N: post(depth_scale_residual=0.5),
        {"model__scheme_options": {"ramp_steps": 14}},
    ),
    "admin": Wiring(norms_at(OUTSIDE), lambda N: post(scale_residual=True)),
    "sandwich_ln": Wiring(norms_at(BEFORE, AFTER), lambda N: {"sandwich_norm": True}),
    "peri_ln": Wiring(
        norms_at(BEFORE, AFTER),
        lambda N: {"sandwich_norm": True, "use_rmsnorm": True},
        RMS,
        entry=True,
    ),
    "layer_scale": Wiring(norms_at(BEFORE), lambda N: {"use_layerscale": True}),
    "depth_mup": Wiring(norms_at(BEFORE), lambda N: {"depth_scale_residual": math.sqrt(2 / N)}),
    "complete_p": Wiring(norms_at(BEFORE), lambda N: {"depth_scale_residual": 2 / N}),
    "deep_scale_lm": Wiring(
        norms_at(BEFORE),
        lambda N: {
            "scale_residual_constant": math.sqrt(1 - min(2 / N, 0.5)),
            "depth_scale_residual": math.sqrt(min(2 / N, 0.5)),
        },
    ),
    # theirs treats all layers alike; the paper's first has alpha = 1 and a norm less
    "keel": Wiring(
        norms_at(BEFORE, OUTSIDE),
        lambda N: {"pre_and_post_norm": True, "scale_residual_constant": 2.0 * N},
        first=2,
    ),
    "norm_former": Wiring(
        norm_former_norms,
        lambda N: {"sandwich_norm": True, "attn_head_scale": True, "ff_post_act_ln": True},
        missing=((1, AFTER),),
    ),
    "hybrid_norm": Wiring(
        hybrid_norms,
        lambda N: post(use_rmsnorm=True, attn_qk_rmsnorm=True, attn_value_rmsnorm=True),
        RMS,
        missing=((1, OUTSIDE),),
    ),
}


def by_x_transformers(model: Any, wiring: Wiring, N: int) -> Tensor:
    """F of their stack with the weights of ours."""
    library = package("x_transformers")
    options = wiring.theirs(N)
    make = library.Decoder if model.decoder is not None else library.Encoder
    stack = make(
        dim=D,
        depth=N - wiring.first + 1,
        heads=HEADS,
        attn_dim_head=D // HEADS,
        attn_flash=True,
        ff_mult=D_FF / D,
        norm_add_unit_offset=False,
        verbose=False,
        **options,
    )
    layers = range(wiring.first, N + 1)
    missing = take_out_norms(stack, [wiring.norms(model, l) for l in layers])
    assert missing == set(wiring.missing)
    x = model.start(TOKENS)
    if wiring.entry:
        norm = library.x_transformers.RMSNorm(D)
        x = run(norm, {"g": model.last.entry_norm.gain}, x)
    for layer in model.layers[: wiring.first - 1]:
        x = layer(x)
    return run(stack, x_transformers_weights(model, layers, wiring.norms, options), x)
