"""Weights of a deepstack model under the names that other packages give them.

Nothing is copied: a value is an expression of our own parameters, so that what the other package
computes with it can be differentiated by them, whatever differs in shape or meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from deepstack.config import Config
from deepstack.model import Layer, build_model
from helpers.configs import config_with
from helpers.scheme_pieces import move

D, HEADS, D_FF, SEQ, VOCAB = 16, 4, 40, 6, 11
TOKENS = torch.arange(2 * SEQ).view(2, SEQ) * 5 % VOCAB
PAIRS = torch.arange(4 * SEQ).view(2, 2 * SEQ) * 5 % VOCAB  # source and target side by side

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


ATTENTION_BIASES = ("attention.qkv_bias", "attention.o_bias")


class Linear(NamedTuple):
    """y = x Wᵀ + b."""

    weight: Tensor
    bias: Tensor

    def rows(self, parts: int) -> list[Linear]:
        """The maps that are computed together, each by itself."""
        return [
            Linear(*pair)
            for pair in zip(self.weight.chunk(parts), self.bias.chunk(parts), strict=True)
        ]

    def named(self, name: str) -> Weights:
        return {f"{name}.weight": self.weight, f"{name}.bias": self.bias}


class Attention(NamedTuple):
    """The four linear maps of self-attention or of cross-attention."""

    q: Linear
    k: Linear
    v: Linear
    o: Linear


def attention_of(layer: Layer) -> Attention:
    a: Any = layer.attention
    q, k, v = Linear(a.qkv, a.qkv_bias).rows(3)
    return Attention(q, k, v, Linear(a.o, a.o_bias))


def cross_attention_of(layer: Layer) -> Attention:
    a: Any = layer.cross_attention
    k, v = Linear(a.kv, a.kv_bias).rows(2)
    return Attention(Linear(a.q, a.q_bias), k, v, Linear(a.o, a.o_bias))


def feed_forward_of(layer: Layer) -> tuple[Linear, Linear]:
    f: Any = layer.feed_forward
    return Linear(f.w1, f.w1_bias), Linear(f.w2, f.w2_bias)


def affine(norm: Any) -> Linear:
    """Gain and bias of a norm, which nn.LayerNorm calls weight and bias."""
    return Linear(norm.gain, norm.bias)


# -- torchscale ------------------------------------------------------------------------------------


def torchscale_weights(stack: Any) -> Weights:
    """Encoder or Decoder of torchscale, from one of our stacks."""
    found: Weights = (
        {} if stack.final_norm is None else affine(stack.final_norm).named("layer_norm")
    )
    for i, layer in enumerate(stack.layers):
        found |= {f"layers.{i}.{name}": tensor for name, tensor in of_torchscale(layer).items()}
    return found


def of_torchscale(layer: Layer) -> Weights:
    scheme: Any = layer.scheme
    found = attention_in_torchscale("self_attn", attention_of(layer))
    found |= affine(scheme.attention_norms[0]).named("self_attn_layer_norm")
    if "cross_attention" in scheme.sublayers:
        found |= attention_in_torchscale("encoder_attn", cross_attention_of(layer))
        found |= affine(scheme.cross_attention_norms[0]).named("encoder_attn_layer_norm")
    w1, w2 = feed_forward_of(layer)
    found |= w1.named("ffn.fc1") | w2.named("ffn.fc2")
    found |= affine(scheme.feed_forward_norms[0]).named("final_layer_norm")
    inner = {"before_out": "self_attn.inner_attn_ln", "after_activation": "ffn.ffn_layernorm"}
    for slot, name in inner.items():
        if slot in scheme.slots:
            found |= affine(scheme.slots[slot]).named(name)
    return found


def attention_in_torchscale(name: str, attention: Attention) -> Weights:
    q, k, v, o = attention
    maps = {"q_proj": q, "k_proj": k, "v_proj": v, "out_proj": o}
    return {
        key: tensor
        for part, linear in maps.items()
        for key, tensor in linear.named(f"{name}.{part}").items()
    }


# -- x-transformers --------------------------------------------------------------------------------

BEFORE, AFTER, OUTSIDE = 0, 1, 2
"""Where x-transformers norms: what a sublayer reads, what it gives, and the sum with the stream."""

Norms = tuple[dict[int, Any], dict[int, Any]]
"""Our norms by where theirs are, of attention and of feed-forward."""


def norms_at(*places: int) -> Callable[[Any, int], Norms]:
    """The norms of each sublayer stand in these places, in the order in which a scheme has them."""

    def of(model: Any, l: int) -> Norms:
        s = model.layers[l - 1].scheme
        own = s.attention_norms, s.feed_forward_norms
        return tuple(dict(zip(places, norms, strict=True)) for norms in own)  # type: ignore[return-value]

    return of


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
        s = layer.scheme
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
        for part, linear in zip("qkv", attention_of(layer), strict=False):
            found[f"{attention}.to_{part}.weight"] = linear.weight
        found[f"{attention}.to_out.weight"] = attention_of(layer).o.weight
        if options.get("attn_head_scale"):
            found[f"{attention}.head_scale_params"] = s.slots["heads"].scale.view(1, HEADS, 1, 1)
        if options.get("attn_qk_rmsnorm"):
            for part, name in zip("qkv", ("q", "k", "value"), strict=True):
                # theirs has a gain a head, and keeps it as its difference from 1
                gain = (s.slots[part].gain - 1).expand(HEADS, 1, -1)
                found[f"{attention}.{name}_rmsnorm.gamma"] = gain
        w1, w2 = feed_forward_of(layer)
        inner = bool(options.get("ff_post_act_ln"))
        found |= w1.named(f"{feed_forward}.ff.0.0") | w2.named(f"{feed_forward}.ff.{2 + inner}")
        if inner:
            found |= x_transformers_norm(f"{feed_forward}.ff.1", s.slots["after_activation"])
    if model.last.final_norm is not None and options.get("pre_norm", True):
        found |= x_transformers_norm("final_norm", model.last.final_norm)
    return found


def take_out_norms(theirs: Any, norms: Iterable[Norms]) -> set[tuple[int, int]]:
    """Leave out those of their norms that ours has not: (sublayer of a layer, place) of them."""
    missing = set()
    for index, kept in enumerate(kept for pair in norms for kept in pair):
        own: nn.ModuleList = theirs.layers[index][0]
        for place in (BEFORE, AFTER, OUTSIDE):
            if own[place] is not None and place not in kept:
                own[place] = None  # type: ignore[assignment]
                missing.add((index % 2, place))
    return missing
