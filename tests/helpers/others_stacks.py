"""Other packages' stacks, run with the weights of a deepstack model.

Nothing is copied: a weight is an expression of our own parameters, so that
the other package's results can be differentiated with respect to them, whatever differs in shape
or meaning.
"""

import importlib
import importlib.util
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Set
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from benchmarks.peers.peers import import_torchscale
from deepstack.config import Config
from deepstack.model import build_model
from helpers.configs import config_with
from helpers.scheme_pieces import move

D, HEADS, D_FF, SEQ, VOCAB = 16, 4, 40, 6, 11
TOKENS = torch.arange(2 * SEQ).view(2, SEQ) * 5 % VOCAB
PAIRS = torch.arange(4 * SEQ).view(2, 2 * SEQ) * 5 % VOCAB  # source and target side by side
ATTENTION_BIASES = ("attention.qkv_bias", "attention.o_bias")

Weights = dict[str, Tensor]


def config_of(scheme: str, depth: int, **changes: Any) -> Config:
    keys = {
        "model.scheme": scheme, "model.depth": depth, "model.d_model": D, "model.n_heads": HEADS,
        "model.d_ff": D_FF, "model.activation": "gelu", "task.seq_len": SEQ,
    }  # fmt: skip
    return config_with(keys, **changes)


def model_of(config: Config, *, moved: bool = True, attention_bias: bool = True) -> Any:
    """In double precision; moved: every parameter away from where it starts, 0 and 1 above all.

    attention_bias: False where theirs has no biases in attention, and so ours must stay 0.
    """
    built = build_model(config, vocab_size=VOCAB)
    built.at_step(7)
    model = built.model.double()
    if moved:
        move(model, () if attention_bias else ATTENTION_BIASES)
    return model


def maps_of(layer: Any) -> dict[str, tuple[Tensor, Tensor]]:
    """Role -> weight and bias of each linear map of a layer."""
    a, f = layer.attention, layer.feed_forward
    roles = ["q", "k", "v", "o", "w1", "w2"]
    weights = [*a.qkv.chunk(3), a.o, f.w1, f.w2]
    biases = [*a.qkv_bias.chunk(3), a.o_bias, f.w1_bias, f.w2_bias]
    if "cross_attention" in layer.names:
        c = layer.cross_attention
        roles += ["cross_q", "cross_k", "cross_v", "cross_o"]
        weights += [c.q, *c.kv.chunk(2), c.o]
        biases += [c.q_bias, *c.kv_bias.chunk(2), c.o_bias]
    return dict(zip(roles, zip(weights, biases, strict=True), strict=True))


