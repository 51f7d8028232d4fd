"""The probe's rows in the forward pass of the next step's batch.

What the probe measures after step t and what step t+1 begins with are the same model on other rows:
the same operations, of which a narrow layer's take as long for a quarter of the rows as for all.
`joined` finds the operations that a recorded step and its probe have in common, and for each one
that does both at once: the probe's results lie right behind the batch's in memory, so that they are
one tensor of more rows, of which the backward pass reads the first ones as before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepstack.fast.recording import Call, TensorRef, numbers_in, refs_in

# Results begin at multiples of this many bytes, as torch's own allocations do.
ALIGNMENT = 64
# Numbers that a kernel of one number at a time takes at once, at the most; what is left over at the
# end is computed otherwise, and in several threads the end of each one's part is.
AT_ONCE, BY_A_THREAD = 64, 2**15
# How many of the batch's operations may stand between two that it shares with the probe.
NEAR = 16


class Pair(NamedTuple):
    """An operation on the batch, the same one on the probe, and one on the rows of both."""

    batch: Call
    probe: Call
    both: Call


class Joint(NamedTuple):
    """A step that measures, on its way, what the step before it has left to measure.

    order: its calls; a Pair may be carried out as one call or as two.  within: number of a result
    of the probe -> the batch's result with which it shares memory, and its offset from it in bytes:
    right behind it, or 0 where both are the same, made of parameters alone.
    """

    order: list[Call | Pair]
    within: dict[int, tuple[int, int]]


def joined(
    step: Sequence[Call], probe: Sequence[Call], sizes: Sequence[int], before: frozenset[int]
) -> Joint | None:
    """The step with the probe of the step before, or None where that would not do or not pay.

    The probe must draw no random numbers: they would come in another order.

    sizes: bytes of each storage.  before: those that were there before the step, its inputs too.
    It does not pay where the two share less than half of the probe's operations, or where the
    probe has more rows than the batch: they take memory as long as the batch's do.
    """
    joining = _Joining(sizes, before, changed([*step, *probe]))
    found: dict[int, list[Call | Pair]] = {}  # by position in the step: what is done instead
    alone: list[Call | Pair] = []
    ahead = shared = 0
    for call in probe:
        for index in range(ahead, min(ahead + NEAR, len(step))):
            if (instead := joining.pair(step[index], call)) is not None:
                found[index] = [*alone, *instead]
                ahead, alone = index + 1, []
                shared += len(instead) == 1
                break
        else:
            alone.append(call)
    behind = {number: front for number, (front, offset) in joining.within.items() if offset}
    longer = sum(sizes[n] for n in behind) > sum(sizes[front] for front in behind.values())
    if 2 * shared <= len(probe) or longer or not independent(step[:ahead], probe, before):
        return None
    found[ahead - 1] += alone
    order = [done for index, call in enumerate(step) for done in found.get(index, [call])]
    return Joint(order, joining.within)


def independent(step: Sequence[Call], probe: Sequence[Call], before: frozenset[int]) -> bool:
    """Whether the probe may be carried out among these calls of the next step instead of ahead.

    Nothing that it reads was made or is changed by the step, and nothing that it changes is read.
    """
    used = {number for call in probe for number in call.used}
    made, made_before = (
        {place.number for call in calls for place in call.results.values()}
        for calls in (probe, step)
    )
    return (
        used - before <= made
        and not (changed(step) | made_before) & used & before
        and not changed(probe) & before & {number for call in step for number in call.used}
    )


def changed(calls: Iterable[Call]) -> set[int]:
    """The numbers of what the calls write into, besides what they make."""
    return {number for call in calls for number in numbers_in(list(written(call)))}


def written(call: Call) -> list[Any]:
    """The arguments of a call that it writes into."""
    schema = call.operation._schema
    if not schema.is_mutable:
        return []
    values = dict(zip((a.name for a in schema.arguments), call.args, strict=False)) | call.kwargs
    changes = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
    return [values[name] for name in changes if name in values]


class _Joining:
    """What is known of the probe's results while pairs are looked for."""

    def __init__(self, sizes: Sequence[int], before: frozenset[int], changing: set[int]) -> None:
        self.sizes, self.before, self.changing = sizes, before, changing
        self.within: dict[int, tuple[int, int]] = {}
        self.taken: set[int] = set()

    def pair(self, batch: Call, probe: Call) -> list[Call | Pair] | None:
        """What to do instead of the two calls, or None where they are not the same operation.

        One call, where both read the same; the two, where their inputs do not lie side by side but
        their results can; else a Pair.
        """
        if batch.operation is not probe.operation or batch.kwargs.keys() != probe.kwargs.keys():
            return None
        if batch.results.keys() != probe.results.keys():
            return None
        self.rows = self.apart = False  # what `both` finds in the arguments
        try:
            args = self.both(batch.args, probe.args)
            kwargs = {n: self.both(v, probe.kwargs[n]) for n, v in batch.kwargs.items()}
        except _Differs:
            return None
        places = [(place, probe.results[index]) for index, place in batch.results.items()]
        if any(p.number in self.taken or p.number in self.before for p, _ in places):
            return None
        if not (self.rows or self.apart):
            return [batch] if self.shared(batch, places) else None
        # a first result must begin where torch's own would, which products may depend on
        aligned = all(self.sizes[place.number] % ALIGNMENT == 0 for place, _ in places[:1])
        if not aligned or not all(self.fills(*pair) for pair in places):
            return None
        self._take({other.number: (p.number, self.sizes[p.number]) for p, other in places})
        if self.apart or not in_whole_vectors([batch, probe]):
            return [batch, probe]
        results = {i: rows_of_both(p, probe.results[i]) for i, p in batch.results.items()}
        used = batch.used | probe.used
        return [Pair(batch, probe, Call(batch.operation, args, kwargs, results, used))]

    def shared(self, call: Call, places: Sequence[tuple[TensorRef, TensorRef]]) -> bool:
        """Take what the call makes for the probe's as well, where that may be done."""
        equal = all(fits(one, other) and one.size == other.size for one, other in places)
        still = all({a.number, b.number}.isdisjoint(self.changing) for a, b in places)
        if not (places and equal and still) or call.operation._schema.is_mutable:
            return False
        self._take({other.number: (place.number, 0) for place, other in places})
        return True

    def _take(self, within: dict[int, tuple[int, int]]) -> None:
        self.within |= within
        self.taken |= {number for number, _ in within.values()}

    def both(self, one: Any, other: Any) -> Any:
        """The argument of one call that stands for two; raises _Differs where there is none."""
        if isinstance(one, TensorRef) and isinstance(other, TensorRef):
            return self.both_places(one, other)
        if type(one) is not type(other):
            raise _Differs
        if isinstance(one, (list, tuple)):
            if len(one) != len(other):
                raise _Differs
            return type(one)([self.both(a, b) for a, b in zip(one, other, strict=True)])
        if one != other:
            raise _Differs
        return one

    def both_places(self, one: TensorRef, other: TensorRef) -> TensorRef:
        """One place where it is the same, or the rows of both."""
        number, offset = self.within.get(other.number, (other.number, 0))
        if number == one.number and offset == 0 and other._replace(number=number) == one:
            return one
        if {one.number, other.number} <= self.before and fits(one, other):
            self.apart = True
            return one
        if number == one.number and offset and self.fills(one, other):
            self.rows = True
            return rows_of_both(one, other)
        raise _Differs

    def fills(self, one: TensorRef, other: TensorRef) -> bool:
        """Whether the rows of the second would go on where those of the first end."""
        return fits(one, other) and all(
            place.size[:1] and place.size[0] * place.stride[0] * place.dtype.itemsize
            == self.sizes[place.number]
            for place in (one, other)
        )  # fmt: skip


