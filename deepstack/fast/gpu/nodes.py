"""Fused sublayers on a GPU: products and attention by the kernel that suits their size.

In a narrow layer the launches of kernels dominate, so weight gradients are deferred until one
kernel can compute those of many layers; a wide layer's run on a side stream.  A kernel that writes
a product's gradient can also write its sums over tokens, which are the gradient of the product's
bias: a `Gradient` carries both from one operation's backward pass to the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from deepstack.fast.fused_sublayers import (
    ACTIVATIONS,
    FusedSublayer,
    Product,
    relu_gradient,
)
from deepstack.fast.gpu.available import (
    kernels,
    mixes,
    relu_keeps_nan,
    since_ampere,
    split_kernels,
)
from deepstack.fast.gpu.deferred_gradients import Deferred, add_rows, running_queue
from deepstack.fast.half_weights import by_shape, half_weights, products_of, stacked

aten = torch.ops.aten

# Products of fewer multiplications leave a GPU idle: their weight gradients are deferred.
SMALL = 2**27
# Products of at most this many multiplications take the kernel for small layers.
SMALLER = 2**23
# From this many rows on, products of split fp32 numbers take less time than a library's.
FEW_ROWS = 128


class Gradient(NamedTuple):
    """The gradient of an operation's result, (tokens, n), and its sums over blocks of tokens.

    sums: (blocks, n), or None if no kernel has computed them.
    """

    value: Tensor
    sums: Tensor | None = None


class DeviceProduct(Product):
    """y = c x Wᵀ + b, in the autocast precision, with deferred weight gradients.

    relu: y = max(c x Wᵀ + b, 0).  after_relu: x is such a y of another product; the gradient of x
    is then that of the maximum's argument.
    transposed_weight: Wᵀ in memory during a pass inside of `prepared_weights`.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        scaled: bool = False,
        *,
        relu: bool = False,
        after_relu: bool = False,
    ) -> None:
        super().__init__(weight, bias, scaled)
        self.relu, self.after_relu = relu, after_relu
        self.transposed_weight: Tensor | None = None

    def forward(self, x: Tensor, seq: int, saved: list[Tensor]) -> Tensor:
        half = torch.is_autocast_enabled("cuda")
        if half:
            x = x.to(torch.get_autocast_dtype("cuda"))
        if small := self.small_kernels(len(x)):
            saved += (x, self.weight)
            straight = self.transposed_weight is not None
            weight = self.transposed_weight if straight else self.weight
            return small.product(x, weight, self.bias, straight=straight, relu=self.relu)
        weight, bias = self.weights_in(x.dtype) if half else (self.weight, self.bias)
        saved += (x, weight)
        if not half and (split := self.split_kernels(x)):
            return split.product.split_product(x, weight, bias, relu=self.relu)
        if half and bias is not None and self.scale == 1.0:
            return biased_product(x, weight, bias, self.relu)
        y = self.apply_scale(torch.mm(x, weight.t()))
        if bias is not None:
            y.add_(bias)
        return torch.relu_(y) if self.relu else y

    def backward_with_sums(
        self,
        dy: Gradient,
        saved: list[Tensor],
        wants_sums: bool,
        add_to: Tensor | None = None,
    ) -> Gradient:
        """Return the gradient of x, with its sums if `wants_sums` and a kernel computes them.

        add_to: (tokens, n_in) fp32, to which the gradient of x is added instead.
        """
        weight, x = saved.pop(), saved.pop()
        self.add_gradients_later(dy, x)
        if small := self.small_kernels(len(x)):
            gate = x if self.after_relu else None
            dx = small.product(dy.value, weight, straight=True, gate=gate)
            return Gradient(dx if add_to is None else add_to.add_(dx))
        if add_to is not None and self.scale == 1.0:
            return Gradient(add_product(add_to, dy.value, weight))
        dx = self.apply_scale(torch.mm(dy.value, weight))
        if self.after_relu:
            if wants_sums and (sums := kernels("sum_kernels")):
                return Gradient(dx, sums.gate(dx, x))
            relu_gradient(dx, x)
        return Gradient(dx if add_to is None else add_to.add_(dx))

    def weights_in(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Return W and b in this precision, those of `prepared_weights` if there are any."""
        if self.half_weights is not None:
            return self.half_weights
        return self.weight.to(dtype), None if self.bias is None else self.bias.to(dtype)

    def small_kernels(self, tokens: int) -> Any:
        """Return the kernels for small layers if this product is small enough, else None."""
        fits = self.scale == 1.0 and tokens * self.weight.numel() <= SMALLER
        return kernels("small_kernels") if fits else None

    def split_kernels(self, x: Tensor) -> Any:
        """Return the kernels for fp32 products on tensor cores, for inference only, or None."""
        fits = self.scale == 1.0 and x.dtype is torch.float32 and x.is_cuda and len(x) >= FEW_ROWS
        return split_kernels() if fits and torch.is_inference_mode_enabled() else None

    def defers(self, tokens: int) -> bool:
        """Return whether gradients of so few tokens are deferred and need no sums of dy."""
        return tokens * self.weight.numel() < SMALL

    def add_gradients_later(self, dy: Gradient, x: Tensor) -> None:
        """Add the gradients of W and b before the end of the backward pass."""
        if dy.sums is not None and self.bias_grad is not None:
            running_queue().add(add_biases, self, dy.sums)
        if self.weight_grad is None and self.bias_grad is None:
            return
        if self.defers(len(x)):
            running_queue().add(add_products, self, dy.value, x)
            return
        add = partial(self.add_gradients, with_bias=dy.sums is None)
        if dy.value.is_cuda:  # concurrently with the backward pass of earlier layers
            running_queue().run_beside(add, dy.value, x)
        else:
            add(dy.value, x)

    def add_gradients(self, dy: Tensor, x: Tensor, with_bias: bool) -> None:
        """Add dyᵀ x and, with the bias, the sum of dy over tokens."""
        if self.bias_grad is not None and with_bias:
            module = kernels("sum_kernels")
            sums = module.summed(dy.contiguous()) if module else dy
            self.bias_grad.add_(sums.sum(0, dtype=torch.float32))
        if self.weight_grad is not None:
            add_product(self.weight_grad, dy.t(), x, self.scale)


def add_products(deferred: Sequence[Deferred]) -> None:
    """Add dyᵀ x, (layer, n_out, n_in), and the sums of dy, (layer, n_out), of many products."""
    products = [product for product, _ in deferred]
    dy, x = (torch.stack(tensors) for tensors in zip(*(t for _, t in deferred), strict=True))
    sums = torch.bmm(dy.transpose(1, 2), x)
    add_rows([p.weight_grad for p in products], sums, products[0].scale)
    if any(p.bias_grad is not None for p in products):
        add_rows([p.bias_grad for p in products], dy.sum(1, dtype=torch.float32))


def add_biases(deferred: Sequence[Deferred]) -> None:
    """Add sums over blocks of tokens, (blocks, n_out) each, to the gradients of many biases."""
    sums = torch.stack([sums for _, (sums,) in deferred]).sum(1)
    add_rows([product.bias_grad for product, _ in deferred], sums)


def biased_product(x: Tensor, weight: Tensor, bias: Tensor, relu: bool) -> Tensor:
    """Return x Wᵀ + b, or its maximum with 0, in half precision by one kernel (fp32 takes four)."""
    if relu and relu_keeps_nan(len(x), *weight.shape, x.dtype):
        return aten._addmm_activation(bias, x, weight.t())
    y = torch.addmm(bias, x, weight.t())
    return torch.relu_(y) if relu else y


def add_product(to: Tensor, a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
    """Return to + scale a b, in place: `to` in fp32, also where a and b are in bf16."""
    if a.dtype is torch.float32:
        return to.addmm_(a, b, alpha=scale)
    if mixes(a.dtype) and scale == 1.0:
        return torch.addmm(to, a, b, out_dtype=torch.float32, out=to)
    return to.add_(torch.mm(a, b), alpha=scale)


def prepared_weights(
    layers: Iterable[Any], tokens: int, half: torch.dtype | None
) -> AbstractContextManager[None]:
    """Return a context whose passes read prepared copies of the weights of fused layers.

    half: the autocast precision, to which weights of products by a library are converted.  Without
    autocast those of small products are transposed: an fp32 product with a transposed matrix takes
    twice as long.
    """
    products = [p for p in products_of(layers) if isinstance(p, DeviceProduct)]
    small = [p for p in products if p.small_kernels(tokens)]
    if half is None:
        return transposed_weights(small)
    return half_weights([p for p in products if p not in small], half)


@contextmanager
def transposed_weights(products: Sequence[DeviceProduct]) -> Iterator[None]:
    """Give products the transposes of their weights for the passes inside the block."""
    for same in by_shape(products):
        weights = stacked([product.weight for product in same])
        for product, weight in zip(same, weights.transpose(1, 2).contiguous(), strict=True):
            product.transposed_weight = weight
    try:
        yield
    finally:
        for product in products:
            product.transposed_weight = None


CUDNN = 3  # torch.nn.attention.SDPBackend.CUDNN_ATTENTION


def flash(dtype: torch.dtype) -> bool:
    """Return whether attention in this precision uses flash attention."""
    return dtype is not torch.float32 and since_ampere()


class DeviceAttention:
    """y = concat_h softmax(q_h k_hᵀ / sqrt(d_head)) v_h.  [q, k, v]: (tokens, 3 d); y: (tokens, d).

    Uses the kernels that F.scaled_dot_product_attention uses on a GPU: in bf16 flash attention, or
    cuDNN's if torch prefers it and kernels need not be deterministic; memory-efficient attention in
    fp32 and on old GPUs.  causal: a position reads itself and earlier ones.
    """

    def __init__(self, n_heads: int, causal: bool = False) -> None:
        self.n_heads, self.causal = n_heads, causal

    def forward(self, x: Tensor, seq: int, saved: list[Tensor]) -> Tensor:
        if small := self.small_kernels(seq, x.shape[1] // (3 * self.n_heads)):
            saved.append(x)
            return small.attend(x, seq, self.n_heads, self.causal)
        tokens, width = x.shape
        if x.dtype is torch.float32 and torch.is_inference_mode_enabled():
            if split := split_kernels():
                return split.attention.split_attention(x, seq, self.n_heads, self.causal)
        heads = x.view(tokens // seq, seq, 3, self.n_heads, width // (3 * self.n_heads))
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)  # each (batch, head, seq, d_head)
        if not flash(x.dtype):
            q, k, v = q.float(), k.float(), v.float()  # there is none for bf16 before Ampere
            attend = aten._scaled_dot_product_efficient_attention
            y, logsumexp, seed, offset = attend(q, k, v, None, True, 0.0, self.causal)
        elif self.by_cudnn(q, k, v):
            attend = aten._scaled_dot_product_cudnn_attention
            y, logsumexp, *_, seed, offset, _ = attend(q, k, v, None, True, 0.0, self.causal)
        else:
            attend = aten._scaled_dot_product_flash_attention
            y, logsumexp, *_, seed, offset, _ = attend(q, k, v, 0.0, self.causal)
        saved += (q, k, v, y, logsumexp, seed, offset)
        return y.transpose(1, 2).reshape(tokens, width // 3).to(x.dtype)

    def backward_with_sums(
        self, dy: Gradient, seq: int, saved: list[Tensor], wants_sums: bool
    ) -> Gradient:
        """Return the gradient of [q, k, v], with its sums if wanted and a kernel computes them."""
        tokens, width = dy.value.shape
        if small := self.small_kernels(seq, width // self.n_heads):
            qkv = saved.pop()
            return Gradient(small.attend_backward(qkv, dy.value, seq, self.n_heads, self.causal))
        gradients = self.head_gradients(dy.value, seq, saved)
        if wants_sums and (sums := kernels("sum_kernels")):
            return Gradient(*sums.merge(gradients))
        parts = [g.transpose(1, 2) for g in gradients]
        return Gradient(torch.stack(parts, dim=2).view(tokens, 3 * width))

    def head_gradients(self, dy: Tensor, seq: int, saved: list[Tensor]) -> tuple[Tensor, ...]:
        """Return the gradients of q, k and v, each (batch, head, seq, d_head)."""
        q, k, v, y, logsumexp, seed, offset = saved[-7:]
        del saved[-7:]
        heads = dy.view(len(dy) // seq, seq, self.n_heads, -1).transpose(1, 2)
        if not flash(dy.dtype):
            *gradients, _ = aten._scaled_dot_product_efficient_attention_backward(
                heads.float(), q, k, v, None, y, logsumexp, seed, offset, 0.0,
                [True, True, True, False], self.causal,
            )  # fmt: skip
        elif self.by_cudnn(q, k, v):
            gradients = aten._scaled_dot_product_cudnn_attention_backward(
                heads, q, k, v, y, logsumexp, seed, offset, None, None, None, seq, seq, 0.0,
                self.causal,
            )  # fmt: skip
        else:
            gradients = aten._scaled_dot_product_flash_attention_backward(
                heads, q, k, v, y, logsumexp, None, None, seq, seq, 0.0, self.causal, seed, offset
            )
        return tuple(gradient.to(dy.dtype) for gradient in gradients)

    def by_cudnn(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Return whether torch would use cuDNN's attention, whose backward has no fixed order."""
        if torch.are_deterministic_algorithms_enabled():
            return False
        return torch._fused_sdp_choice(q, k, v, None, 0.0, self.causal) == CUDNN

    def small_kernels(self, seq: int, d_head: int) -> Any:
        """Return the kernels for small layers if these sequences are short enough, else None."""
        small = kernels("small_kernels")
        return small if small and seq <= small.LONGEST and d_head <= small.WIDEST else None


class DeviceSublayer(FusedSublayer):
    """A fused sublayer that begins and ends with a product, with an operation between them.

    A ReLU between them is part of both products.
    """

    def __init__(self, first: Weights, between: Any, last: Weights, scaled: bool) -> None:
        relu = between is ACTIVATIONS["relu"]
        into = DeviceProduct(*first, scaled, relu=relu)
        out = DeviceProduct(*last, scaled, after_relu=relu)
        super().__init__([into, out] if relu else [into, between, out])
        self.into, self.out, self.between = into, out, None if relu else between

    def backward(
        self,
        dy: Tensor,
        saved: list[Tensor],
        sums: Tensor | None = None,
        add_to: Tensor | None = None,
    ) -> Tensor:
        """Return the gradient of x.

        sums: those of dy over blocks of tokens, (blocks, d_model), if they are known.
        add_to: (tokens, d_model) fp32, to which the gradient of x is added instead.
        """
        seq, width = dy.shape[-2:]
        tokens = dy.numel() // width
        wants_sums = not self.into.defers(tokens)
        gradient = Gradient(dy.reshape(-1, width), sums)
        gradient = self.out.backward_with_sums(gradient, saved, wants_sums)
        if isinstance(self.between, DeviceAttention):
            gradient = self.between.backward_with_sums(gradient, seq, saved, wants_sums)
        elif self.between is not None:
            gradient = Gradient(self.between.backward(gradient.value, seq, saved))
        return self.into.backward_with_sums(gradient, saved, False, add_to).value.view(dy.shape)


Weights = tuple[nn.Parameter, nn.Parameter | None]


def heads_fit(d_head: int) -> bool:
    """Return whether a GPU's attention kernels support heads of this width."""
    return d_head % 8 == 0 and d_head <= 128
