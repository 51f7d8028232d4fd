"""Parameters with roles: the only module that attaches role and start to a parameter."""

import sys
from numbers import Real
from typing import Literal, TypeGuard, cast, get_args

import torch
from torch import Tensor, nn

from deepstack.base.errors import PluginError
from deepstack.base.registry import unknown
from deepstack.config.roles import ROLES

Word = Literal["matrix", "table", "zero", "one"]
Start = Word | float
WORDS: tuple[str, ...] = get_args(Word)


class RoleParameter(nn.Parameter):
    """The type, for annotations, of a parameter with its role(s) and the way it starts.

    No object is of this class: `has_role` tells whether an nn.Parameter has both attributes.  Not
    every torch (2.6 and 2.7 do not) compiles a layer whose parameters are of a subclass.

    roles: one name, or one an equal slice of the first axis (the fused q, k, v, (3 d, d)).
    start: 'matrix' (Xavier, times the scheme's gain), 'table' (N(0, 1/d)), 'zero', 'one', a number.
    """

    roles: tuple[str, ...]
    start: Start


def has_role(parameter: object) -> TypeGuard[RoleParameter]:
    """Return whether `parameter` or `with_storage` made this parameter."""
    return isinstance(parameter, nn.Parameter) and hasattr(parameter, "roles")


def parameter(*shape: int, role: str | tuple[str, ...], start: Start) -> RoleParameter:
    """Return a parameter of this shape, without storage yet, with its role and start.

    Raises PluginError for an unknown role or start, or a matrix without exactly two axes.
    """
    roles, problem = (role,) if isinstance(role, str) else tuple(role), ""
    if wrong := [each for each in roles if each not in ROLES]:
        problem = unknown("role", wrong[0], ROLES)
    elif start not in WORDS if isinstance(start, str) else not isinstance(start, Real):
        problem = f"found start={start!r}; allowed a number, {', '.join(WORDS)}"
    elif start == "matrix" and len(shape) != 2:
        problem = "found start='matrix'; allowed for two axes, (n_out, n_in)"
    if problem:
        caller = sys._getframe(1)
        at = f"{caller.f_code.co_filename}:{caller.f_lineno}"
        raise PluginError(f"{at}: parameter{shape}: {problem}")
    return with_storage(torch.empty(*shape, device="meta"), roles, start)


def with_storage(storage: Tensor, roles: tuple[str, ...], start: Start) -> RoleParameter:
    """Return the parameter whose storage is this tensor: a view of it, not a copy."""
    parameter = cast(RoleParameter, nn.Parameter(storage))
    parameter.roles, parameter.start = roles, start
    return parameter
