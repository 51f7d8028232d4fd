"""Runs the layers of a finished model by fused sublayers, norms and sums.

A fused sublayer is one autograd node; a norm is a plain function; on a GPU a sublayer, its
residual sum and its norm are one node together.  The modules stay the definition: their
parameters are read where they lie, and `Layer.unfused` runs the modules inside of its block.
"""

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import TypeGuard

import torch
from torch import Tensor, nn

from deepstack.fast.fused_attention import HeadNorm, HeadRotation, SelfAttention
from deepstack.fast.fused_sublayers import (
    FUSED_ACTIVATIONS,
    FusedSublayer,
    Gate,
    Operation,
    Product,
    RootMeanSquare,
)
from deepstack.fast.gpu.heads import attention_of
from deepstack.fast.gpu.norm import DeviceNorm, FusedLayer, FusedSum
from deepstack.fast.gpu.sublayer import DeviceSublayer, heads_fit
from deepstack.fast.products import Library
from deepstack.model.attention import Attention
from deepstack.model.feed_forward import FeedForward
from deepstack.model.query_key import QueriesAndKeys, Rotation
from deepstack.model.stack import Layer
from deepstack.model.sublayers import scaled_linear
from deepstack.schemes.norms import DynamicTanh, RMSNorm, in_fp32, norm_with_kernels


def fuse(layers: Iterable[Layer], library: Library = "mkl") -> None:
    """Let layers run fused sublayers and norm functions where these exist.

    library: of large products on a CPU.
    """
    for layer in layers:
        modules = layer.modules_in_order()
        layer.sublayer_functions = tuple(
            fused_sublayer(module, library) or module for module in modules
        )
        layer.scheme.call_norms(norm_function)
        layer.layer_function = fused_layer(layer)


def fused_layer(layer: Layer) -> FusedLayer | None:
    """Return the layer as one node per sublayer, sum and norm, or None without a GPU's kernels."""
    scale = layer.scheme.post_scale
    if scale() is None:
        return None
    sums = []
    for G, (norm,) in zip(layer.sublayer_functions, layer.scheme.norm_functions, strict=True):
        if not (isinstance(G, DeviceSublayer) and isinstance(norm, DeviceNorm) and norm.kernels()):
            return None
        sums.append(FusedSum(G, norm, scale))
    return FusedLayer(sums)


def fused_sublayer(module: nn.Module, library: Library = "mkl") -> FusedSublayer | None:
    """Return the sublayer as one autograd node, or None, for example with dropout or slots."""
    if has_plain_attention(module):
        return fused_attention(module, library)
    return fused_feed_forward(module, library) if type(module) is FeedForward else None


def has_plain_attention(module: nn.Module) -> TypeGuard[Attention]:
    """Return whether attention is the standard one, without options and documents."""
    return type(module) is Attention and not module.reads_memory


def fused_attention(module: Attention, library: Library) -> FusedSublayer | None:
    """Return self-attention as one autograd node, or None if an operation of it has none."""
    if module.dropout or module.slots or not module.fused:
        return None
    if module.o.is_cuda:
        return device_attention(module)
    if module.n_kv_heads != module.n_heads:
        return None
    first, last = (module.qkv, module.qkv_bias), (module.o, module.o_bias)
    scaled = module.linear is scaled_linear
    before = query_operations(module.qk, module.n_heads) if module.qk else []
    if before is None:
        return None
    between = [*before, SelfAttention(module.n_heads, module.causal, library)]
    into, out = Product(*first, scaled, library), Product(*last, scaled, library)
    return FusedSublayer([into, *between, out])


def device_attention(module: Attention) -> DeviceSublayer | None:
    """Return self-attention as one autograd node by a GPU's kernels, or None without them."""
    attention = attention_of(module)
    if attention is None or not heads_fit(module.o.shape[1] // module.n_heads):
        return None
    is_grouped = module.n_kv_heads != module.n_heads
    first = (module.q, module.q_bias) if is_grouped else (module.qkv, module.qkv_bias)
    beside = (module.kv, module.kv_bias) if is_grouped else None
    scaled, last = module.linear is scaled_linear, (module.o, module.o_bias)
    return DeviceSublayer(first, attention, last, scaled, beside)


def fused_feed_forward(module: FeedForward, library: Library) -> FusedSublayer | None:
    """Return a feed-forward as one autograd node, or None if an operation of it has none."""
    activation = FUSED_ACTIVATIONS.get(module.activation_name)
    if module.dropout or module.slots or activation is None or not module.fused:
        return None
    between: Operation = Gate(activation) if module.gated else activation
    first = (module.w13, module.w13_bias) if module.gated else (module.w1, module.w1_bias)
    last, scaled = (module.w2, module.w2_bias), module.linear is scaled_linear
    if module.w2.is_cuda:
        return DeviceSublayer(first, between, last, scaled)
    into, out = Product(*first, scaled, library), Product(*last, scaled, library)
    return FusedSublayer([into, between, out])


def query_operations(qk: QueriesAndKeys, n_heads: int) -> list[Operation] | None:
    """Return norms and rotation of queries and keys as operations on [q, k, v], or None."""
    operations: list[Operation] = []
    norms = [n for one in (qk.q_norm, qk.k_norm) if (n := norm_with_kernels(one))]
    if norms:
        operations.append(HeadNorm(norms, n_heads))
    elif qk.q_norm is not None:
        return None
    if qk.rotation is not None:
        operations.append(head_rotation(qk.rotation, n_heads))
    return operations


@lru_cache(maxsize=4)
def head_rotation(rotation: Rotation, n_heads: int) -> HeadRotation:
    """Return the rotation of all heads of q and k, side by side, which all layers share."""
    pairs = torch.complex(rotation.cos[:, ::2], rotation.sin[:, 1::2])
    return HeadRotation(pairs.repeat(1, 2 * n_heads))


def norm_function(norm: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return a norm of the stack as a function that is faster than its module, or the module."""
    plain = norm_with_kernels(norm)
    if plain is not None and plain.gain is not None and plain.gain.is_cuda:
        rms = isinstance(plain, RMSNorm)
        return DeviceNorm(plain.gain, plain.bias, *plain.shape, plain.eps, rms)
    if isinstance(plain, RMSNorm) and any(p.is_cpu for p in plain.parameters()):
        node = FusedSublayer([RootMeanSquare(plain)])
        return lambda z: node(in_fp32(z))
    if type(norm) is DynamicTanh:
        scale, gain, bias = norm.scale, norm.gain, norm.bias
        if gain is not None and bias is not None:
            return lambda z: torch.addcmul(bias, torch.tanh(scale * z), gain)
    return norm
