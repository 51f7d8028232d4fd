"""A parameter that knows its role: the one place where role and start are attached to it."""

from __future__ import annotations

from numbers import Real
from typing import Literal, cast, get_args

import torch
from torch import Tensor, nn

from deepstack.errors import PluginError

Word = Literal["matrix", "table", "zero", "one"]
Start = Word | float
WORDS: tuple[str, ...] = get_args(Word)


class _WithRoles(type(nn.Parameter)):  # type: ignore[misc]
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, nn.Parameter) and "roles" in vars(instance)


class RoleParameter(nn.Parameter, metaclass=_WithRoles):
    """A parameter with the role(s) it plays and the way it starts.

    Any nn.Parameter that has them is one, and none is of this class: not every torch (2.6 and 2.7
    do not) compiles a layer whose parameters are of a class of their own.

    roles: one name, or one an equal slice of the first axis (the fused q, k, v, (3 d, d)).
    start: 'matrix' (Xavier, times the scheme's gain), 'table' (N(0, 1/d)), 'zero', 'one', a number.
    """

    roles: tuple[str, ...]
    start: Start


def parameter(*shape: int, role: str | tuple[str, ...], start: Start) -> RoleParameter:
    """A parameter of this shape, without storage yet, with its role and the way it starts.

    Raises PluginError for a start that is none, or a matrix that has not two axes.
    """
    known = start in WORDS if isinstance(start, str) else isinstance(start, Real)
    if not known:
        raise PluginError(
            f"parameter{shape}: found start={start!r}; allowed a number, {', '.join(WORDS)}"
        )
    if start == "matrix" and len(shape) != 2:
        raise PluginError(
            f"parameter{shape}: found start='matrix'; allowed for two axes, (n_out, n_in)"
        )
    roles = (role,) if isinstance(role, str) else role
    return with_storage(torch.empty(*shape, device="meta"), roles, start)


def with_storage(storage: Tensor, roles: tuple[str, ...], start: Start) -> RoleParameter:
    """The parameter whose storage is this tensor: a view of it, not a copy."""
    made = nn.Parameter(storage)
    vars(made).update(roles=roles, start=start)
    return cast(RoleParameter, made)