def package(name: str, load: Callable[[str], Any] = importlib.import_module) -> Any:
    """A package or a part of one, or a skipped test where it is not installed.

    One that is installed and cannot be imported is an error.
    """
    if importlib.util.find_spec(name.split(".")[0]) is None:
        pytest.skip(f"{name} is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of their imports
        return load(name)


def run(module: nn.Module, weights: Weights, *args: Any, **kwargs: Any) -> Any:
    """Return the output of a module with these weights, which must be all of its weights."""
    tensors = {**dict(module.named_buffers()), **weights}
    return functional_call(module, tensors, args, kwargs, strict=True)


# -- torchscale ------------------------------------------------------------------------------------

# what their configuration calls our schemes; deepnorm and subln say where norms stand themselves
FLAGS: dict[str, dict[str, bool]] = {
    "deepnorm": {"deepnorm": True},
    "sub_ln": {"subln": True},
    "post_ln": {
        "subln": False, "encoder_normalize_before": False, "decoder_normalize_before": False
    },
    "pre_ln": {"subln": False},
}  # fmt: skip


# the linear maps of their layers -> our roles
ROLES = {
    "self_attn.q_proj": "q", "self_attn.k_proj": "k", "self_attn.v_proj": "v",
    "self_attn.out_proj": "o", "encoder_attn.q_proj": "cross_q", "encoder_attn.k_proj": "cross_k",
    "encoder_attn.v_proj": "cross_v", "encoder_attn.out_proj": "cross_o", "ffn.fc1": "w1",
    "ffn.fc2": "w2",
}  # fmt: skip


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


def torchscale_weights(stack: Any) -> Weights:
    """Encoder or Decoder of torchscale, from one of our stacks."""
    affine = {}
    if stack.final_norm is not None:
        affine["layer_norm"] = (stack.final_norm.gain, stack.final_norm.bias)
    for i, layer in enumerate(stack.layers):
        s, maps = layer.scheme, maps_of(layer)
        affine |= {f"layers.{i}.{name}": maps[r] for name, r in ROLES.items() if r in maps}
        norms = {"self_attn": s.attention_norms[0], "final": s.feed_forward_norms[0]}
        if "cross_attention" in layer.names:
            norms["encoder_attn"] = s.cross_attention_norms[0]
        inner = {"before_out": "self_attn.inner_attn_ln", "after_activation": "ffn.ffn_layernorm"}
        named = {f"{name}_layer_norm": norm for name, norm in norms.items()}
        named |= {name: s.slots[slot] for slot, name in inner.items() if slot in s.slots}
        affine |= {f"layers.{i}.{name}": (norm.gain, norm.bias) for name, norm in named.items()}
    found = {f"{name}.weight": weight for name, (weight, _) in affine.items()}
    return found | {f"{name}.bias": bias for name, (_, bias) in affine.items()}


def by_torchscale(model: Any, stacks: list[Any]) -> Tensor:
    """F of their stacks with the weights of ours, in double precision throughout.

    Theirs takes softmax and activation to single precision; here they stay as they are.
    """
    weights = [torchscale_weights(stack) for stack in model.stacks.values()]
    source, target = model.split(model.embed(PAIRS if len(stacks) == 2 else TOKENS))
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

BEFORE, AFTER, OUTSIDE = 0, 1, 2
"""The places of norms in x-transformers: input and output of a sublayer, sum with the stream."""

Norms = tuple[dict[int, Any], dict[int, Any]]
"""Our norms by where theirs are, of attention and of feed-forward."""


def norms_at(*places: int) -> Callable[[Any, int], Norms]:
    """The norms of each sublayer stand in these places, in the order in which a scheme has them."""

    def of(model: Any, l: int) -> Norms:
        s = model.layers[l - 1].scheme
        own = s.attention_norms, s.feed_forward_norms
        return tuple(dict(zip(places, norms, strict=True)) for norms in own)  # type: ignore[return-value]

    return of


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
    missing: Set[tuple[int, int]] = frozenset()


def post(**options: Any) -> dict[str, Any]:
    return {"pre_norm": False} | options


def norm_former_norms(model: Any, l: int) -> Norms:
    s = model.layers[l - 1].scheme
    (before,), (before_feed_forward,) = s.attention_norms, s.feed_forward_norms
    return {BEFORE: before, AFTER: s.after_attention}, {BEFORE: before_feed_forward}


def hybrid_norms(model: Any, l: int) -> Norms:
    after = {OUTSIDE: model.last.final_norm} if l == len(model.layers) else {}
    return {OUTSIDE: model.layers[l - 1].scheme.between}, after


PRE = norms_at(BEFORE)
POST = norms_at(OUTSIDE)
SANDWICH = norms_at(BEFORE, AFTER)

RMS = {"model__norm__kind": "rms", "model__norm__eps": 1e-15}  # theirs has no eps
DYT = {"model__norm__kind": "dynamic_tanh", "model__norm__bias": True}
RAMP = {"model__scheme_options": {"ramp_steps": 14}}  # of which this is step 7

WIRINGS: dict[str, Wiring] = {
    "pre_ln": Wiring(PRE),
    "pre_ln rms": Wiring(PRE, lambda N: {"use_rmsnorm": True}, RMS),
    "pre_ln dyt": Wiring(PRE, lambda N: {"use_dynamic_tanh": True}, DYT),
    "post_ln": Wiring(POST, lambda N: post()),
    "deepnorm": Wiring(POST, lambda N: post(scale_residual_constant=(2 * N) ** (1 / 4))),
    "branch_norm": Wiring(POST, lambda N: post(depth_scale_residual=0.5), RAMP),
    "admin": Wiring(POST, lambda N: post(scale_residual=True)),
    "sandwich_ln": Wiring(SANDWICH, lambda N: {"sandwich_norm": True}),
    "peri_ln": Wiring(
        SANDWICH, lambda N: {"sandwich_norm": True, "use_rmsnorm": True}, RMS, entry=True
    ),
    "layer_scale": Wiring(PRE, lambda N: {"use_layerscale": True}),
    "depth_mup": Wiring(PRE, lambda N: {"depth_scale_residual": math.sqrt(2 / N)}),
    "complete_p": Wiring(PRE, lambda N: {"depth_scale_residual": 2 / N}),
    "deep_scale_lm": Wiring(
        PRE,
        lambda N: {
            "scale_residual_constant": math.sqrt(1 - min(2 / N, 0.5)),
            "depth_scale_residual": math.sqrt(min(2 / N, 0.5)),
        },
    ),
    # theirs treats all layers equally; the paper's first has alpha = 1 and a norm less
    "keel": Wiring(
        norms_at(BEFORE, OUTSIDE),
        lambda N: {"pre_and_post_norm": True, "scale_residual_constant": 2.0 * N},
        first=2,
    ),
    "norm_former": Wiring(
        norm_former_norms,
        lambda N: {"sandwich_norm": True, "attn_head_scale": True, "ff_post_act_ln": True},
        missing={(1, AFTER)},
    ),
    "hybrid_norm": Wiring(
        hybrid_norms,
        lambda N: post(use_rmsnorm=True, attn_qk_rmsnorm=True, attn_value_rmsnorm=True),
        RMS,
        missing={(1, OUTSIDE)},
    ),
}


def x_transformers_norm(name: str, norm: Any) -> Weights:
    """Their norms have no bias, but for DyT."""
    kind = type(norm).__name__
    if kind == "DynamicTanh":
        scale = norm.scale.squeeze()
        return {
            f"{name}.gamma": norm.gain, f"{name}.beta": norm.bias, f"{name}.pre_tanh_scale": scale
        }  # fmt: skip
    return {f"{name}.{'g' if kind == 'RMSNorm' else 'gamma'}": norm.gain}


def x_transformers_weights(
    model: Any, layers: Iterable[int], norms_of: Callable[[Any, int], Norms], options: Mapping
) -> Weights:
    """Encoder or Decoder of x-transformers, built with these options, from layers l of ours.

    Their sublayer 2i is the attention of a layer, 2i + 1 its feed-forward; each is its norms (.0),
    the sublayer (.1) and the residual connection (.2).
    """
    found: Weights = {}
    for i, l in enumerate(layers):
        layer = model.layers[l - 1]
        s, maps = layer.scheme, maps_of(layer)
        for j, norms in enumerate(norms_of(model, l)):
            for place, norm in norms.items():
                found |= x_transformers_norm(f"layers.{2 * i + j}.0.{place}", norm)
        attention, feed_forward = f"layers.{2 * i}.1", f"layers.{2 * i + 1}.1"
        if options.get("use_layerscale"):
            found[f"{attention}.gamma"] = s.attention_scale
            found[f"{feed_forward}.gamma"] = s.feed_forward_scale
        if options.get("use_layerscale") or "depth_scale_residual" in options:
            attention, feed_forward = f"{attention}.fn", f"{feed_forward}.fn"
        if options.get("scale_residual"):
            found[f"layers.{2 * i}.2.residual_scale"] = s.attention_omega
            found[f"layers.{2 * i + 1}.2.residual_scale"] = s.feed_forward_omega
        inner = bool(options.get("ff_post_act_ln"))
        names = {"q": "to_q", "k": "to_k", "v": "to_v", "o": "to_out"}
        found |= {f"{attention}.{name}.weight": maps[role][0] for role, name in names.items()}
        for role, index in (("w1", "0.0"), ("w2", 2 + inner)):
            weight, bias = maps[role]
            found[f"{feed_forward}.ff.{index}.weight"] = weight
            found[f"{feed_forward}.ff.{index}.bias"] = bias
        if inner:
            found |= x_transformers_norm(f"{feed_forward}.ff.1", s.slots["after_activation"])
        if options.get("attn_head_scale"):
            found[f"{attention}.head_scale_params"] = s.slots["heads"].scale.view(1, HEADS, 1, 1)
        if options.get("attn_qk_rmsnorm"):
            for part, name in zip("qkv", ("q", "k", "value"), strict=True):
                # theirs has a gain a head, and keeps it as its difference from 1
                gain = (s.slots[part].gain - 1).expand(HEADS, 1, -1)
                found[f"{attention}.{name}_rmsnorm.gamma"] = gain
    if model.last.final_norm is not None and options.get("pre_norm", True):
        found |= x_transformers_norm("final_norm", model.last.final_norm)
    return found


def by_x_transformers(model: Any, wiring: Wiring, N: int) -> Tensor:
    """F of their stack with the weights of ours."""
    library = package("x_transformers")
    options, layers = wiring.theirs(N), range(wiring.first, N + 1)
    make = library.Decoder if model.decoder is not None else library.Encoder
    stack = make(
        dim=D, depth=len(layers), heads=HEADS, attn_dim_head=D // HEADS, attn_flash=True,
        ff_mult=D_FF / D, norm_add_unit_offset=False, verbose=False, **options,
    )  # fmt: skip
    missing = set()
    for index, kept in enumerate(kept for l in layers for kept in wiring.norms(model, l)):
        own = stack.layers[index][0]
        for place in (BEFORE, AFTER, OUTSIDE):
            if own[place] is not None and place not in kept:
                own[place] = None
                missing.add((index % 2, place))
    assert missing == wiring.missing
    x = model.embed(TOKENS)
    if wiring.entry:
        norm = library.x_transformers.RMSNorm(D)
        x = run(norm, {"g": model.last.entry_norm.gain}, x)
    for layer in model.layers[: wiring.first - 1]:
        x = layer(x)
    return run(stack, x_transformers_weights(model, layers, wiring.norms, options), x)
