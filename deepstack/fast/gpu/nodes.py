"""The operations of a `FusedSublayer` on a GPU.

In a narrow layer launch overhead dominates the time of every kernel.  Weight gradients, which no
other layer needs, are therefore deferred until one kernel can compute those of many layers.  A
wide layer's are computed at once on a side stream, concurrently with the rest of the backward
pass.  The product adds to fp32 gradients directly, also from bf16, without a copy in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from deepstack.fast.fused_sublayers import Operation, Product, Relu, ScaledProduct, SelfAttention
from deepstack.fast.gpu.available import (
    mixes,
    relu_keeps_nan,
    since_ampere,
    small_kernels,
    split_kernels,
    sum_kernels,
)
from deepstack.fast.gpu.deferred_gradients import add_rows, beside, later

aten = torch.ops.aten

# Multiplications of a product that fill a GPU: the gradients of smaller ones are left until later.
SMALL = 2**27
# Those of a product that a kernel for small layers takes less time for than a library's.
SMALLER = 2**23
# Rows from which on products of split fp32 numbers take less time than a library's.
FEW_ROWS = 128


class DeviceProduct(Product):
    """y = x Wᵀ + b, under autocast in bf16, whose weights' gradients may come later.

    relu: y = max(x Wᵀ + b, 0).  gated: x is such a y, of that product, and the gradient of x that
    of what is inside of max.
    """

    relu = False
    gated: DeviceProduct | None = None  # the product that gives x, where that is a ReLU's
    bias_found = False  # whether the sum over tokens of this pass's dy is on its way already
    turned: Tensor | None = None  # Wᵀ as it lies in memory, while `weights_turned`
    lowered: tuple[Tensor, Tensor | None] | None = None  # W and b while `weights_lowered`

    def forward(self, x: Tensor, seq: int, saved: list[Tensor]) -> Tensor:
        weight, bias = self.weight, self.bias
        half = torch.is_autocast_enabled("cuda")
        if half:
            x = x.to(torch.get_autocast_dtype("cuda"))
        if small := self.kernels(len(x)):
            saved += (x, weight)
            if self.turned is not None:
                return small.product(x, self.turned, bias, straight=True, relu=self.relu)
            return small.product(x, weight, bias, relu=self.relu)
        if half and self.lowered is not None:
            weight, bias = self.lowered
        elif half:
            weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
        saved += (x, weight)
        if not half and (split := self.splits(x)):
            return split.product.split_product(x, weight, bias, relu=self.relu)
        if self.scale == 1.0 and bias is not None and half:
            if self.relu and relu_keeps_nan(len(x), *weight.shape, x.dtype):
                return aten._addmm_activation(bias, x, weight.t())
            y = torch.addmm(bias, x, weight.t())  # one kernel; in fp32 it would be four
            return torch.relu_(y) if self.relu else y
        y = torch.mm(x, weight.t())
        if self.scale != 1.0:
            y.mul_(self.scale)
        if bias is not None:
            y.add_(bias)
        return torch.relu_(y) if self.relu else y

    def backward(
        self, dy: Tensor, seq: int, saved: list[Tensor], into: Tensor | None = None
    ) -> Tensor:
        """The gradient of x, or `into`, (tokens, n_in) fp32, to which it has been added."""
        weight, x = saved.pop(), saved.pop()
        if self.weight_grad is not None or self.bias_grad is not None:
            if self.waits(len(x)):
                later(self, dy, x)
            elif dy.is_cuda:  # concurrently with the backward pass of earlier layers
                beside(self.add_gradients, dy, x)
            else:
                self.add_gradients(dy, x)
        self.bias_found = False
        if small := self.kernels(len(x)):
            dx = small.product(dy, weight, straight=True, gate=x if self.gated else None)
            return dx if into is None else into.add_(dx)
        if into is not None and self.scale == 1.0:
            return add_product(into, dy, weight)
        dx = torch.mm(dy, weight)
        if self.scale != 1.0:
            dx.mul_(self.scale)
        if self.gated is not None:
            if (sums := sum_kernels()) and not self.gated.waits(len(x)):
                self.gated.take_bias(sums.gate(dx, x))
            else:
                aten.threshold_backward.grad_input(dx, x, 0, grad_input=dx)
        return dx if into is None else into.add_(dx)

    def waits(self, tokens: int) -> bool:
        """Whether so few tokens' gradients are left until later."""
        return tokens * self.weight.numel() < SMALL

    def take_bias(self, sums: Tensor) -> None:
        """Add the bias's gradient, sums over the first axis of (blocks, n_out), for `backward`."""
        self.bias_found = True
        if self.bias_grad is not None:
            later(_Bias(self.bias_grad), sums)

    def kernels(self, tokens: int) -> Any:
        """Kernels for a product as small as this one, or None."""
        fits = self.scale == 1.0 and tokens * self.weight.numel() <= SMALLER
        return small_kernels() if fits else None

    def splits(self, x: Tensor) -> Any:
        """Kernels for fp32 products on tensor cores, of which nothing goes back, or None."""
        fits = self.scale == 1.0 and x.dtype is torch.float32 and x.is_cuda and len(x) >= FEW_ROWS
        return split_kernels() if fits and torch.is_inference_mode_enabled() else None

    def add_gradients(self, dy: Tensor, x: Tensor) -> None:
        """Add dyᵀ x and the sum of dy over tokens."""
        if self.bias_grad is not None and not self.bias_found:
            kernels = sum_kernels()
            sums = kernels.summed(dy.contiguous()) if kernels else dy
            self.bias_grad.add_(sums.sum(0, dtype=torch.float32))
        if self.weight_grad is not None:
            add_product(self.weight_grad, dy.t(), x, self.scale)

    @staticmethod
    def add_together(left: Sequence[tuple[DeviceProduct, tuple[Tensor, ...]]]) -> None:
        """The same of many: dyᵀ x, (layer, n_out, n_in), and the sum of dy, (layer, n_out)."""
        products = [product for product, _ in left]
        dy, x = (torch.stack(tensors) for tensors in zip(*(t for _, t in left), strict=True))
        sums = torch.bmm(dy.transpose(1, 2), x)
        add_rows([p.weight_grad for p in products], sums, products[0].scale)
        if any(p.bias_grad is not None for p in products):
            add_rows([p.bias_grad for p in products], dy.sum(1, dtype=torch.float32))


