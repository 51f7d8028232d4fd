"""Runs a sublayer as one autograd node, for narrow stacks on a CPU.

Autograd keeps a node for every operation and allocates, then adds, a gradient for every weight.  At
1000 narrow layers that costs as much as arithmetic.  Here a sublayer is a `FusedSublayer` of a few
operations whose backward passes are written out: one node runs them all, and each adds its weights'
gradients to `.grad` where the product computes them.  What is computed is what the plain sublayer
computes, operation by operation; tests compare the two.

Since gradients are written as a side effect, `torch.autograd.grad`, forward-mode differentiation
and hooks on parameters see nothing of a chain: whatever needs them runs the plain sublayers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Operation(Protocol):
    """A function of (tokens, n_in) -> (tokens, n_out), and its backward pass.

    forward appends to `saved` what backward takes from its end.
    """

    def forward(self, x: Tensor, seq: int, saved: list[Tensor]) -> Tensor:
        """y, from x and the number of tokens in a sequence."""

    def backward(self, dy: Tensor, seq: int, saved: list[Tensor]) -> Tensor:
        """The gradient of x; gradients of weights are added to their `.grad`."""


class Product:
    """y = x Wᵀ + b.  x: (tokens, n_in), W: (n_out, n_in), b: (n_out,), or no b."""

    scale = 1.0

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        self.weight, self.bias = weight.detach(), None if bias is None else bias.detach()
        self.transposed = self.weight.t()
        self.weight_grad = weight.grad if weight.requires_grad else None
        self.bias_grad = bias.grad if bias is not None and bias.requires_grad else None

    def forward(self, x: Tensor, seq: int, saved: list[Tensor]) -> Tensor:
        saved.append(x)
        if self.bias is None:
            return torch.mm(x, self.transposed)
        return torch.addmm(self.bias, x, self.transposed)

    def backward(self, dy: Tensor, seq: int, saved: list[Tensor]) -> Tensor:
        x = saved.pop()
        if self.bias_grad is not None:
            self.bias_grad.add_(dy.sum(0))
        if self.weight_grad is not None:
            self.weight_grad.addmm_(dy.t(), x)
        return torch.mm(dy, self.weight)


class ScaledProduct(Product):
    """y = x Wᵀ / sqrt(n_in) + b: the product under the NTK parameterisation."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        super().__init__(weight, bias)
        self.scale = weight.shape[1] ** -0.5

    def forward(self, x: Tensor, seq: int, saved: list[Tensor]) -> Tensor:
        saved.append(x)
        if self.bias is None:
            return torch.mm(x, self.transposed).mul_(self.scale)
        return torch.addmm(self.bias, x, self.transposed, alpha=self.scale)

    def backward(self, dy: Tensor, seq: int, saved: list[Tensor]) -> Tensor:
        x = saved.pop()
        if self.bias_grad is not None:
            self.bias_grad.add_(dy.sum(0))
        if self.weight_grad is not None:
            self.weight_grad.addmm_(dy.t(), x, alpha=self.scale)
        return torch.mm(dy, self.weight).mul_(self.scale)


class Relu:
    """y = max(x, 0), in place: its input is always a new result of the adjacent product."""

    def forward(self, x: Tensor, seq: int, saved: list[Tensor]) -> Tensor:
        saved.append(torch.relu_(x))
        return x

    def backward(self, dy: Tensor, seq: int, saved: list[Tensor]) -> Tensor:
        return torch.ops.aten.threshold_backward.grad_input(dy, saved.pop(), 0, grad_input=dy)


class Gelu:
    """y = x Phi(x), Phi the normal distribution function."""

    def forward(self, x: Tensor, seq: int, saved: list[Tensor]) -> Tensor:
        saved.append(x)
        return F.gelu(x)

    def backward(self, dy: Tensor, seq: int, saved: list[Tensor]) -> Tensor:
        return torch.ops.aten.gelu_backward(dy, saved.pop())


class Sigmoid:
    """y = 1 / (1 + exp(-x)), in place: its gradient is a function of y."""

    def forward(self, x: Tensor, seq: int, saved: list[Tensor]) -> Tensor:
        saved.append(torch.sigmoid_(x))
        return x

    def backward(self, dy: Tensor, seq: int, saved: list[Tensor]) -> Tensor:
        return torch.ops.aten.sigmoid_backward(dy, saved.pop())


class Tanh:
    """y = tanh(x), in place: its gradient is a function of y."""

    def forward(self, x: Tensor, seq: int, saved: list[Tensor]) -> Tensor:
        saved.append(torch.tanh_(x))
        return x

    def backward(self, dy: Tensor, seq: int, saved: list[Tensor]) -> Tensor:
        return torch.ops.aten.tanh_backward(dy, saved.pop())


