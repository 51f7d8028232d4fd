"""Runs a sublayer as one autograd node, for narrow stacks.

Autograd keeps a node for every operation, and allocates and adds a gradient for every weight, which
at 1000 narrow layers costs as much as arithmetic.  A `FusedSublayer` is a list of operations with
explicit backward passes: one node runs them all, and products add gradients to `.grad` directly.
It computes the same numbers as the plain sublayer.  `torch.autograd.grad`, forward-mode
differentiation and hooks on parameters do not see these gradients: they need the plain sublayers.

torch composes an RMS norm of some six operations, and its backward pass of twice as many: a
replayed step takes 1.05 times as long without `RootMeanSquare`.  Autocast copies every weight by
itself, which takes as long as the products in a deep narrow stack; `half_weights` makes one copy
per shape for all layers.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepstack.fast.products import Library, product_functions
from deepstack.model.activations import SIGMOID_RMS, TANH_RMS
from deepstack.schemes.norms import RMSNorm, in_fp32

aten = torch.ops.aten

P = TypeVar("P", bound="Product")


class Operation(Protocol):
    """A function of (tokens, n_in) -> (tokens, n_out), and its backward pass.

    forward appends tensors to `saved`; backward removes them from its end.
    """

    def forward(self, x: Tensor, seq: int, saved: list[Tensor]) -> Tensor:
        """y, from x and the number of tokens in a sequence."""

    def backward(self, dy: Tensor, seq: int, saved: list[Tensor]) -> Tensor:
        """The gradient of x; gradients of weights are added to their `.grad`."""


class Product:
    """y = c x Wᵀ + b.  x: (tokens, n_in), W: (n_out, n_in), b: (n_out,), or no b.

    c = 1 / sqrt(n_in) if scaled, as under the NTK parameterisation; otherwise 1.

    library: of products that are large enough for it (see `products`).
    adds_parts: whether a gradient is computed from zero before it is added, so that gradients of
        several micro-batches have the bits of a sum of separate gradients.
    half_weights: copies of (W, b) in half precision for a pass under autocast (see the function
        `half_weights`).  x is then rounded to this precision and y has it; gradients of W and b are
        added in fp32.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        scaled: bool = False,
        library: Library = "mkl",
    ) -> None:
        self.weight, self.bias = weight.detach(), None if bias is None else bias.detach()
        self.scale = weight.shape[1] ** -0.5 if scaled else 1.0
        self.weight_grad, self.bias_grad = gradient_of(weight), gradient_of(bias)
        self.library = library
        self.adds_parts = False
        self.half_weights: tuple[Tensor, Tensor | None] | None = None

    def forward(self, x: Tensor, seq: int, saved: list[Tensor]) -> Tensor:
        weight, bias = self.half_weights or (self.weight, self.bias)
        x = x.to(weight.dtype)
        saved += (x, weight)
        multiply = product_functions(self.library, x.numel() * len(weight))
        if bias is not None:
            return multiply.addmm(bias, x, weight.t(), alpha=self.scale)
        return self.apply_scale(multiply.mm(x, weight.t()))

    def backward(self, dy: Tensor, seq: int, saved: list[Tensor]) -> Tensor:
        weight, x = saved.pop(), saved.pop()
        dy = dy.to(weight.dtype)
        multiply = product_functions(self.library, x.numel() * len(weight))
        if self.bias_grad is not None:
            self.bias_grad.add_(dy.sum(0))
        if self.weight_grad is not None and x.dtype is self.weight_grad.dtype:
            with self.weight_gradient() as gradient:
                multiply.addmm_(gradient, dy.t(), x, alpha=self.scale)
        elif self.weight_grad is not None:
            self.weight_grad.add_(torch.mm(dy.t(), x), alpha=self.scale)
        return self.apply_scale(multiply.mm(dy, weight))

    @contextmanager
    def weight_gradient(self) -> Iterator[Tensor]:
        """Yield the tensor to which the block adds the gradient of W."""
        assert self.weight_grad is not None
        if not self.adds_parts:
            yield self.weight_grad
            return
        part = torch.zeros_like(self.weight_grad)
        yield part
        self.weight_grad.add_(part)

    def apply_scale(self, product: Tensor) -> Tensor:
        """Return the product times c, in place."""
        return product if self.scale == 1.0 else product.mul_(self.scale)


def gradient_of(parameter: nn.Parameter | None) -> Tensor | None:
    """Return the tensor to which a parameter's gradient is added, or None if it has none."""
    return parameter.grad if parameter is not None and parameter.requires_grad else None


