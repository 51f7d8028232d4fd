"""One fault of the reference, its constant, and the sublayers that have it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from deepstack.base import DeepstackError
from deepstack.tools.conform.compare import distance
from deepstack.tools.conform.mutations import Place
from deepstack.tools.conform.reference import Reference

STARTS = (1.0, 0.25, 4.0)


@dataclass(frozen=True)
class Hypothesis:
    """The reference with one fault.

    key: of the fault.
    text: the fault in words; {c} is its constant.
    line: file:line of the reference.
    run: (x, c) -> F.
    starts: where the fit of c begins; none: no constant.
    """

    key: str
    text: str
    line: str
    run: Callable[[Tensor, float], Tensor]
    starts: Sequence[float] = ()


def matched(one: Hypothesis, x: Tensor, found: Tensor, tolerance: float) -> tuple[bool, float]:
    """Return whether the hypothesis gives F as the block has it, and with which constant."""
    try:
        with torch.no_grad():
            if not one.starts:
                return distance(one.run(x, 1.0), found) <= tolerance, 1.0
            for start in one.starts:
                c = fitted(lambda c: one.run(x, c), found, start)
                if distance(one.run(x, c), found) <= tolerance and abs(c - 1) > 1e-7:
                    return True, c
    except (RuntimeError, TypeError, ValueError, AttributeError, DeepstackError):
        pass  # the fault is none that this scheme can have
    return False, 1.0


def fitted(run: Callable[[float], Tensor], found: Tensor, c: float) -> float:
    """Return the constant that brings run(c) next to the block's F, by Gauss and Newton.

    At the cause this converges quadratically; it ends where the distance no longer halves.
    """
    last = float("inf")
    for turn in range(25):
        step = 1e-5 * max(1.0, abs(c))
        rest = run(c) - found
        size = float(rest.norm())
        if (
            not size < 1e300
            or size <= 1e-13 * float(found.norm())
            or (turn > 3 and 2 * size > last)
        ):
            break
        slope = (run(c + step) - run(c - step)) / (2 * step)
        square = float((slope * slope).sum())
        if not square:
            break
        last, c = size, c - float((slope * rest).sum()) / square
    return c


def scopes(reference: Reference) -> Iterator[tuple[str, list[Place]]]:
    """Yield sets of sublayers in words: all, one kind, one layer."""
    N = reference.depth
    kinds = reference.stack.schemes[0].sublayers
    layers = range(1, N + 1)
    yield "", [(n, kind) for n in layers for kind in kinds]
    for kind in kinds:
        yield f" of the {kind.replace('_', '-')}", [(n, kind) for n in layers]
    if N > 1:
        yield " of the last layer", [(N, kind) for kind in kinds]
        yield " of the first layer", [(1, kind) for kind in kinds]
        yield " of all layers but the first", [(n, kind) for n in layers[1:] for kind in kinds]
        yield " of all layers but the last", [(n, kind) for n in layers[:-1] for kind in kinds]
    for kind in kinds if N > 1 else ():
        yield f" of the last layer's {kind.replace('_', '-')}", [(N, kind)]
        yield f" of the first layer's {kind.replace('_', '-')}", [(1, kind)]


def inside_of(
    reference: Reference, context: Callable[[float], AbstractContextManager[None]]
) -> Callable[[Tensor, float], Tensor]:
    """Return (x, c) -> F of the reference in a context."""

    def run(x: Tensor, c: float) -> Tensor:
        with context(c):
            return reference.run(x)

    return run
