"""Norms and rotation of queries and keys, applied before their logits."""

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Rotation(nn.Module):
    """(h_2i, h_2i+1) turned by the angle p θ_i at position p, θ_i = base^(-2i/d_head).

    So q·k depends on the distance of two positions, and the stream contains no positions.  h:
    (batch, head, seq, d_head), d_head even.  Su et al. 2021, arXiv:2104.09864, equation 34.

    The tables have the default type of torch, fp32 at least.
    """

    def __init__(self, seq_len: int, d_head: int, base: float = 10000.0) -> None:
        super().__init__()
        at = torch.arange(seq_len, dtype=torch.float64, device="cpu")[:, None]
        rate = base ** (-torch.arange(0, d_head, 2, dtype=torch.float64, device="cpu") / d_head)
        angle = (at * rate).repeat_interleave(2, dim=1)
        sign = torch.tensor([-1.0, 1.0], dtype=torch.float64, device="cpu").repeat(d_head // 2)
        dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
        self.cos = nn.Buffer(torch.cos(angle).to(dtype), persistent=False)
        self.sin = nn.Buffer((sign * torch.sin(angle)).to(dtype), persistent=False)

    def forward(self, h: Tensor, first: int = 0) -> Tensor:
        """Return h rotated, where `first` is the position of its first token."""
        positions = slice(first, first + h.shape[2])
        other = h.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        turned = torch.addcmul(h * self.cos[positions], other, self.sin[positions])
        return turned.to(h.dtype)


class QueriesAndKeys(nn.Module):
    """q, k -> R norm(q), R norm(k), the norm over d_head and R the rotation; each is optional.

    make_norm: d_head -> a norm, one for q and one for k; None: no norms.  Norms before logits:
    Henry et al. 2020, arXiv:2010.04245; as here, Dehghani et al. 2023, arXiv:2302.05442, section 2.
    """

    def __init__(
        self, d_head: int, make_norm: Callable[[int], nn.Module] | None, rotation: Rotation | None
    ) -> None:
        super().__init__()
        self.q_norm = make_norm(d_head) if make_norm else None
        self.k_norm = make_norm(d_head) if make_norm else None
        self.rotation = rotation

    def q(self, h: Tensor, first: int = 0) -> Tensor:
        """Return queries normed and rotated, (batch, head, seq, d_head), from position `first`."""
        return self._made(h, self.q_norm, first)

    def k(self, h: Tensor, first: int = 0) -> Tensor:
        """Return keys normed and rotated, with the same arguments."""
        return self._made(h, self.k_norm, first)

    def _made(self, h: Tensor, norm: nn.Module | None, first: int) -> Tensor:
        h = h if norm is None else norm(h)
        return h if self.rotation is None else self.rotation(h, first)