class Selu:
    """y = scale * (max(x, 0) + min(alpha (exp(x) - 1), 0)), scale and alpha as in SELU's paper."""

    ALPHA, SCALE = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946

    def forward(self, x: Tensor, seq: int, saved: list[Tensor]) -> Tensor:
        saved.append(x)
        return F.selu(x)

    def backward(self, dy: Tensor, seq: int, saved: list[Tensor]) -> Tensor:
        x = saved.pop()
        return torch.ops.aten.elu_backward(dy, self.ALPHA, self.SCALE, 1, False, x)


class Silu:
    """y = x / (1 + exp(-x))."""

    def forward(self, x: Tensor, seq: int, saved: list[Tensor]) -> Tensor:
        saved.append(x)
        return F.silu(x)

    def backward(self, dy: Tensor, seq: int, saved: list[Tensor]) -> Tensor:
        return torch.ops.aten.silu_backward(dy, saved.pop())


class Relu2:
    """y = max(x, 0)^2."""

    def forward(self, x: Tensor, seq: int, saved: list[Tensor]) -> Tensor:
        saved.append(torch.relu_(x))
        return x * x

    def backward(self, dy: Tensor, seq: int, saved: list[Tensor]) -> Tensor:
        return dy.mul_(saved.pop()).mul_(2.0)


class Gate:
    """y = phi(a) * b, where x is the concatenation [a, b] and phi is another operation."""

    def __init__(self, phi: Operation) -> None:
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


OPERATIONS: dict[str, Operation] = {
    "relu": Relu(),
    "gelu": Gelu(),
    "sigmoid": Sigmoid(),
    "tanh": Tanh(),
    "selu": Selu(),
    "silu": Silu(),
    "relu2": Relu2(),
}


class SelfAttention:
    """y = concat_h softmax(q_h k_hᵀ / sqrt(d_head)) v_h.  [q, k, v]: (tokens, 3 d); y: (tokens, d).

    By torch's attention kernel for CPUs, the one that F.scaled_dot_product_attention takes there.
    causal: a position reads itself and those before it.
    """

    available = hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")

    def __init__(self, n_heads: int, causal: bool = False) -> None:
        self.n_heads, self.causal = n_heads, causal

    def forward(self, x: Tensor, seq: int, saved: list[Tensor]) -> Tensor:
        tokens, width = x.shape
        heads = x.view(tokens // seq, seq, 3, self.n_heads, width // (3 * self.n_heads))
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)  # each (batch, head, seq, d_head)
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        y, logsumexp = attend(q, k, v, 0.0, self.causal)
        saved += (q, k, v, y, logsumexp)
        return y.transpose(1, 2).view(tokens, width // 3)

    def backward(self, dy: Tensor, seq: int, saved: list[Tensor]) -> Tensor:
        q, k, v, y, logsumexp = saved[-5:]
        del saved[-5:]
        tokens, width = dy.shape
        heads = dy.view(tokens // seq, seq, self.n_heads, -1).transpose(1, 2)
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            heads, q, k, v, y, logsumexp, 0.0, self.causal
        )
        return torch.cat([g.transpose(1, 2).reshape(tokens, width) for g in gradients], dim=1)


class FusedSublayer:
    """A sublayer G as operations one after the other: (batch, seq, d_model) -> the same.

    Under `torch.no_grad` the same operations run without a node.
    """

    def __init__(self, operations: Sequence[Operation]) -> None:
        self.operations = tuple(operations)
        self.backwards = self.operations[::-1]

    def __call__(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return _Node.apply(x, copy_of(x), self)
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
        for operation in self.backwards:
            dx = operation.backward(dx, seq, saved)
        return dx.view(dy.shape)


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, copy: Tensor | None, chain: FusedSublayer) -> Tensor:
        saved: list[Tensor] = []
        y = chain.forward(x if copy is None else copy, saved)
        ctx.save_for_backward(*saved)
        ctx.chain = chain
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return ctx.chain.backward(dy, list(ctx.saved_tensors)), None, None


def with_copy(x: Tensor, copy: Tensor | None) -> Tensor:
    """Return x with its copy in another precision attached, valid until x is written to."""
    if copy is not None:
        vars(x)["lower"] = copy, x._version
    return x


def without_copy(x: Any) -> None:
    """Remove the copy attached to x."""
    if isinstance(x, Tensor):
        vars(x).pop("lower", None)


def copy_of(x: Tensor) -> Tensor | None:
    """Return the copy attached by `with_copy`, or None if x has changed or has none."""
    found = getattr(x, "lower", None)
    return found[0] if found and found[1] == x._version else None