def in_whole_vectors(calls: Sequence[Call]) -> bool:
    """Whether no number of an operation on each by itself comes at the end of others, where it is
    computed otherwise than amid them: the rows of both would have another end."""
    if torch.Tag.pointwise not in calls[0].operation.tags:
        return True
    sizes = [max(map(numel, refs_in([c.args, *c.results.values()])), default=0) for c in calls]
    alone = torch.get_num_threads() == 1 or sum(sizes) < BY_A_THREAD
    return alone and all(size % AT_ONCE == 0 for size in sizes)


def numel(place: TensorRef) -> int:
    """How many numbers a place holds."""
    return math.prod(place.size)


class _Differs(Exception):
    """Two calls that no one call can stand for."""


def fits(one: TensorRef, other: TensorRef) -> bool:
    """Whether two places differ in nothing but the number of rows."""
    return (
        one.offset == other.offset
        and one.size[1:] == other.size[1:]
        and one.stride == other.stride
        and one.dtype == other.dtype
    )


def rows_of_both(one: TensorRef, other: TensorRef) -> TensorRef:
    """The rows of one place and, right behind them, those of the other."""
    return one._replace(size=(one.size[0] + other.size[0], *one.size[1:]))


Operation = tuple[Callable[..., Any], Any, dict[str, Any]]
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Either(NamedTuple):
    """A Pair ready to be carried out.

    kind: what kernels are chosen by: the operations, shapes and numbers that they are given.
    trial: gives the results for both rows as new tensors.  inputs: what it reads of the step's own
    tensors, or writes into.  results: where the results for both rows belong.
    """

    kind: Any
    batch: Operation
    probe: Operation
    both: Operation
    trial: Callable[[], list[Tensor]]
    inputs: list[Tensor]
    results: list[Tensor]


def alike(either: Either, random: torch.Generator) -> bool:
    """Whether the operation on the rows of both gives the bits of the two.

    Compared on random numbers in the place of what is there, which is put back.
    """
    inputs = either.inputs
    held = [tensor.clone() for tensor in inputs]
    for tensor in inputs:
        if tensor.is_floating_point():
            tensor.normal_(generator=random)
    given = [tensor.clone() for tensor in inputs]
    for operation, args, kwargs in (either.batch, either.probe):
        operation(*args, **kwargs)
    expected = [tensor.clone() for tensor in (*either.results, *inputs)]
    put_back(inputs, given)
    try:
        same = all(map(equal_bits, expected, [*either.trial(), *inputs]))
    except RuntimeError:  # it cannot be done to other rows
        same = False
    put_back(inputs, held)
    return same


def put_back(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Give tensors their values again."""
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)


def equal_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are alike to the last bit, NaNs too."""
    word = WORDS[one.dtype.itemsize]
    return one.dtype == other.dtype and torch.equal(one.view(word), other.view(word))
