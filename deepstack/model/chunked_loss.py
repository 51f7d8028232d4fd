"""The loss of a head with a large vocabulary, without the logits of all positions.

The gradient of a chunk's logits is computed right after its loss, in the forward pass, and reduced
to gradients of hidden states and of the head before the next chunk.  So the memory is that of one
chunk, and each product is computed once.

The idea is known as the fused linear cross-entropy: Hsu et al. 2024, arXiv:2410.10989 (Liger
Kernel), section 3; Wijmans et al. 2024, arXiv:2411.09009, avoid the logits in a kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from deepstack import config as conf
from deepstack.model.transformer import TiedHead
from deepstack.tasks import IGNORE

LogitsLoss = Callable[[Tensor, Tensor, Any], Tensor]
"""(logits, targets, divisor) -> the sum of losses over the divisor."""


class ChunkedLoss:
    """The loss of hidden states F, (F, head, token table) -> 0-d, in chunks of positions.

    Equals loss(head(F), targets, divisor) to rounding.  Gradients are those of one backward pass.

    targets: (batch, seq).
    divisor: of the sum; by default the number of predicted positions.
    """

    def __init__(
        self, loss: LogitsLoss, targets: Tensor, divisor: float | Tensor | None = None
    ) -> None:
        self.loss, self.targets = loss, targets.flatten()
        self.divisor = (targets != IGNORE).sum() if divisor is None else divisor

    def __call__(self, final: Tensor, head: TiedHead, table: nn.Parameter) -> Tensor:
        hidden, weight, bias = head.last_map(final, table)
        value: Tensor = _Loss.apply(  # type: ignore[no-untyped-call]
            hidden.flatten(0, 1), weight, bias, self, torch.is_grad_enabled()
        )
        return value

    def of_chunk(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the contribution of some positions, (rows, vocab) and (rows,)."""
        return self.loss(logits[None], targets[None], self.divisor)


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor, loss: ChunkedLoss, learns: bool
    ) -> Tensor:
        kind = hidden.device.type
        half = torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind) if half else weight.dtype
        matrix, shift = weight.to(dtype), bias.to(dtype)
        wanted = [learns and needed for needed in ctx.needs_input_grad[:3]]
        of_hidden = torch.empty_like(hidden)
        of_weight, of_bias = torch.zeros_like(weight), torch.zeros_like(bias)
        total = torch.zeros((), device=hidden.device)
        rows = conf.chunk_rows(len(hidden), len(weight)) or len(hidden)
        chunks = zip(
            *(tensor.split(rows) for tensor in (hidden, loss.targets, of_hidden)), strict=True
        )
        with torch.autocast(kind, enabled=False):
            for x, targets, of_x in chunks:
                x = x.to(dtype)
                logits = F.linear(x, matrix, shift)
                if not any(wanted):
                    total += loss.of_chunk(logits, targets)
                    continue
                with torch.enable_grad():
                    value = loss.of_chunk(logits.requires_grad_(), targets)
                    (gradient,) = torch.autograd.grad(value, logits)
                del logits
                total += value.detach()
                if wanted[0]:
                    of_x.copy_(gradient @ matrix)
                if wanted[1] and dtype is weight.dtype:
                    of_weight.addmm_(gradient.t(), x)
                elif wanted[1]:
                    of_weight.add_(gradient.t() @ x)
                if wanted[2]:
                    of_bias.add_(gradient.sum(0, dtype=bias.dtype))
        pairs = zip((of_hidden, of_weight, of_bias), wanted, strict=True)
        ctx.gradients = [gradient if needed else None for gradient, needed in pairs]
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_loss: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None  # scaled in place, so once
        scaled = [None if gradient is None else gradient.mul_(of_loss) for gradient in gradients]
        return *scaled, None, None
