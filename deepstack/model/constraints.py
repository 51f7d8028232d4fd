"""A scheme's constraint on its matrices, such as unit norm, applied to all layers at once."""

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
    """Return a function that applies `Scheme.project` to the matrices among some banks, or None.

    Matrices are the parameters of layers with start 'matrix': q, k, v, o, w1, w2, w3, those of a
    cross-attention, and a scheme's own.  None: the scheme has no constraint.
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
