"""Gradients written where a step sets them to zero and then adds to them.

Where all that was set to zero is added to before it is read, the sums can be written there at once:
a narrow stack writes and reads its gradients once less, a fiftieth of its step.  0 + x has the bits
of x unless x is -0, which `adds_nothing` sees to.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections import Counter
from collections.abc import Collection, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from deepstack.fast.probe_fusion import equal_bits
from deepstack.fast.recording import Call, Shape, TensorRef, shapes_of

aten = torch.ops.aten

ZERO = aten._foreach_zero_.default
# What makes the sums that are added, of floating-point tensors alone.
SUMS = (aten.sum.dim_IntList, aten.native_layer_norm_backward.default)
# Of larger matrices it does not matter how often they are written.
LARGEST = 2**20


class Sum(NamedTuple):
    """A call, by number, that adds to a place what it or an earlier one makes as a result."""

    adder: int
    place: TensorRef
    maker: int
    result: int


class Zeroed:
    """A storage after it was set to zero: by which call, and what was added to it since.

    spans: where sums were added, first numbers and those after the last, in order.
    """

    def __init__(self, index: int, place: TensorRef) -> None:
        self.index, self.place = index, place
        self.sums: list[Sum] = []
        self.spans: list[tuple[int, int]] = []

    def takes(self, found: Sum) -> bool:
        """Keep a sum, if nothing else was added there."""
        first, end = span(found.place)
        at = bisect(self.spans, (first, end))
        before, after = self.spans[at - 1 : at] if at else [], self.spans[at : at + 1]
        if any(other > first for _, other in before) or any(other < end for other, _ in after):
            return False
        self.spans.insert(at, (first, end))
        self.sums.append(found)
        return True

    def has(self, place: TensorRef) -> bool:
        """Whether a place lies where one sum was added."""
        first, end = span(place)
        at = bisect(self.spans, (first, math.inf))
        return at > 0 and end <= self.spans[at - 1][1]

    def rest(self) -> list[TensorRef] | None:
        """What nothing was added to: nothing, or as much of every row; None for anything else."""
        ends = [0, *(end for _, end in self.spans)]
        starts = [*(first for first, _ in self.spans), math.prod(self.place.size)]
        gaps = [(a, b) for a, b in zip(ends, starts, strict=True) if b > a]
        if not gaps:
            return []
        first, width = gaps[0][0], gaps[0][1] - gaps[0][0]
        every = gaps[1][0] - first if len(gaps) > 1 else width
        if gaps != [(first + i * every, first + i * every + width) for i in range(len(gaps))]:
            return None
        return [self.place._replace(offset=first, size=(len(gaps), width), stride=(every, 1))]


def written_at_once(
    calls: Sequence[Call], sizes: Sequence[int], before: Collection[int], kept: Collection[int]
) -> list[Call]:
    """The calls, with sums written where they were added to zero.

    sizes: bytes of each storage.  before: those that were there before the step.  kept: those that
    are read after it.
    """
    users = Counter(number for call in calls for number in call.used if number not in before)
    makers = {p.number: (i, n) for i, call in enumerate(calls) for n, p in call.results.items()}

    def sum_of(index: int, call: Call) -> Sum | None:
        """What may be written where the call adds it."""
        to, *added = call.args
        if call.operation is aten.addmm_.default:
            return Sum(index, to, index, 0) if adds_nothing(aten.mm.default, added) else None
        [what] = added
        if not isinstance(what, TensorRef) or what.number not in makers:
            return None
        maker, result = makers[what.number]
        made = calls[maker].results[result]
        alone = users[what.number] == 2 and what.number not in kept
        kinds = {(math.prod(p.size), p.dtype) for p in (to, what, made)}
        if not (alone and len(kinds) == 1 and dense(made) and dense(what)):
            return None
        if calls[maker].operation not in SUMS or not adds_nothing(*calls[maker][:2]):
            return None
        return Sum(index, to, maker, result)

    zeroed: dict[int, Zeroed] = {}
    ended: list[Zeroed] = []
    for index, call in enumerate(calls):
        for number in call.used & zeroed.keys():
            if adds(call, number) and (
                zeroed[number].has(call.args[0])
                or ((found := sum_of(index, call)) and zeroed[number].takes(found))
            ):
                continue
            ended.append(zeroed.pop(number))
        if call.operation is ZERO:
            for place in filter(dense, call.args[0]):
                if math.prod(place.size) * place.dtype.itemsize == sizes[place.number]:
                    zeroed[place.number] = Zeroed(index, place)
    return rewritten(calls, [*ended, *zeroed.values()])


def adds(call: Call, number: int) -> bool:
    """Whether all that a call does with a storage is to add, once, to a dense part of it."""
    if call.operation not in (aten.add_.Tensor, aten.addmm_.default) or call.kwargs:
        return False
    to, *others = call.args
    elsewhere = all(p.number != number for p in others if isinstance(p, TensorRef))
    return to.number == number and elsewhere and dense(to)


def rewritten(calls: Sequence[Call], zeroed: Sequence[Zeroed]) -> list[Call]:
    """The calls, where of what was set to zero only the rest is, and sums are written."""
    new: dict[int, Call | None] = {}
    for one in zeroed:
        rest = one.rest()
        if not one.sums or rest is None:
            continue
        zeroing = new.get(one.index) or calls[one.index]
        left = [place for place in zeroing.args[0] if place.number != one.place.number]
        new[one.index] = zeroing._replace(args=([*left, *rest],))
        for adder, place, maker, result in one.sums:
            call = new.get(maker) or calls[maker]
            if adder == maker:
                new[adder] = Call(aten.mm.default, call.args[1:], {}, {0: place}, call.used)
                continue
            made = call.results[result]
            there = made._replace(number=place.number, offset=place.offset)
            used = call.used - {made.number} | {place.number}
            new[maker] = call._replace(results=call.results | {result: there}, used=used)
            new[adder] = None
    found = [new.get(index, call) for index, call in enumerate(calls)]
    return [c for c in found if c is not None and (c.operation is not ZERO or c.args != ([],))]


def dense(place: TensorRef) -> bool:
    """Whether its numbers lie one after the other, the last axis first."""
    expected, strides = 1, []
    for size in reversed(place.size):
        strides.append(expected)
        expected *= size
    pairs = zip(place.size, place.stride, reversed(strides), strict=True)
    return all(size == 1 or one == other for size, one, other in pairs)


def span(place: TensorRef) -> tuple[int, int]:
    """The first number of a dense place in its storage, and the one after its last."""
    return place.offset, place.offset + math.prod(place.size)


def adds_nothing(operation: Any, args: Sequence[Any]) -> bool:
    """Whether 0 + x has the bits of x, x what a product or a sum of such tensors gives.

    So it has unless x is -0, which kernels that begin their sums at 0 never give.  Tried on random
    numbers, and where every summand is -0.
    """
    return _tried(operation, shapes_of(args))


@cache
def _tried(operation: Any, args: tuple[Any, ...]) -> bool:
    shapes = [arg for arg in args if isinstance(arg, Shape)]
    if any(
        s.dtype != torch.float32 or math.prod(s.size) > LARGEST or 0 in s.stride for s in shapes
    ):
        return False
    random = torch.Generator().manual_seed(0)
    constants = [[0.0] * len(shapes), [-0.0] * len(shapes)]
    constants += [
        [0.0 if i == zero else -1.0 for i in range(len(shapes))] for zero in range(len(shapes))
    ]
    for values in [None, *constants]:
        tensors = [torch.empty_strided(s.size, s.stride) for s in shapes]
        for index, tensor in enumerate(tensors):
            tensor.normal_(generator=random) if values is None else tensor.fill_(values[index])
        left = iter(tensors)
        found = operation(*(next(left) if isinstance(arg, Shape) else arg for arg in args))
        for x in found if isinstance(found, (list, tuple)) else (found,):
            if x is None:  # not asked for
                continue
            sums = [torch.zeros_like(x).add_(x)]
            if operation is aten.mm.default:
                sums.append(torch.zeros_like(x).addmm_(*tensors))
            if not all(equal_bits(x, s) for s in sums):
                return False
    return True
