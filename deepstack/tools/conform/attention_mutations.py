"""Changes inside attention: masks, rotary positions, heads, and the layout of its matrices.

Each is a function of the module that returns the name of an attribute and its value, as
`mutations.sublayers` takes it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from deepstack.model import QueriesAndKeys, Rotation
from deepstack.tools.conform.reference import HalfRotation, Reference, double_precision

Change = Callable[[Any], tuple[str, Any]]
Q_K_V = ("q", "k", "v")
MASKED = -1e9
"""The logit that blocks give to a position that is not read."""


def offset_mask(offset: int, *, adds: bool = False) -> Change:
    """Return the change to a mask by which position i reads j ≤ i + offset.

    adds: whether it is added to the logits, so that a row without a position keeps them.
    """

    def change(module: Any) -> tuple[str, Any]:
        def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
            logits = module.limited(module.logits(q, k))
            if module.causal:
                later = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(offset + 1)
                hidden = logits + MASKED if adds else torch.full_like(logits, MASKED)
                logits = torch.where(later, hidden, logits)
            return torch.matmul(torch.softmax(logits, dim=-1), v)

        return "attend", attend

    return change


def later_mask(module: Any) -> tuple[str, Any]:
    """Let a position read itself and later ones in place of earlier ones."""

    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
        logits = module.limited(module.logits(q, k))
        earlier = torch.ones(logits.shape[-2:], dtype=torch.bool).tril(-1)
        logits = logits.masked_fill(earlier & torch.tensor(module.causal), MASKED)
        return torch.matmul(torch.softmax(logits, dim=-1), v)

    return "attend", attend


def wider_window(more: int) -> Change:
    """Return the change of the window by so many positions."""
    return lambda module: ("window", None if module.window is None else module.window + more)


def rotated(reference: Reference, kind: str, base: float = 10000.0, sign: float = 1.0) -> Change:
    """Return the change to rotary positions of a kind: 'pairs', 'halves' or 'none'.

    sign: −1 turns backwards.
    """
    seq = reference.config.task.seq_len

    def change(module: Any) -> tuple[str, Any]:
        own = module.qk
        d_head = module.o.shape[1] // module.n_heads
        rotation: Rotation | None = None
        if kind != "none":
            with double_precision():
                rotation = (HalfRotation if kind == "halves" else Rotation)(seq, d_head, base)
            rotation.sin.mul_(sign)
        both = QueriesAndKeys(d_head, None, rotation)
        if own is not None:
            both.q_norm, both.k_norm = own.q_norm, own.k_norm
        return "qk", both

    return change


def joined_without_transpose(module: Any) -> tuple[str, Any]:
    """Join the heads as (head, position) where it must be (position, head)."""

    def out(y: Tensor, mean: Tensor | None = None) -> Any:
        batch, heads, seq, d_head = y.shape
        wrong = y.reshape(batch, seq, heads, d_head).transpose(1, 2)
        return type(module).out(module, wrong, mean)

    return "out", out


def split_without_transpose(module: Any) -> tuple[str, Any]:
    """Split queries, keys and values as (head, position) where it must be (position, head)."""

    def products(x: Tensor) -> list[Tensor]:
        return [h.transpose(1, 2).reshape(h.shape) for h in type(module).products(module, x)]

    return "products", products


def interleaved_heads(module: Any) -> tuple[str, Any]:
    """Let coordinate i of queries, keys and values belong to head i mod n_heads."""

    def products(x: Tensor) -> list[Tensor]:
        found = []
        for h in type(module).products(module, x):
            flat = h.transpose(1, 2).flatten(2)
            found.append(flat.unflatten(2, (-1, h.shape[1])).permute(0, 3, 1, 2))
        return found

    return "products", products


def key_heads_in_turn(module: Any) -> tuple[str, Any]:
    """Let query head h read key head h mod n_kv_heads."""
    repeats = module.n_heads // module.n_kv_heads
    return "for_all_heads", lambda h: h.repeat(1, repeats, 1, 1)


def parts_of(module: Any, name: str) -> tuple[str, ...]:
    """Return the roles of a joined matrix: q, k and v of qkv."""
    return {"qkv": ("q", "k", "v"), "kv": ("k", "v"), "w13": ("w1", "w3")}.get(name, (name,))


def other_matrices(change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Change:
    """Return the change of the matrices of a sublayer, by role; and of their biases.

    change: role -> matrix, or role -> bias, to the same of the fault.
    """

    def change_of(module: Any) -> tuple[str, Any]:
        def matrix(name: str) -> tuple[Tensor, Tensor | None]:
            W, b = type(module).matrix(module, name)
            roles = parts_of(module, name)
            rows = dict(zip(roles, W.chunk(len(roles)), strict=True))
            biases = {} if b is None else dict(zip(roles, b.chunk(len(roles)), strict=True))
            W = torch.cat([change(rows)[role] for role in roles])
            if b is not None:
                b = torch.cat([change(biases)[role] for role in roles])
            return W, b

        return "matrix", matrix

    return change_of


def exchanged(order: Sequence[str], roles: Sequence[str]) -> Change:
    """Return the change by which a block reads the role order[i] where it must read roles[i]."""

    def change(parts: dict[str, Tensor]) -> dict[str, Tensor]:
        if not parts.keys() >= set(roles):
            return parts
        return parts | {role: parts[other] for role, other in zip(roles, order, strict=True)}

    return other_matrices(change)


def transposed(roles: Sequence[str]) -> Change:
    """Return the change that transposes the square matrices of these roles."""

    def change(parts: dict[str, Tensor]) -> dict[str, Tensor]:
        return {
            role: x.t() if role in roles and x.ndim == 2 and x.shape[0] == x.shape[1] else x
            for role, x in parts.items()
        }

    return other_matrices(change)


def packed_by_head(n_heads: int) -> Change:
    """Return the change by which the packed rows are (head, q k v), as in GPT-NeoX."""

    def change(parts: dict[str, Tensor]) -> dict[str, Tensor]:
        if parts.keys() != set(Q_K_V):
            return parts
        rows = torch.cat([parts[role] for role in Q_K_V])
        by_head = rows.unflatten(0, (n_heads, 3, -1)).transpose(0, 1).flatten(0, 2)
        return dict(zip(Q_K_V, by_head.chunk(3), strict=True))

    return other_matrices(change)
