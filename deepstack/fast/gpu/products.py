"""Products in fused sublayers on a GPU: small ones by one kernel, large ones by a library.

In a narrow layer the launches of kernels dominate.  So a small product has a kernel with bias and
ReLU, and weight gradients are deferred until one kernel can compute those of many layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from deepstack.fast.fused_sublayers import Product, relu_gradient
from deepstack.fast.gpu.available import kernels
from deepstack.fast.gpu.deferred_gradients import Deferred, add_rows, defer
from deepstack.fast.half_weights import by_shape, half_weights, products_of, stacked

# Products of fewer multiplications leave a GPU idle: their weight gradients are deferred.
SMALL = 2**27
# Products of at most this many multiplications take the kernel for small layers.
SMALLER = 2**23


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
        if half and bias is not None:
            y = torch.addmm(bias, x, weight.t(), alpha=self.scale)
        else:  # an fp32 addmm takes four kernels
            y = self.apply_scale(torch.mm(x, weight.t()))
            y = y if bias is None else y.add_(bias)
        return torch.relu_(y) if self.relu else y

    def backward(self, dy: Tensor, seq: int, saved: list[Tensor]) -> Tensor:
        weight, x = saved.pop(), saved.pop()
        if self.weight_grad is not None or self.bias_grad is not None:
            if len(x) * weight.numel() < SMALL:
                defer(add_products, self, dy, x)
            else:
                self.add_gradients(dy, x)
        if small := self.small_kernels(len(x)):
            gate = x if self.after_relu else None
            return small.product(dy, weight, straight=True, gate=gate)
        dx = self.apply_scale(torch.mm(dy, weight))
        return relu_gradient(dx, x) if self.after_relu else dx

    def weights_in(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Return W and b in this precision, those of `prepared_weights` if there are any."""
        if self.half_weights is not None:
            return self.half_weights
        return self.weight.to(dtype), None if self.bias is None else self.bias.to(dtype)

    def small_kernels(self, tokens: int) -> Any:
        """Return the kernels for small layers if this product is small enough, else None."""
        fits = self.scale == 1.0 and tokens * self.weight.numel() <= SMALLER
        return kernels("small_kernels") if fits else None

    def add_gradients(self, dy: Tensor, x: Tensor) -> None:
        """Add dyᵀ x, and the sum of dy over tokens."""
        if self.bias_grad is not None:
            self.bias_grad.add_(dy.sum(0, dtype=torch.float32))
        if self.weight_grad is not None:
            self.weight_grad.add_(torch.mm(dy.t(), x), alpha=self.scale)


def add_products(deferred: Sequence[Deferred]) -> None:
    """Add dyᵀ x, (layer, n_out, n_in), and the sums of dy, (layer, n_out), of many products."""
    products = [product for product, _ in deferred]
    dy, x = (torch.stack(tensors) for tensors in zip(*(t for _, t in deferred), strict=True))
    sums = torch.bmm(dy.transpose(1, 2), x)
    add_rows([p.weight_grad for p in products], sums, products[0].scale)
    if any(p.bias_grad is not None for p in products):
        add_rows([p.bias_grad for p in products], dy.sum(1, dtype=torch.float32))


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
