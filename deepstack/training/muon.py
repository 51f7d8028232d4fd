"""Muon on the banks: orthogonalises the matrices of many layers at once, in batched products."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deepstack.fast.step import bare_step

# a, b, c of Jordan 2024: the steepest quintic at 0 that keeps singular values within 0.68 to 1.14.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
# Least norm of a gradient: the squares of smaller ones underflow in fp32.  The papers' 1e-7 is too
# large for the gradients of layers far from the loss.
LEAST_NORM = 1e-18
# Numbers orthogonalised at once: some tens of narrow layers, which fit into caches; on a GPU as
# many as keep it busy.
BATCH_SIZE, BATCH_SIZE_ON_GPU = 2**19, 2**26

Rows = tuple[Tensor, Tensor, Tensor]  # W, g and B of one layer or more, (layers, padded size)


class Muon(torch.optim.Optimizer):
    """B <- mu B + (1 - mu) g;  W <- (1 - lr decay) W - lr s O((1 - mu) g + mu B), W a matrix.

    O: `orthogonalised`; s: 0.2 sqrt(max(n_out, n_in)), so that entries move as much as AdamW's, Liu
    et al. 2025, arXiv:2502.16982, section 2.2, or sqrt(max(1, n_out/n_in)), as in Jordan's code.
    Jordan et al. 2024, kellerjordan.github.io/posts/muon; the momentum is Nesterov's.  Their code
    rounds to bf16 before O; here it is as exact as `dtype`.

    Like torch's fused optimizers it divides gradients by `grad_scale` and skips the update if
    `found_inf` is 1, without a wait for the device.

    groups: one a bank of matrices, whose tensors are (rows, padded size): `shape`, the shape of the
        matrices in a row (number, n_out, n_in); `weight_decay`.
    others: the optimizer of all other parameters, whose groups and state count as this one's; None
        where there are no others.
    adjust_lr: which s, 'match_rms_adamw' or 'original', torch's names for them.
    """

    found_inf: Tensor | None = None
    grad_scale: Tensor | None = None

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        others: torch.optim.Optimizer | None,
        *,
        lr: float,
        momentum: float = 0.95,
        ns_steps: int = 5,
        adjust_lr: str = "match_rms_adamw",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": 0.0})
        self.matrices = list(self.param_groups)
        self.others, self.dtype = others, dtype
        self.ns_steps, self.adjust_lr = ns_steps, adjust_lr
        if others is not None:
            others.state = self.state
            self.param_groups += others.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update all parameters once."""
        others: Any = self.others  # torch's classes do not declare found_inf and grad_scale
        if others is not None:
            others.found_inf, others.grad_scale = self.found_inf, self.grad_scale
            bare_step(others)()
        for group in self.matrices:
            for p in group["params"]:
                if p not in self.state:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p)
            self._move(group)

    def _move(self, group: dict[str, Any]) -> None:
        """Update W and B of one bank, several layers at a time."""
        number, n_out, n_in = group["shape"]
        size, momentum = number * n_out * n_in, group["momentum"]
        original = self.adjust_lr == "original"
        share = max(1.0, n_out / n_in) ** 0.5 if original else 0.2 * max(n_out, n_in) ** 0.5
        rate, decay = group["lr"] * share, group["lr"] * group["weight_decay"]
        stop = None
        if self.found_inf is not None:
            stop = self.found_inf.to(torch.bool)
            decay = decay * (1.0 - self.found_inf)
        # The same batches of layers whether these are rows of a tensor or separate tensors.
        batch_size = BATCH_SIZE_ON_GPU if group["params"][0].is_cuda else BATCH_SIZE
        layers = max(1, batch_size // size)
        rows: list[Rows] = []
        for p in group["params"]:
            parts = p.detach(), p.grad, self.state[p]["momentum_buffer"]
            rows += zip(*(part.split(layers) for part in parts), strict=True)
        count = layers if len(group["params"]) > 1 else 1
        for batch in (rows[i : i + count] for i in range(0, len(rows), count)):
            ahead = []
            for _, gradient, buffer in batch:
                if self.grad_scale is not None:
                    gradient = gradient / self.grad_scale
                moved = torch.lerp(buffer, gradient, 1.0 - momentum)
                buffer.copy_(moved if stop is None else torch.where(stop, buffer, moved))
                ahead.append(torch.lerp(gradient, moved, momentum)[:, :size])
            matrices = torch.cat(ahead).view(-1, n_out, n_in).to(self.dtype)
            step = orthogonalised(matrices, self.ns_steps).reshape(-1, size).float().mul_(rate)
            if stop is not None:
                step.masked_fill_(stop, 0.0)
            moves = step.split([len(weights) for weights, _, _ in batch])
            for (weights, _, _), move in zip(batch, moves, strict=True):
                if group["weight_decay"]:
                    weights.mul_(1.0 - decay)
                weights[:, :size].sub_(move)


def orthogonalised(matrices: Tensor, steps: int = 5) -> Tensor:
    """O(G) ~ U Vᵀ of each G = U S Vᵀ, its singular values 0.68 to 1.14 but for the smallest.

    X_0 = G/‖G‖_F,  X <- a X + (b A + c A²) X with A = X Xᵀ: five Newton-Schulz steps.

    matrices: (batch, n_out, n_in).  Jordan et al. 2024, kellerjordan.github.io/posts/muon.
    """
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=LEAST_NORM)
    for _ in range(steps):
        gram = torch.bmm(x, x.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if tall else x
