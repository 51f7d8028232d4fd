"""A parameter that knows its role: the one place where role and start are attached to it."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

Start = Literal["matrix", "table", "zero", "one"] | float


class RoleParameter(nn.Parameter):
    """A parameter with the role(s) it plays and the way it starts.

    roles: one name, or one an equal slice of the first axis (the fused q, k, v, (3 d, d)).
    start: 'matrix' (Xavier, times the scheme's gain), 'table' (N(0, 1/d)), 'zero', 'one', a number.
    """

    roles: tuple[str, ...]
    start: Start


def parameter(*shape: int, role: str | tuple[str, ...], start: Start) -> RoleParameter:
    """A parameter of this shape, without storage yet, with its role and the way it starts."""
    roles = (role,) if isinstance(role, str) else role
    return with_storage(torch.empty(*shape, device="meta"), roles, start)


def with_storage(storage: Tensor, roles: tuple[str, ...], start: Start) -> RoleParameter:
    """The parameter whose storage is this tensor: a view of it, not a copy."""
    made = RoleParameter(storage)
    made.roles, made.start = roles, start
    return made
