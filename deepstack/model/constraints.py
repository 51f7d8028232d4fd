"""Matrices that a scheme keeps somewhere, on a sphere say: put back there all layers at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from torch import Tensor

from deepstack import config as conf
from deepstack.errors import PluginError
from deepstack.model.transformer import places
from deepstack.parameters import Bank
from deepstack.schemes import find_scheme, with_options, written

Constraint = Callable[[Iterable[Bank]], None]


def constraint_of(model: conf.Model) -> Constraint | None:
    """What changes the matrices among some banks as `Scheme.project` says; None where it does not.

    Matrices are those parameters of the layers that start as such: q, k, v, o, w1, w2, w3, those of
    a cross-attention, and a scheme's own.
    """
    scheme, options = find_scheme(model.scheme, model.scheme_options)
    if not scheme.constrains:
        return None

    def changing(ask: Callable[..., object], role: str, matrices: Tensor) -> None:
        if ask(role, matrices) is not None:
            raise PluginError(
                f"{written(scheme, 'project')}project gave something; it changes the matrices in "
                "place, matrices.copy_(…), and returns nothing"
            )

    of_stack = {
        side: partial(changing, with_options(scheme.project, options | {"place": place}))
        for side, place in places(model).items()
    }

    def project(banks: Iterable[Bank]) -> None:
        for bank in banks:
            if bank.stack is not None and bank.start == "matrix":
                bank.change(of_stack[bank.stack])

    return project