class _Bias:
    """The deferred gradient of a bias: rows of sums, (blocks, n_out)."""

    def __init__(self, grad: Tensor) -> None:
        self.grad = grad

    @staticmethod
    def add_together(left: Sequence[tuple[_Bias, tuple[Tensor, ...]]]) -> None:
        """Add the sums over blocks, (layer, n_out)."""
        add_rows([bias.grad for bias, _ in left], torch.stack([s for _, (s,) in left]).sum(1))


class DeviceScaledProduct(DeviceProduct, ScaledProduct):
    """y = x Wᵀ / sqrt(n_in) + b: the product under the NTK parameterisation."""


ON_GPU: dict[type[Product], type[DeviceProduct]] = {
    Product: DeviceProduct,
    ScaledProduct: DeviceScaledProduct,
}


def small_products(layers: Iterable[Any], tokens: int) -> list[DeviceProduct]:
    """Return the products of fused layers that the small kernels can compute."""
    return [product for product in products_of(layers) if product.kernels(tokens)]


def products_of(layers: Iterable[Any]) -> Iterator[DeviceProduct]:
    """The products of fused layers."""
    for layer in layers:
        for chain in getattr(layer, "running", ()):
            for operation in getattr(chain, "operations", ()):
                if isinstance(operation, DeviceProduct):
                    yield operation


def by_shape(products: Iterable[DeviceProduct]) -> list[list[DeviceProduct]]:
    """Group products by weight shape and whether they have a bias."""
    found: dict[Any, list[DeviceProduct]] = {}
    for product in products:
        found.setdefault((product.weight.shape, product.bias is None), []).append(product)
    return list(found.values())


@contextmanager
def weights_turned(layers: Iterable[Any], tokens: int) -> Iterator[None]:
    """Give small products their weights as the kernels read them fastest, inside of the block.

    Of fp32 numbers the product with a matrix that lies the other way takes twice as long; turning
    those of all layers takes as long as two of these products.
    """
    products = small_products(layers, tokens)
    for same in by_shape(products):
        whole = stacked([product.weight for product in same]).transpose(1, 2).contiguous()
        for product, turned in zip(same, whole.unbind(), strict=True):
            product.turned = turned
    try:
        yield
    finally:
        for product in products:
            product.turned = None


@contextmanager
def weights_lowered(layers: Iterable[Any], tokens: int, dtype: torch.dtype) -> Iterator[None]:
    """Give products that a library computes their weights in this precision, inside of the block.

    Of all layers at once: one kernel a shape instead of two a product.
    """
    products = [product for product in products_of(layers) if not product.kernels(tokens)]
    for same in by_shape(products):
        weights = stacked([product.weight for product in same], dtype).unbind()
        given = [product.bias for product in same if product.bias is not None]
        biases = stacked(given, dtype).unbind() if given else [None] * len(same)
        for product, weight, bias in zip(same, weights, biases, strict=True):
            product.lowered = weight, bias
    try:
        yield
    finally:
        for product in products:
            product.lowered = None