class FusedActivation:
    """y = function(x), elementwise, in place if it can be: x is a new result of a product.

    gradient: (dy, x) -> dx, or (dy, y) -> dx if `reads_result`.
    """

    def __init__(
        self,
        function: Callable[[Tensor], Tensor],
        gradient: Callable[[Tensor, Tensor], Tensor],
        reads_result: bool = False,
    ) -> None:
        self.function, self.gradient, self.reads_result = function, gradient, reads_result

    def forward(self, x: Tensor, seq: int, saved: list[Tensor]) -> Tensor:
        y = self.function(x)
        saved.append(y if self.reads_result else x)
        return y

    def backward(self, dy: Tensor, seq: int, saved: list[Tensor]) -> Tensor:
        return self.gradient(dy, saved.pop())


def relu_gradient(dy: Tensor, y: Tensor) -> Tensor:
    """Return dy where y > 0 and 0 elsewhere, in place."""
    return aten.threshold_backward.grad_input(dy, y, 0, grad_input=dy)


def selu_gradient(dy: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of SELU's input; alpha and scale as in its paper."""
    alpha, scale = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946
    return aten.elu_backward(dy, alpha, scale, 1, False, x)


# relu2's gradient reads max(x, 0), which replaces x.
FUSED_ACTIVATIONS: dict[str, FusedActivation] = {
    "relu": FusedActivation(torch.relu_, relu_gradient, reads_result=True),
    "gelu": FusedActivation(F.gelu, aten.gelu_backward),
    "sigmoid": FusedActivation(torch.sigmoid_, aten.sigmoid_backward, reads_result=True),
    "tanh": FusedActivation(torch.tanh_, aten.tanh_backward, reads_result=True),
    "selu": FusedActivation(F.selu, selu_gradient),
    "silu": FusedActivation(F.silu, aten.silu_backward),
    "relu2": FusedActivation(lambda x: torch.relu_(x) * x, lambda dy, x: dy.mul_(x).mul_(2.0)),
    "scaled_sigmoid": FusedActivation(
        lambda x: torch.sigmoid_(x).div_(SIGMOID_RMS),
        lambda dy, y: aten.sigmoid_backward(dy.div_(SIGMOID_RMS), y * SIGMOID_RMS),
        reads_result=True,
    ),
    "scaled_tanh": FusedActivation(
        lambda x: torch.tanh_(x).div_(TANH_RMS),
        lambda dy, y: aten.tanh_backward(dy.div_(TANH_RMS), y * TANH_RMS),
        reads_result=True,
    ),
}


class Gate:
    """y = phi(a) * b, where x is the concatenation [a, b] and phi is an activation."""

    def __init__(self, phi: FusedActivation) -> None:
        self.phi = phi

    def forward(self, x: Tensor, seq: int, saved: list[Tensor]) -> Tensor:
        a, b = x.chunk(2, dim=1)
        hidden = self.phi.forward(a, seq, saved)
        saved += (hidden, b)
        return hidden * b

    def backward(self, dy: Tensor, seq: int, saved: list[Tensor]) -> Tensor:
        b, hidden = saved.pop(), saved.pop()
        db = dy * hidden
        return torch.cat([self.phi.backward(dy.mul_(b), seq, saved), db], dim=1)


class RootMeanSquare:
    """RMSNorm(z) = g * z / r + b, r = sqrt(mean(z^2) + eps).  z: (tokens, d); g, b: (d,), or None.

    With u = g dy and n = z / r, dz = (u - n mean(u n)) / r.  The backward pass of a layer norm with
    a mean of 0 gives (u - mean(u) - n mean(u n)) / r, and the sums for g and b.
    """

    def __init__(self, norm: RMSNorm) -> None:
        self.shape, self.eps = norm.shape, norm.eps
        self.gain, self.bias = (None if p is None else p.detach() for p in (norm.gain, norm.bias))
        self.grads = [gradient_of(norm.gain), gradient_of(norm.bias)]

    def forward(self, z: Tensor, seq: int, saved: list[Tensor]) -> Tensor:
        scale = inverse_root(z, self.eps)
        saved += (z, scale)
        y = z * scale
        if self.bias is None:
            return y if self.gain is None else y.mul_(self.gain)
        return y.add_(self.bias) if self.gain is None else torch.addcmul(self.bias, y, self.gain)

    def backward(self, dy: Tensor, seq: int, saved: list[Tensor]) -> Tensor:
        scale, z = saved.pop(), saved.pop()
        dz, *sums = aten.native_layer_norm_backward(
            dy, z, self.shape, constant(0.0, scale.shape, z.dtype), scale, self.gain, self.bias,
            [True, *(grad is not None for grad in self.grads)],
        )  # fmt: skip
        for grad, sum_ in zip(self.grads, sums, strict=True):
            if grad is not None:
                grad.add_(sum_)
        total = dy.sum(1) if self.gain is None else torch.mv(dy, self.gain)
        return dz.add_(total[:, None].mul_(scale), alpha=1 / self.shape[0])


def inverse_root(z: Tensor, eps: float) -> Tensor:
    """Return 1 / sqrt(mean(z^2) + eps), (…, 1), over the last axis of z, (…, d)."""
    length = torch.linalg.vector_norm(z, dim=-1, keepdim=True)
    least = constant(eps, (), z.dtype)
    return torch.addcmul(least, length, length, value=1 / z.shape[-1]).rsqrt_()


@lru_cache(maxsize=16)
def constant(value: float, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor filled with one number, which all layers share."""
    with torch.inference_mode(False):
        return torch.full(shape, value, dtype=dtype, device="cpu")


class FusedSublayer:
    """A sublayer G as a list of operations: (batch, seq, d_model) -> the same shape.

    Under `torch.no_grad` the same operations run without an autograd node.
    """

    def __init__(self, operations: Sequence[Operation]) -> None:
        self.operations = tuple(operations)

    def __call__(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return _Node.apply(x, self)  # type: ignore[no-untyped-call]
        return self.forward(x, [])

    def forward(self, x: Tensor, saved: list[Tensor]) -> Tensor:
        seq, width = x.shape[-2:]
        y = x.reshape(-1, width)
        for operation in self.operations:
            y = operation.forward(y, seq, saved)
        return y.view(x.shape)

    def backward(self, dy: Tensor, saved: list[Tensor]) -> Tensor:
        seq, width = dy.shape[-2:]
        dx = dy.reshape(-1, width)
        for operation in reversed(self.operations):
            dx = operation.backward(dx, seq, saved)
        return in_fp32(dx).view(dy.shape)


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sublayer: FusedSublayer) -> Tensor:
        saved: list[Tensor] = []
        y = sublayer.forward(x, saved)
        ctx.save_for_backward(*saved)
        ctx.sublayer = sublayer
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return ctx.sublayer.backward(dy, list(ctx.saved_tensors)), None


@contextmanager
def half_weights(products: Sequence[Product], dtype: torch.dtype) -> Iterator[None]:
    """Give products copies of their weights in this precision for the passes inside the block."""
    for same in by_shape(products):
        weights = stacked([product.weight for product in same], dtype)
        biased = [product.bias for product in same if product.bias is not None]
        biases = stacked(biased, dtype).unbind() if biased else [None] * len(same)
        for product, weight, bias in zip(same, weights.unbind(), biases, strict=True):
            product.half_weights = weight, bias
    try:
        yield
    finally:
        for product in products:
            product.half_weights = None


def products_of(layers: Iterable[Any]) -> Iterator[Product]:
    """Yield the products of fused layers."""
    for layer in layers:
        for sublayer in getattr(layer, "sublayer_functions", ()):
            for operation in getattr(sublayer, "operations", ()):
                for product in getattr(operation, "products", (operation,)):
                    if isinstance(product, Product):
                        yield product


def by_shape(products: Iterable[P]) -> list[list[P]]:
    """Group products by weight shape, bank of the weight and whether they have a bias."""
    groups: dict[Any, list[P]] = {}
    for product in products:
        weight = product.weight
        key = weight.shape, weight.untyped_storage().data_ptr(), product.bias is None
        groups.setdefault(key, []).append(product)
    return list(groups.values())


def stacked(tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """Return tensors of one shape as one, (n, …): a view if they are evenly spaced in memory.

    dtype: of the result; None keeps the dtype of the tensors.
    """
    first = tensors[0]
    kind = dtype or first.dtype
    places = [tensor.storage_offset() for tensor in tensors]
    apart = places[1] - places[0] if len(places) > 1 else first.numel()
    rows = range(places[0], places[0] + len(places) * apart, apart) if apart > 0 else ()
    memory = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    if len(memory) > 1 or places != list(rows) or not all(t.is_contiguous() for t in tensors):
        return torch.stack([converted(tensor, kind) for tensor in tensors])
    view = first.as_strided((len(tensors), *first.shape), (apart, *first.stride()))
    return converted(view, kind)


def converted(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x in this precision: x itself, or a contiguous copy."""
    if x.dtype is dtype:
        return x
    return torch.empty(x.shape, dtype=dtype, device=x.device).copy_(x)
