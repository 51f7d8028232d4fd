"""A whole training step on a CPU as a list of operations: recorded once, then made again and again.

A narrow layer's operations take a few microseconds each, and what surrounds them as much: autograd
builds a graph and walks it, tensors are allocated, views of them made, Python runs layer by layer.
None of it differs from step to step.  `replaying` makes a step once under a recorder that notes
every operation torch carries out, forward, backward, optimizer and probe, then gives each result a
place in one block of memory and makes the same operations from there: the same kernels on the same
numbers in the same order, so that every number is the same, bit for bit.  It is to a CPU what a
CUDA graph is to a GPU, and what may be captured (`capture`) may be replayed.

Knowing all operations of a step, it makes fewer of them where the bits stay the same: the probe's
rows pass through the layers with the next step's batch (`joint`), and gradients are written where
they were set to zero and added (`gradients`).
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepstack.fast.gradient_writes import written_at_once
from deepstack.fast.out_variants import callable_of
from deepstack.fast.probe_fusion import ALIGNMENT, Either, Operation, Pair, alike, joined
from deepstack.fast.recording import (
    Call,
    Recording,
    TensorRef,
    converted,
    numbers_in,
    refs_in,
    shapes_of,
)
from deepstack.fast.step import Made, Measured, Probe, Update, probed, weakly
from deepstack.gc_control import gc_paused

aten = torch.ops.aten

# Steps made as they are before one is recorded: the optimizer makes its state.
WARM_UP = 1
WORTH_SAYING = 2.0  # seconds of recording
# What only gives memory, with whatever is in it.
UNFILLED = (aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default,
            aten.new_empty.default, aten.new_empty_strided.default)  # fmt: skip
# Operations with a number: their own forms that write compute elsewhere and copy, while torch's
# functions take a number where these take a tensor.
WITH_NUMBER = {packet.Scalar: packet.out for packet in (aten.div, aten.mul)}


def replaying(
    update: Update,
    probe: Probe | None,
    said: Callable[[str], None],
    *,
    joint: bool = True,
) -> Made:
    """The update and the probe after it; the fourth and later calls replay the third's operations.

    The second call is recorded as well: where the two have not done the same, something in the
    update changes from step to step (a number of Python's, say), and every step is made as it is.
    So it is where the update reads a value.  `said` is told either, and how long recording took.

    Inputs and targets are copied into tensors of the recording's own; what it returns are its own
    tensors too, overwritten by the next call.  Learning rates must be tensors, changed in place.
    Batches of another shape are made as they are.

    joint: whether the probe may be measured with the next call (`Measured.settle`), which must be
    False where anything that the model reads changes between two calls.
    """
    return _Replayed(update, probe, said, joint)


class _Replayed:
    def __init__(
        self,
        update: Update,
        probe: Probe | None,
        said: Callable[[str], None],
        joint: bool,
    ) -> None:
        self.update, self.probe, self.said, self.may_join = update, probe, said, joint
        self.whole = probed(update, probe)
        self.calls, self.seconds = 0, 0.0
        self.recorded: Recording | None = None
        self.bound: Bound | None = None
        self.joins = False  # whether a step can measure what the one before has left to it
        self.joint: list[Operation] | None = None  # how, as it was decided the first time
        self.refused = False
        self.late = False  # whether the probe of the last call is still to be measured

    def __call__(self, inputs: Tensor, targets: Tensor) -> Measured:
        self.calls += 1
        if self.calls <= WARM_UP or self.refused:
            return self.whole(inputs, targets)
        if self.calls == WARM_UP + 1:
            self.inputs, self.targets = inputs.clone(), targets.clone()
        if (inputs.shape, targets.shape) != (self.inputs.shape, self.targets.shape):
            self.settle()
            return self.whole(inputs, targets)
        self.inputs.copy_(inputs)
        self.targets.copy_(targets)
        if self.bound is None:
            with gc_paused():
                return self.record()
        with torch.inference_mode(), gc_paused():
            if not self.late:
                carry_out(self.bound.step)
            elif self.joint is None:
                self.joint = decided(self.bound.joint)
                self.bound = self.bound._replace(joint=[])
            else:
                carry_out(self.joint)
        self.late = True
        if not self.joins:
            self.settle()
        return self.measured

    def settle(self) -> None:
        """Measure what was left to the next call."""
        if self.late:
            assert self.bound is not None
            with torch.inference_mode(), gc_paused():
                carry_out(self.bound.probe)
            self.late = False

    def refuse(self, why: str) -> None:
        """From now on make every step as it is."""
        self.settle()
        self.refused, self.recorded, self.bound, self.joint = True, None, None, None
        self.said(f"a step cannot be replayed: {why}")

    def record(self) -> Measured:
        """Make a step, and note what it does; the second time, get ready to replay it."""
        began = time.perf_counter()
        with Recording(self.recorded) as recording:
            measured = self.update(self.inputs, self.targets)
            recording.divide()
            if self.probe is not None:
                measured = measured._replace(probe=self.probe())
        recording.end(tuple(measured[:4]))
        before, self.recorded = self.recorded, recording
        if before is not None and not recording.refused and recording != before:
            recording.refused = "it does not do the same at every step"
        if recording.refused:
            self.refuse(recording.refused)
        elif before is not None:
            self.recorded = None
            with torch.inference_mode():
                self.bound = bound(recording, self.may_join)
            trim_memory()
            self.joins = bool(self.bound.joint)
            settle = weakly(self.settle) if self.joins else None
            self.measured = Measured(*self.bound.made)._replace(settle=settle)
        self.seconds += time.perf_counter() - began
        if self.bound and self.seconds >= WORTH_SAYING:
            count = len(self.bound.step) + len(self.bound.probe)
            self.said(f"recorded a step, {count} operations, in {self.seconds:.1f} s")
        return measured


def carry_out(operations: Sequence[Operation]) -> None:
    """Call them one after the other."""
    for operation, args, kwargs in operations:
        operation(*args, **kwargs)


def decided(operations: Sequence[Operation | Either]) -> list[Operation]:
    """Carry them out, and return them with one form for all of which there are two."""
    random = torch.Generator().manual_seed(0)
    known: dict[Any, bool] = {}
    found: list[Operation] = []
    for operation in operations:
        if not isinstance(operation, Either):
            chosen = [operation]
        else:
            if operation.kind not in known:
                known[operation.kind] = alike(operation, random)
            one = known[operation.kind]
            chosen = [operation.both] if one else [operation.batch, operation.probe]
        carry_out(chosen)
        found += chosen
    return found


class Bound(NamedTuple):
    """A recording with tensors for TensorRefs: the operations of the step, those of the probe, and,
    where there is such a thing, those of a step with the probe of the one before; what is made."""

    step: list[Operation]
    probe: list[Operation]
    joint: list[Operation | Either]
    made: Any


def bound(recording: Recording, may_join: bool = True) -> Bound:
    """The operations of a recording on one block of memory."""
    before = frozenset(recording.before)
    step, probe = (
        [call for call in calls if call.operation not in UNFILLED]
        for calls in (recording.calls[: recording.divided], recording.calls[recording.divided :])
    )
    kept = set(numbers_in(recording.made)) - before
    step = written_at_once(step, recording.sizes, before, kept)
    may_join = may_join and not recording.drawn
    joint = joined(step, probe, recording.sizes, before) if may_join else None
    order = joint.order if joint else step + probe
    used = [call.both.used if isinstance(call, Pair) else call.used for call in order]
    offsets, total = layout(
        [numbers - before for numbers in used], recording.sizes, kept, joint.within if joint else {}
    )
    memory = torch.empty(total, dtype=torch.uint8).untyped_storage()
    made: dict[TensorRef, Tensor] = {}

    def tensor(place: TensorRef) -> Tensor:
        if place not in made:
            storage = recording.before.get(place.number, memory)
            first = offsets.get(place.number, 0) // place.dtype.itemsize + place.offset
            found = torch.empty(0, dtype=place.dtype)
            made[place] = found.set_(storage, first, place.size, place.stride)
        return made[place]

    ready: dict[int, Operation] = {}  # by the call's identity: equal ones may be one object

    def operation(call: Call) -> Operation:
        if id(call) not in ready:
            ready[id(call)] = callable_of(call, tensor)
        return ready[id(call)]

    def either(pair: Pair) -> Either:
        both = pair.both
        args, kwargs = converted([both.args, both.kwargs], tensor, TensorRef)

        def trial() -> list[Tensor]:
            found = both.operation(*args, **kwargs)
            return [found[index] if isinstance(found, (list, tuple)) else found for index in places]

        places = both.results
        inputs = [p for p in refs_in([both.args, both.kwargs]) if p.number not in before]
        calls = [(c.operation, c.args, tuple(c.kwargs.items())) for c in pair]
        return Either(
            shapes_of(calls),
            operation(pair.batch),
            operation(pair.probe),
            operation(both),
            trial,
            [tensor(place) for place in inputs],
            [tensor(place) for place in places.values()],
        )

    return Bound(
        [operation(call) for call in step],
        [operation(call) for call in probe],
        [either(c) if isinstance(c, Pair) else operation(c) for c in joint.order] if joint else [],
        converted(recording.made, tensor, TensorRef),
    )


def layout(
    used: Sequence[frozenset[int]],
    sizes: Sequence[int],
    kept: set[int],
    within: Mapping[int, tuple[int, int]] | None = None,
) -> tuple[dict[int, int], int]:
    """Offsets of results in one block of memory, and its size, in bytes.

    used: which results each call touches, from the first time to the last, between which their
    memory is theirs alone; that of kept ones always is.  sizes: bytes by number.  within: number
    -> another result, with which it shares its memory, and its offset from that one.
    """
    within = within or {}
    room = dict(enumerate(sizes))
    for number, (owner, offset) in within.items():
        room[owner] = max(room[owner], offset + sizes[number])
    owners = {number: owner for number, (owner, _) in within.items()}
    used = [frozenset(owners.get(n, n) for n in numbers) for numbers in used]
    kept = {owners.get(number, number) for number in kept}
    last = {number: index for index, numbers in enumerate(used) for number in numbers}
    last |= dict.fromkeys(kept, len(used))
    offsets: dict[int, int] = {}
    free: dict[int, list[int]] = {}  # by size, which few results do not share with another one
    total = 0
    for index, numbers in enumerate([frozenset(kept), *used], -1):
        for number in sorted(n for n in numbers if n not in offsets):
            size = padded(room[number])
            if free.get(size):
                offsets[number] = free[size].pop()
            else:
                offsets[number] = total
                total += size
        for number in sorted(numbers):
            if last[number] == index:
                free.setdefault(padded(room[number]), []).append(offsets[number])
    offsets |= {number: offsets[owner] + offset for number, (owner, offset) in within.items()}
    return offsets, total


def padded(size: int) -> int:
    """Bytes that a result takes in the block."""
    return -(-max(size, 1) // ALIGNMENT) * ALIGNMENT


def trim_memory() -> None:
    """Give memory that was freed back to the system, where the C library can be asked to.

    The recorded step's results were freed one by one, and what operations were tried on; the block
    for them all is a new one.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
