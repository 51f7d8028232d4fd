"""The operations of a `Chain` on a GPU.

Of a narrow layer every kernel takes as long as it takes to begin and to end, whatever it computes.
What a layer's output does not wait for, the gradients of its weights, is therefore left until many
layers' can be computed by one kernel.  A wide layer's gradients are added where its products
compute them, a bf16 product to fp32 ones without a copy in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from deepstack.speed.choose import has_triton
from deepstack.speed.nodes import Operation, Product, Relu, ScaledProduct, SelfAttention

aten = torch.ops.aten

# Multiplications of a product that fill a GPU: the gradients of smaller ones are left until later.
SMALL = 2**27
# Numbers that a norm reads, for the same of its gain and bias.
SMALL_NORM = 2**21
# Those of a product that a kernel for small layers takes less time for than a library's.
SMALLER = 2**23
# How many layers' are left at the most, and how many bytes of one kind.
LAYERS, BYTES = 64, 2**26


class DeviceProduct(Product):
    """y = x Wᵀ + b, under autocast in bf16, whose weights' gradients may come later.

    relu: y = max(x Wᵀ + b, 0).  after_relu: x is such a y, and the gradient of x that of what is
    inside of max.  Two products with a ReLU between them: one of the first kind, one of the second.
    """

    relu = after_relu = False
    turned: Tensor | None = None  # Wᵀ as it lies in memory, while `weights_turned`

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
        if half:
            weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
        saved += (x, weight)
        if self.scale == 1.0 and bias is not None and half:
            y = torch.addmm(bias, x, weight.t())  # one kernel; in fp32 it would be four
        else:
            y = torch.mm(x, weight.t())
            if self.scale != 1.0:
                y.mul_(self.scale)
            if bias is not None:
                y.add_(bias)
        return torch.relu_(y) if self.relu else y

    def backward(self, dy: Tensor, seq: int, saved: list[Tensor]) -> Tensor:
        weight, x = saved.pop(), saved.pop()
        if self.weight_grad is not None or self.bias_grad is not None:
            if x.numel() * dy.shape[1] < SMALL:
                later(self, dy, x)
            else:
                self.add_gradients(dy, x)
        if small := self.kernels(len(x)):
            return small.product(dy, weight, straight=True, gate=x if self.after_relu else None)
        dx = torch.mm(dy, weight)
        if self.scale != 1.0:
            dx.mul_(self.scale)
        if self.after_relu:
            aten.threshold_backward.grad_input(dx, x, 0, grad_input=dx)
        return dx

    def kernels(self, tokens: int) -> Any:
        """Kernels for a product as small as this one, or None."""
        fits = self.scale == 1.0 and tokens * self.weight.numel() <= SMALLER
        return small_kernels() if fits else None

    def add_gradients(self, dy: Tensor, x: Tensor) -> None:
        """Add dyᵀ x and the sum of dy over tokens."""
        if self.bias_grad is not None:
            self.bias_grad.add_(summed(dy))
        if self.weight_grad is not None:
            if dy.dtype is torch.float32:
                self.weight_grad.addmm_(dy.t(), x, alpha=self.scale)
            elif mixes(dy.dtype) and self.scale == 1.0:
                to = self.weight_grad
                torch.addmm(to, dy.t(), x, out_dtype=torch.float32, out=to)
            else:
                self.weight_grad.add_(torch.mm(dy.t(), x), alpha=self.scale)

    @staticmethod
    def add_together(left: Sequence[tuple[DeviceProduct, tuple[Tensor, ...]]]) -> None:
        """The same of many: dyᵀ x, (layer, n_out, n_in), and the sum of dy, (layer, n_out)."""
        products = [product for product, _ in left]
        dy, x = (torch.stack(tensors) for tensors in zip(*(t for _, t in left), strict=True))
        sums = torch.bmm(dy.transpose(1, 2), x)
        add_rows([p.weight_grad for p in products], sums, products[0].scale)
        if any(p.bias_grad is not None for p in products):
            add_rows([p.bias_grad for p in products], dy.sum(1, dtype=torch.float32))


class DeviceScaledProduct(DeviceProduct, ScaledProduct):
    """y = x Wᵀ / sqrt(n_in) + b: the product under the NTK parameterisation."""


ON_GPU: dict[type[Product], type[DeviceProduct]] = {
    Product: DeviceProduct,
    ScaledProduct: DeviceScaledProduct,
}


def small_products(layers: Iterable[Any], tokens: int) -> list[DeviceProduct]:
    """Those products of fused layers that kernels for small ones are made for."""
    return [
        operation
        for layer in layers
        for chain in getattr(layer, "running", ())
        for operation in getattr(chain, "operations", ())
        if isinstance(operation, DeviceProduct) and operation.kernels(tokens)
    ]


@contextmanager
def weights_turned(layers: Iterable[Any], tokens: int) -> Iterator[None]:
    """Give small products their weights as the kernels read them fastest, inside of the block.

    Of fp32 numbers the product with a matrix that lies the other way takes twice as long; turning
    those of all layers takes as long as two of these products.
    """
    products = small_products(layers, tokens)
    by_shape: dict[Any, list[DeviceProduct]] = {}
    for product in products:
        by_shape.setdefault(product.weight.shape, []).append(product)
    for same in by_shape.values():
        whole = torch.stack([product.weight for product in same]).transpose(1, 2).contiguous()
        for product, turned in zip(same, whole.unbind(), strict=True):
            product.turned = turned
    try:
        yield
    finally:
        for product in products:
            product.turned = None


def in_turn(into: Product, between: Operation, out: Product) -> list[Operation]:
    """Two products with an operation between them; on a GPU a ReLU is part of both."""
    if isinstance(into, DeviceProduct) and isinstance(out, DeviceProduct):
        if isinstance(between, Relu):
            into.relu = out.after_relu = True
            return [into, out]
    return [into, between, out]


@cache
def small_kernels() -> Any:
    """The module of kernels for small layers, or None where Triton cannot make them."""
    if not has_triton() or (torch.cuda.is_available() and not since_ampere()):
        return None
    from deepstack.speed import kernels

    return kernels


@cache
def since_ampere() -> bool:
    """Whether the GPU is one that flash attention is made for, and products of bf16 numbers."""
    return torch.cuda.get_device_capability() >= (8, 0)


def summed(dy: Tensor) -> Tensor:
    """The sum over tokens in fp32, (n_out,), of dy, (tokens, n_out).

    As a product it takes half the time.
    """
    if dy.dtype is torch.float32 or not mixes(dy.dtype):
        return dy.sum(0, dtype=torch.float32)
    found: Tensor = torch.mm(dy.new_ones(1, len(dy)), dy, out_dtype=torch.float32)
    return found[0]


@cache
def mixes(dtype: torch.dtype) -> bool:
    """Whether torch multiplies matrices of this type and adds the product to one of fp32."""
    a, to = (torch.ones(16, 16, device="cuda", dtype=kind) for kind in (dtype, torch.float32))
    try:
        torch.addmm(to, a, a, out_dtype=torch.float32, out=to)
    except (RuntimeError, TypeError):
        return False
    return True


class Lasting(Protocol):
    """What has parameters whose gradients can be added for many layers at once."""

    @staticmethod
    def add_together(left: Sequence[tuple[Any, tuple[Tensor, ...]]]) -> None:
        """Add the gradients of all, each with the tensors that it has left, of equal shapes."""


class Waiting:
    """What one backward pass has left for later, by kind and shape."""

    def __init__(self) -> None:
        self.left: dict[Any, list[tuple[Lasting, tuple[Tensor, ...]]]] = {}

    def add(self, what: Lasting, tensors: tuple[Tensor, ...]) -> None:
        """Leave it, until there are enough of its shape."""
        key = type(what), tensors[0].dtype, *(tensor.shape for tensor in tensors)
        same = self.left.setdefault(key, [])
        same.append((what, tensors))
        if len(same) == LAYERS or len(same) * sum(t.nbytes for t in tensors) >= BYTES:
            what.add_together(self.left.pop(key))

    def end(self) -> None:
        """Add what is left."""
        for same in self.left.values():
            same[0][0].add_together(same)


# Of every backward pass under way, by torch's number of it.
_waiting: dict[int, Waiting] = {}


def later(what: Lasting, *tensors: Tensor) -> None:
    """Add gradients some time before the end of the backward pass under way."""
    task = torch._C._current_graph_task_id()
    if task not in _waiting:
        _waiting[task] = Waiting()
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(partial(end, task))
    _waiting[task].add(what, tensors)


def end(task: int) -> None:
    """A backward pass has come to its end."""
    _waiting.pop(task).end()


def forget() -> None:
    """A backward pass ended in an error: what it has left for later is of no use."""
    _waiting.clear()


def add_rows(gradients: Sequence[Tensor | None], sums: Tensor, alpha: float = 1.0) -> None:
    """Add a row of sums to every gradient; None: of what is not trained."""
    pairs = [(g, s) for g, s in zip(gradients, sums, strict=True) if g is not None]
    if pairs:
        torch._foreach_add_([g for g, _ in pairs], [s for _, s in pairs], alpha=alpha)


class DeviceNorm:
    """LN(z) = g * (z - mean(z)) / sqrt(var(z) + eps) + b, whose weights' gradients may come later.

    z: (…, d); g, b: (d,), or None.
    """

    def __init__(
        self, gain: nn.Parameter | None, bias: nn.Parameter | None, width: int, eps: float
    ) -> None:
        self.shape, self.eps = (width,), eps
        self.gain, self.bias = (None if p is None else p.detach() for p in (gain, bias))
        self.gain_grad, self.bias_grad = (
            p.grad if p is not None and p.requires_grad else None for p in (gain, bias)
        )

    def __call__(self, z: Tensor) -> Tensor:
        if torch.is_grad_enabled() and z.requires_grad:
            found: Tensor = _Normed.apply(z.float(), self)
            return found
        return torch.layer_norm(z, self.shape, self.gain, self.bias, self.eps)

    def backward(self, dy: Tensor, z: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
        """The gradient of z."""
        trained = self.gain_grad is not None, self.bias_grad is not None
        now = z.numel() >= SMALL_NORM
        if any(trained) and not now:
            later(self, dy, z, mean, rstd)
        dz, gain, bias = aten.native_layer_norm_backward(
            dy, z, self.shape, mean, rstd, self.gain, self.bias,
            [True, trained[0] and now, trained[1] and now],
        )  # fmt: skip
        for grad, found in ((self.gain_grad, gain), (self.bias_grad, bias)):
            if found is not None and grad is not None:
                grad.add_(found)
        return dz

    @staticmethod
    def add_together(left: Sequence[tuple[DeviceNorm, tuple[Tensor, ...]]]) -> None:
        """Add the sums over tokens of dy (z - mean) rstd and of dy, each (layer, d)."""
        norms = [norm for norm, _ in left]
        dy, z, mean, rstd = (torch.stack(t) for t in zip(*(t for _, t in left), strict=True))
        tokens = tuple(range(1, dy.ndim - 1))
        if any(n.gain_grad is not None for n in norms):
            add_rows([n.gain_grad for n in norms], ((z - mean) * rstd * dy).sum(tokens))
        if any(n.bias_grad is not None for n in norms):
            add_rows([n.bias_grad for n in norms], dy.sum(tokens))


class _Normed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, norm: DeviceNorm) -> Tensor:
        y, mean, rstd = torch.native_layer_norm(z, norm.shape, norm.gain, norm.bias, norm.eps)
        ctx.save_for_backward(z, mean, rstd)
        ctx.norm = norm
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return ctx.norm.backward(dy, *ctx.saved_tensors), None


def flash(dtype: torch.dtype) -> bool:
    """Whether attention of such numbers is flash attention."""
    return dtype is not torch.float32 and since_ampere()


class DeviceAttention:
    """y = concat_h softmax(q_h k_hᵀ / sqrt(d_head)) v_h.  [q, k, v]: (tokens, 3 d); y: (tokens, d).

    By torch's kernels for GPUs that F.scaled_dot_product_attention takes: flash attention in bf16,
    memory-efficient attention in fp32 and on old GPUs.  causal: a position reads itself and those
    before it.
    """

    def __init__(self, n_heads: int, causal: bool = False) -> None:
        self.n_heads, self.causal = n_heads, causal

    def forward(self, x: Tensor, seq: int, saved: list[Tensor]) -> Tensor:
        if small := self.kernels(seq, x.shape[1] // (3 * self.n_heads)):
            saved.append(x)
            return small.attend(x, seq, self.n_heads, self.causal)
        tokens, width = x.shape
        heads = x.view(tokens // seq, seq, 3, self.n_heads, width // (3 * self.n_heads))
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)  # each (batch, head, seq, d_head)
        if not flash(x.dtype):
            attend = aten._scaled_dot_product_efficient_attention
            y, logsumexp, seed, offset = attend(q, k, v, None, True, 0.0, self.causal)
        else:
            attend = aten._scaled_dot_product_flash_attention
            y, logsumexp, *_, seed, offset, _ = attend(q, k, v, 0.0, self.causal)
        saved += (q, k, v, y, logsumexp, seed, offset)
        return y.transpose(1, 2).reshape(tokens, width // 3)

    def backward(self, dy: Tensor, seq: int, saved: list[Tensor]) -> Tensor:
        if small := self.kernels(seq, dy.shape[1] // self.n_heads):
            return small.attend_backward(saved.pop(), dy, seq, self.n_heads, self.causal)
        q, k, v, y, logsumexp, seed, offset = saved[-7:]
        del saved[-7:]
        tokens, width = dy.shape
        heads = dy.view(tokens // seq, seq, self.n_heads, -1).transpose(1, 2)
        if not flash(dy.dtype):
            *gradients, _ = aten._scaled_dot_product_efficient_attention_backward(
                heads, q, k, v, None, y, logsumexp, seed, offset, 0.0,
                [True, True, True, False], self.causal,
            )  # fmt: skip
        else:
            gradients = aten._scaled_dot_product_flash_attention_backward(
                heads, q, k, v, y, logsumexp, None, None, seq, seq, 0.0, self.causal, seed, offset
            )
        return torch.cat([g.transpose(1, 2).reshape(tokens, width) for g in gradients], dim=1)

    def kernels(self, seq: int, d_head: int) -> Any:
        """Kernels for sequences as short as these, or None."""
        small = small_kernels()
        return small if small and seq <= small.LONGEST and d_head <= small.WIDEST else None


def product_on(device: torch.device, kind: type[Product]) -> type[Product]:
    """The same kind of product on a device."""
    return ON_GPU[kind] if device.type == "cuda" else kind


def attention_on(device: torch.device, n_heads: int, d_head: int, causal: bool) -> Operation | None:
    """Self-attention on a device, or None where no kernel is made for such heads."""
    if device.type == "cuda":
        fits = d_head % 8 == 0 and d_head <= 128
        return DeviceAttention(n_heads, causal) if fits else None
    return SelfAttention(n_heads, causal) if SelfAttention.available else None
