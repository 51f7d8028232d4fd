"""Products in fused sublayers on a GPU, by the kernel that suits their size.

In a narrow layer the launches of kernels dominate, so weight gradients are deferred until one
kernel can compute them for many layers.  Weight gradients of a wide layer run on a side stream.  A
kernel that writes a product's gradient can also write its sums over tokens: the gradient of the
product's bias.  A `Gradient` carries both from one operation's backward pass to the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from deepstack.fast.fused_sublayers import (
    Product,
    by_shape,
    half_weights,
    products_of,
    relu_gradient,
    stacked,
)
from deepstack.fast.gpu.available import kernels, mixes, relu_keeps_nan, splits_fp32
from deepstack.fast.gpu.deferred_gradients import Deferred, add_rows, running_queue

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

    relu: y = max(c x Wᵀ + b, 0).
    after_relu: x is such a y of another product; the gradient of x is then the gradient of the
        maximum's argument.
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
        half, x = torch.is_autocast_enabled("cuda"), in_autocast_precision(x)
        if small := self.small_kernels(len(x)):
            saved += (x, self.weight)
            straight = self.transposed_weight is not None
            weight = self.transposed_weight if straight else self.weight
            return small.product(x, weight, self.bias, straight=straight, relu=self.relu)
        weight, bias = self.weights_in(x.dtype) if half else (self.weight, self.bias)
        saved += (x, weight)
        return self.large_product(x, weight, bias, half)

    def large_product(self, x: Tensor, weight: Tensor, bias: Tensor | None, half: bool) -> Tensor:
        """Return y by kernels of split fp32 numbers, or by a library's kernels."""
        if not half and self.splits(x):
            return kernels("split_product").split_product(x, weight, bias, relu=self.relu)
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
                return Gradient(dx, sums.summed(dx, x))
            relu_gradient(dx, x)
        return Gradient(dx if add_to is None else add_to.add_(dx))

    def weights_in(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Return W and b in this precision, from `prepared_weights` if it has them."""
        if self.half_weights is not None:
            return self.half_weights
        return self.weight.to(dtype), None if self.bias is None else self.bias.to(dtype)

    def small_kernels(self, tokens: int) -> Any:
        """Return the kernels for small layers if this product is small enough, else None."""
        fits = self.scale == 1.0 and tokens * self.weight.numel() <= SMALLER
        return kernels("small_kernels") if fits else None

    def splits(self, x: Tensor) -> bool:
        """Return whether tensor cores compute the product of fp32 numbers; only for inference."""
        fits = self.scale == 1.0 and x.dtype is torch.float32 and x.is_cuda and len(x) >= FEW_ROWS
        return fits and torch.is_inference_mode_enabled() and splits_fp32()

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
            with self.weight_gradient() as gradient:
                add_product(gradient, dy.t(), x, self.scale)


class DeviceProducts:
    """y = [x W_1ᵀ + b_1, x W_2ᵀ + b_2, …], (tokens, n_1 + n_2 + …), by a product each."""

    def __init__(self, products: Sequence[DeviceProduct]) -> None:
        self.products = products

    def forward(self, x: Tensor, seq: int, saved: list[Tensor]) -> Tensor:
        x = in_autocast_precision(x)  # once for all products
        return torch.cat([product.forward(x, seq, saved) for product in self.products], dim=1)

    def backward_with_sums(
        self,
        dy: Gradient,
        saved: list[Tensor],
        wants_sums: bool,
        add_to: Tensor | None = None,
    ) -> Gradient:
        """Return the gradient of x, without its sums; the arguments are those of a product."""
        widths = [len(product.weight) for product in self.products]
        values = dy.value.split(widths, dim=1)
        sums = dy.sums.split(widths, dim=1) if dy.sums is not None else [None] * len(widths)
        parts = zip(self.products, values, sums, strict=True)
        first, *others = [
            product.backward_with_sums(Gradient(*gradient), saved, False, add_to).value
            for product, *gradient in reversed(list(parts))
        ]
        if add_to is None:  # otherwise all are this tensor
            for other in others:
                first.add_(other)
        return Gradient(first)

    def defers(self, tokens: int) -> bool:
        """Return whether all gradients of so few tokens are deferred and need no sums of dy."""
        return all(product.defers(tokens) for product in self.products)


def in_autocast_precision(x: Tensor) -> Tensor:
    """Return x in the precision of a GPU's products under autocast, otherwise x itself."""
    return x.to(torch.get_autocast_dtype("cuda")) if torch.is_autocast_enabled("cuda") else x


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
        autocast the weights of small products are transposed: an fp32 product with a transposed
        matrix takes twice as long.
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
