"""Sizes and strides of operands, joined and ordered as the kernels expect them.

Every function raises `UntranslatableError` for operands that its kernel does not take.  The results
depend on shapes alone and are kept: the layers of a stack repeat them.
"""

import math
from functools import lru_cache

from deepstack.fast.native.record import LARGEST

Shape = tuple[int, ...]
DIMENSIONS = 5


class UntranslatableError(Exception):
    """No kernel computes this operation on these operands."""


def need(condition: bool) -> None:
    """Raise UntranslatableError unless the condition holds."""
    if not condition:
        raise UntranslatableError


def expand(size: Shape, stride: Shape, to: Shape) -> Shape:
    """Return the strides of an operand broadcast to a size."""
    need(len(size) <= len(to))
    strides = [0] * (len(to) - len(size))
    for n, s, m in zip(size, stride, to[len(strides) :], strict=True):
        need(n in (1, m))
        strides.append(0 if n == 1 else s)
    return tuple(strides)


def join(dimensions: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Join neighbouring dimensions, (size, strides …), that all operands walk through evenly."""
    joined: list[tuple[int, ...]] = []
    for size, *strides in dimensions:
        if size == 1:
            continue
        if joined:
            last, *outer = joined[-1]
            if all(a == b * size for a, b in zip(outer, strides, strict=True)):
                joined[-1] = (last * size, *strides)
                continue
        joined.append((size, *strides))
    return joined


@lru_cache(maxsize=4096)
def elementwise(
    size: Shape, stride: Shape, operands: tuple[tuple[Shape, Shape], ...]
) -> tuple[int, Shape]:
    """Return dimensions and integers of an elementwise record; 0 dimensions if nothing is left."""
    if 0 in size:
        return 0, ()
    strides = [stride, *(expand(*operand, size) for operand in operands)]
    dimensions = [d for d in zip(size, *strides, strict=True) if d[0] != 1]
    need(all(d[1] > 0 for d in dimensions))
    dimensions = join(sorted(dimensions, key=lambda d: -d[1])) or [(1, *(1 for _ in strides))]
    need(len(dimensions) <= DIMENSIONS)
    columns = list(zip(*dimensions, strict=True))
    padding = (0,) * (DIMENSIONS - len(dimensions))
    return len(dimensions), tuple(n for column in columns for n in (*column, *padding))


@lru_cache(maxsize=4096)
def reduction(
    size: Shape, stride: Shape, dims: Shape, out_size: Shape, out_stride: Shape
) -> tuple[Shape, int]:
    """Return the integers of a reduction's record, and how many numbers each result reads."""
    reduced = {d % len(size) for d in dims} if size else set()
    need(0 not in size)
    if len(out_size) == len(size):
        outer = out_stride
    else:
        need(len(out_size) == len(size) - len(reduced))
        rest = iter(out_stride)
        outer = tuple(0 if d in reduced else next(rest) for d in range(len(size)))
    kept = [(size[d], outer[d], stride[d]) for d in range(len(size)) if d not in reduced]
    away = [(size[d], stride[d]) for d in range(len(size)) if d in reduced]
    kept = join(sorted(kept, key=lambda d: -d[1]))  # type: ignore[assignment]
    away = join(sorted(away, key=lambda d: -d[1]))  # type: ignore[assignment]
    need(len(kept) <= 2 and len(away) <= 2 and all(d[1] > 0 for d in kept))
    kept = [(1, 0, 0)] * (2 - len(kept)) + kept
    away = [(1, 0)] * (2 - len(away)) + away
    integers = (
        *(d[0] for d in kept), *(d[0] for d in away), *(d[2] for d in kept),
        *(d[1] for d in away), *(d[1] for d in kept),
    )  # fmt: skip
    return integers, math.prod(size[d] for d in reduced)


@lru_cache(maxsize=4096)
def rows(size: Shape, *strides: Shape) -> Shape:
    """Return rows, their width, three sizes and three strides of each operand; the last is 1."""
    need(len(size) > 0 and 0 not in size and all(s[-1] == 1 or size[-1] == 1 for s in strides))
    outer = join(list(zip(size[:-1], *(s[:-1] for s in strides), strict=True)))
    need(len(outer) <= 3)
    outer = [(1, *(0 for _ in strides))] * (3 - len(outer)) + outer
    columns = list(zip(*outer, strict=True))
    return (math.prod(size[:-1]), size[-1], *(n for column in columns for n in column))


@lru_cache(maxsize=4096)
def around(size: Shape, stride: Shape, dim: int) -> Shape:
    """Return outer, own and inner size around a dimension, and the three strides."""
    need(len(size) > 0 and 0 not in size)
    dim %= len(size)
    parts = [
        join(list(zip(size[part], stride[part], strict=True)))
        for part in (slice(None, dim), slice(dim + 1, None))
    ]
    need(all(len(part) <= 1 for part in parts))
    (outer, a), (inner, b) = (part[0] if part else (1, 0) for part in parts)
    return outer, size[dim], inner, a, stride[dim], b


def is_contiguous(size: Shape, stride: Shape) -> bool:
    """Return whether elements lie side by side in order."""
    step = 1
    for n, s in zip(reversed(size), reversed(stride), strict=True):
        if n != 1 and s != step:
            return False
        step *= n
    return True


def extent(size: Shape, stride: Shape) -> int:
    """Return how many elements of memory an operand spans from its first element on."""
    if 0 in size:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))


def fits(size: Shape, stride: Shape) -> bool:
    """Return whether a record's 32-bit integers hold sizes, strides and what they span."""
    return all(0 <= s <= LARGEST for s in stride) and extent(size, stride) <= LARGEST