def stacked(tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """Tensors of one shape as one, (n, …): where they lie evenly apart in memory, of a view.

    dtype: of the result, that of the tensors where none is given.
    """
    kind = dtype or tensors[0].dtype
    first = tensors[0]
    places = [tensor.storage_offset() for tensor in tensors]
    apart = places[1] - places[0] if len(places) > 1 else first.numel()
    rows = range(places[0], places[0] + len(places) * apart, apart) if apart > 0 else ()
    memory = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    if len(memory) == 1 and places == list(rows) and all(t.is_contiguous() for t in tensors):
        whole = first.as_strided((len(tensors), *first.shape), (apart, *first.stride()))
        return whole.to(kind)
    return torch.stack([tensor.to(kind) for tensor in tensors])


def in_turn(into: Product, between: Operation, out: Product) -> list[Operation]:
    """Two products with an operation between them; on a GPU a ReLU is part of both."""
    if isinstance(into, DeviceProduct) and isinstance(out, DeviceProduct):
        if isinstance(between, Relu):
            into.relu, out.gated = True, into
            return [into, out]
        if isinstance(between, DeviceAttention):
            between.before = into
    return [into, between, out]


def add_product(to: Tensor, a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
    """to + scale a b, in place: `to` in fp32, also where a and b are in bf16."""
    if a.dtype is torch.float32:
        return to.addmm_(a, b, alpha=scale)
    if mixes(a.dtype) and scale == 1.0:
        return torch.addmm(to, a, b, out_dtype=torch.float32, out=to)
    return to.add_(torch.mm(a, b), alpha=scale)


CUDNN = 3  # torch.nn.attention.SDPBackend.CUDNN_ATTENTION


def flash(dtype: torch.dtype) -> bool:
    """Return whether attention in this precision uses flash attention."""
    return dtype is not torch.float32 and since_ampere()


class DeviceAttention:
    """y = concat_h softmax(q_h k_hᵀ / sqrt(d_head)) v_h.  [q, k, v]: (tokens, 3 d); y: (tokens, d).

    By torch's kernels for GPUs that F.scaled_dot_product_attention takes: in bf16 flash attention,
    cuDNN's where torch prefers it and any kernel will do; memory-efficient attention in fp32 and on
    old GPUs.  causal: a position reads itself and those before it.
    """

    def __init__(self, n_heads: int, causal: bool = False) -> None:
        self.n_heads, self.causal = n_heads, causal
        self.before: DeviceProduct | None = None  # what gives [q, k, v]

    def forward(self, x: Tensor, seq: int, saved: list[Tensor]) -> Tensor:
        if small := self.kernels(seq, x.shape[1] // (3 * self.n_heads)):
            saved.append(x)
            return small.attend(x, seq, self.n_heads, self.causal)
        tokens, width = x.shape
        if x.dtype is torch.float32 and torch.is_inference_mode_enabled():  # nothing goes back
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

    def backward(self, dy: Tensor, seq: int, saved: list[Tensor]) -> Tensor:
        if small := self.kernels(seq, dy.shape[1] // self.n_heads):
            return small.attend_backward(saved.pop(), dy, seq, self.n_heads, self.causal)
        q, k, v, y, logsumexp, seed, offset = saved[-7:]
        del saved[-7:]
        tokens, width = dy.shape
        heads = dy.view(tokens // seq, seq, self.n_heads, -1).transpose(1, 2)
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
        gradients = tuple(gradient.to(dy.dtype) for gradient in gradients)
        if self.before is not None and (sums := sum_kernels()):
            if not self.before.waits(tokens):
                dx, found = sums.merge(gradients)
                self.before.take_bias(found)
                return dx
        # (batch, head, seq, d_head) each, side by side
        parts = [g.transpose(1, 2) for g in gradients]
        return torch.stack(parts, dim=2).view(tokens, 3 * width)

    def by_cudnn(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Whether torch would take cuDNN's attention, whose backward pass has no fixed order."""
        if torch.are_deterministic_algorithms_enabled():
            return False
        return torch._fused_sdp_choice(q, k, v, None, 0.0, self.causal) == CUDNN

    def kernels(self, seq: int, d_head: int) -> Any:
        """Kernels for sequences as short as these, or None."""
        small = small_kernels()
        return small if small and seq <= small.LONGEST and d_head <= small.WIDEST else None


def product_on(device: torch.device, kind: type[Product]) -> type[Product]:
    """The same kind of product on a device."""
    return ON_GPU[kind] if device.type == "cuda" else kind


def heads_fit(d_head: int) -> bool:
    """Whether a GPU's attention is made for heads this wide."""
    return d_head % 8 == 0 and d_head <= 128


def attention_on(device: torch.device, n_heads: int, d_head: int, causal: bool) -> Operation | None:
    """Self-attention on a device, or None where no kernel is made for such heads."""
    if device.type == "cuda":
        return DeviceAttention(n_heads, causal) if heads_fit(d_head) else None
    return SelfAttention(n_heads, causal) if SelfAttention.available else None
