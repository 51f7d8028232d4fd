"""Equations of schemes whose layers hand on more than x, written once more from their papers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

One = Callable[[Tensor], Tensor]


def norm(module: Any) -> One:
    def apply(z: Tensor) -> Tensor:
        mean = z.mean(-1, keepdim=True)
        variance = ((z - mean) ** 2).mean(-1, keepdim=True)
        return module.gain * (z - mean) / torch.sqrt(variance + 1e-5) + module.bias

    return apply


def real_former(p: Any, stream: Any) -> tuple[Tensor, Tensor]:
    """Figure 1 c: softmax(Q Kᵀ / sqrt(d_head) + Prev) V, and the sum is the next layer's Prev."""
    x, previous = stream
    sums = []

    def plus_previous(scores: Tensor) -> Tensor:
        sums.append(scores if previous is None else scores + previous)
        return sums[-1]

    x = p.a[0](x + p.A(x, logits=plus_previous))
    return p.f[0](x + p.F(x)), sums[0]


def hyper_connections(p: Any, stream: Any) -> tuple[Tensor, Tensor]:
    """Equations 1 to 5 and 10 to 14, a token and a stream at a time."""
    x, H = stream
    n = len(H)
    sublayers = (
        (2 * p.l - 2, p.A, p.a, p.s.attention_connections),
        (2 * p.l - 1, p.F, p.f, p.s.feed_forward_connections),
    )
    for k, G, norms, c in sublayers:
        static = c.static.view(n, n + 2)
        A_m = torch.eye(n)[k % n] + static[:, 0]
        A_r = torch.eye(n) + static[:, 1:-1]
        B = torch.ones(n) + static[:, -1]
        h, mixed, given = torch.zeros_like(x), torch.zeros_like(H), torch.zeros(*H.shape[:-1])
        for b, t in torch.cartesian_prod(*map(torch.arange, x.shape[:2])).tolist():
            of_token = H[:, b, t]  # the paper's matrix H, (n, d)
            alpha_m, alpha_r, beta = A_m, A_r, B
            if c.dynamic:
                normed, (W_m, W_r, W_b) = norm(c.norm)(of_token), c.map.T.split([1, n, 1], dim=1)
                alpha_m = alpha_m + c.scale_a * torch.tanh(normed @ W_m)[:, 0]
                alpha_r = alpha_r + c.scale_a * torch.tanh(normed @ W_r)
                beta = beta + c.scale_b * torch.tanh(normed @ W_b)[:, 0]
            h[b, t] = of_token.T @ alpha_m
            mixed[:, b, t] = alpha_r.T @ of_token
            given[:, b, t] = beta
        y = G(norms[0](h))
        H = torch.stack([mixed[i] + given[i][..., None] * y for i in range(n)])
    return H[0], H


def stream_into(name: str, l: int, x: Tensor) -> Any:
    """What layer l reads, its first tensor x."""
    others = [torch.randn_like(x) for _ in range(max(l, 3))]
    before = torch.randn(len(x), 3, x.shape[1], x.shape[1])  # 3 heads
    return {
        "residual": (x, others[0]),
        "dlcl": (x, tuple(others[:l])),
        "real_former": (x, None if l == 1 else before),
        "hyper_connections": (x, torch.stack([x, *others[:3]])),
    }.get(name, x)


def enter(name: str, x: Tensor) -> Any:
    """What the first layer reads."""
    several = {
        "residual": (x, x),
        "dlcl": (x, (x,)),
        "real_former": (x, None),
        "hyper_connections": (x, torch.stack([x] * 4)),
    }
    return several.get(name, x)
