"""Runs the layers of a finished model by fused sublayers, norms and sums.

A fused sublayer is one autograd node; a norm is a plain function; on a GPU a sublayer, its
residual sum and its LayerNorm are one node together.  The modules stay the definition: their
parameters are read where they lie, and `Layer.unfused` runs the modules inside of its block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from deepstack.fast.fused_norms import RootMeanSquared
from deepstack.fast.fused_queries import HeadsNormed, Turned
from deepstack.fast.fused_sublayers import (
    ACTIVATIONS,
    FusedSublayer,
    Gate,
    Operation,
    Product,
    SelfAttention,
)
from deepstack.fast.gpu.nodes import DeviceAttention, DeviceSublayer, heads_fit
from deepstack.fast.gpu.norm import DeviceNorm, FusedLayer, fused_sum
from deepstack.model.layer import Layer
from deepstack.model.query_key import QueriesAndKeys, Rotation
from deepstack.model.sublayers import Attention, FeedForward, scaled_linear
from deepstack.schemes.norms import DynamicTanh, LayerNorm, RMSNorm, in_fp32


def fuse(layers: Iterable[Layer]) -> None:
    """Let layers run fused sublayers and norm functions where these exist."""
    rotations: dict[tuple[Rotation, int], Turned] = {}
    for layer in layers:
        modules = layer.modules_in_order()
        layer.running = tuple(fused_sublayer(module, rotations) or module for module in modules)
        layer.scheme.call_norms(norm_function)
        layer.whole = fused_layer(layer)


def fused_layer(layer: Layer) -> FusedLayer | None:
    """Return the layer as one node per sublayer, sum and norm, or None without a GPU's kernels."""
    if layer.scheme.post_scale() is None:
        return None
    pairs = zip(layer.running, layer.scheme.norm_functions, strict=True)
    sums = [fused_sum(G, norm, layer.scheme.post_scale) for G, (norm,) in pairs]
    nodes = [node for node in sums if node is not None]
    return FusedLayer(nodes) if len(nodes) == len(sums) else None


def fused_sublayer(
    module: nn.Module, rotations: dict[tuple[Rotation, int], Turned] | None = None
) -> FusedSublayer | None:
    """Return the sublayer as one autograd node, or None, for example with dropout or slots.

    rotations: the rotary operations made so far, which all layers share.
    """
    if isinstance(module, Attention):
        return fused_attention(module, {} if rotations is None else rotations)
    return fused_feed_forward(module) if isinstance(module, FeedForward) else None


def fused_attention(
    module: Attention, rotations: dict[tuple[Rotation, int], Turned]
) -> FusedSublayer | None:
    """Return self-attention as one autograd node, or None if an operation of it has none."""
    if module.dropout or module.slots or not module.fused:
        return None
    first, last = (module.qkv, module.qkv_bias), (module.o, module.o_bias)
    scaled = module.linear is scaled_linear
    if module.o.is_cuda:
        if module.qk or not heads_fit(module.o.shape[1] // module.n_heads):
            return None
        attention = DeviceAttention(module.n_heads, module.causal)
        return DeviceSublayer(first, attention, last, scaled)
    before = query_operations(module.qk, module.n_heads, rotations) if module.qk else []
    if before is None:
        return None
    between = [*before, SelfAttention(module.n_heads, module.causal)]
    return FusedSublayer([Product(*first, scaled), *between, Product(*last, scaled)])


def fused_feed_forward(module: FeedForward) -> FusedSublayer | None:
    """Return a feed-forward as one autograd node, or None if an operation of it has none."""
    activation = ACTIVATIONS.get(module.activation_name)
    if module.dropout or module.slots or activation is None or not module.fused:
        return None
    between: Operation = Gate(activation) if module.gated else activation
    first = (module.w13, module.w13_bias) if module.gated else (module.w1, module.w1_bias)
    last, scaled = (module.w2, module.w2_bias), module.linear is scaled_linear
    if module.w2.is_cuda:
        return DeviceSublayer(first, between, last, scaled)
    return FusedSublayer([Product(*first, scaled), between, Product(*last, scaled)])


def query_operations(
    qk: QueriesAndKeys, n_heads: int, rotations: dict[tuple[Rotation, int], Turned]
) -> list[Operation] | None:
    """Norms and rotation of queries and keys as operations on [q, k, v], or None."""
    operations: list[Operation] = []
    norms = [norm for norm in (qk.q_norm, qk.k_norm) if norm is not None]
    if norms:
        known = [norm for norm in norms if isinstance(norm, (LayerNorm, RMSNorm))]
        if not known:
            return None
        gains, biases = [norm.gain for norm in known], [norm.bias for norm in known]
        centred, eps = isinstance(known[0], LayerNorm), known[0].eps
        operations.append(HeadsNormed(gains, biases, n_heads=n_heads, eps=eps, centred=centred))
    if qk.rotation is not None:
        key = qk.rotation, n_heads
        if key not in rotations:
            rotations[key] = turned(qk.rotation, n_heads)
        operations.append(rotations[key])
    return operations


def turned(rotation: Rotation, n_heads: int) -> Turned:
    """The rotation of all heads of q and k, side by side, from the first position on."""
    pairs = torch.complex(rotation.cos[:, ::2], rotation.sin[:, 1::2])
    return Turned(pairs.repeat(1, 2 * n_heads))


def norm_function(norm: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return a norm of the stack as a function that is faster than its module, or the module."""
    if isinstance(norm, LayerNorm) and norm.gain is not None and norm.gain.is_cuda:
        return DeviceNorm(norm.gain, norm.bias, *norm.shape, norm.eps)
    if isinstance(norm, RMSNorm):
        return rms_function(norm)
    if isinstance(norm, DynamicTanh):
        scale, gain, bias = norm.scale, norm.gain, norm.bias
        if gain is not None and bias is not None:
            return lambda z: torch.addcmul(bias, torch.tanh(scale * z), gain)
    return norm


def rms_function(norm: RMSNorm) -> Callable[[Tensor], Tensor]:
    """RMSNorm as a plain function; on a CPU as one autograd node."""
    shape, gain, bias, eps = norm.shape, norm.gain, norm.bias, norm.eps
    if any(p is not None and p.is_cpu for p in (gain, bias)):
        node = FusedSublayer([RootMeanSquared(gain, bias, *shape, eps)])
        return lambda z: node(in_fp32(z))
    if bias is None:
        return lambda z: torch.rms_norm(in_fp32(z), shape, gain, eps)
    return lambda z: torch.rms_norm(in_fp32(z), shape, gain, eps) + bias
