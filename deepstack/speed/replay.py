"""A whole training step on a CPU as a list of operations: recorded once, then made again and again.

A narrow layer's operations take a few microseconds each, and what surrounds them as much: autograd
builds a graph and walks it, tensors are allocated, views of them made, Python runs layer by layer.
None of it differs from step to step.  `replaying` makes a step once under a recorder that notes
every operation torch carries out, forward, backward, optimizer and probe, then gives each result a
place in one block of memory and makes the same operations from there: the same kernels on the same
numbers in the same order, so that every number is the same, bit for bit.  It is to a CPU what a
CUDA graph is to a GPU, and what may be captured (`capture`) may be replayed.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from deepstack.speed.step import Measured, Update, collector_paused

aten = torch.ops.aten

# Steps made as they are before one is recorded: the optimizer makes its state.
WARM_UP = 1
# Results begin at multiples of this many bytes, as torch's own allocations do.
ALIGNMENT = 64

# torch's functions in Python take a microsecond less to call than the operations they stand for.
SHORT: dict[Any, Callable[..., Any]] = {
    aten.add.out: torch.add,
    aten.add_.Tensor: Tensor.add_,
    aten.addmm.out: torch.addmm,
    aten.addmm_.default: Tensor.addmm_,
    aten.bmm.out: torch.bmm,
    aten.cat.out: torch.cat,
    aten.copy_.default: Tensor.copy_,
    aten.mm.out: torch.mm,
    aten.mul.out: torch.mul,
    aten.mul_.Tensor: Tensor.mul_,
    aten.relu_.default: torch.relu_,
    aten.sub.out: torch.sub,
    aten.sum.IntList_out: torch.sum,
}
# What only gives memory, with whatever is in it.
UNFILLED = (aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default,
            aten.new_empty.default, aten.new_empty_strided.default)  # fmt: skip
# What hands a value to Python, or makes tensors whose size depends on values: not to be replayed.
DEPENDS_ON_VALUES = frozenset(
    {"_local_scalar_dense", "equal", "is_nonzero", "item", "masked_select", "nonzero", "set_"}
)
OPTIONS = frozenset({"dtype", "layout", "device", "pin_memory"})


class Place(NamedTuple):
    """A tensor that the step makes: where it lies in which of the step's results."""

    result: int
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class Call(NamedTuple):
    """An operation with its arguments, Places among them, and what it makes.

    results: which of the tensors that it gives are new, and where they lie.  used: the numbers of
    all results that it touches.
    """

    operation: Any
    args: Any
    kwargs: dict[str, Any]
    results: dict[int, Place]
    used: frozenset[int]


class Recording(TorchDispatchMode):
    """Notes every operation that is carried out inside the context.

    calls: those that compute something; a view of a result is a Place.  sizes: bytes of each result
    (of its storage).  refused: what cannot be replayed, or ''.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.sizes: list[int] = []
        self.refused = ""
        self._number: dict[int, int] = {}  # a storage's address -> its number among the results
        # A weak reference keeps an address from being given to another storage; the memory is free.
        self._kept: list[StorageWeakRef] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Not wrapped in what would import torch's compiler, a second of work, to leave it out."""
        return False

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        found = operation(*args, **kwargs)
        if not self.refused:
            self._note(operation, args, kwargs, found)
        return found

    def _note(self, operation: Any, args: Any, kwargs: dict[str, Any], found: Any) -> None:
        if operation._opname in DEPENDS_ON_VALUES:
            self.refused = operation._opname
            return
        given = {t.untyped_storage()._cdata for t in tensors_in((args, kwargs))}
        fresh = {
            index: tensor
            for index, tensor in enumerate(tensors_in(found))
            if tensor.untyped_storage()._cdata not in given
        }
        if not fresh and not operation._schema.is_mutable:
            return  # a view
        placed = converted(args, self.place)
        options = {name: converted(value, self.place) for name, value in kwargs.items()}
        for tensor in fresh.values():
            self._add(tensor)
        results = {index: self._of_result(tensor) for index, tensor in fresh.items()}
        used = {self._number[c] for c in given if c in self._number}
        used |= {place.result for place in results.values()}
        self.calls.append(Call(operation, placed, options, results, frozenset(used)))

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._number:
            self._number[storage._cdata] = len(self.sizes)
            self._kept.append(StorageWeakRef(storage))
            self.sizes.append(storage.nbytes())

    def place(self, tensor: Tensor) -> Place | Tensor:
        """Where a tensor lies, or the tensor itself where it was there before the step."""
        known = tensor.untyped_storage()._cdata in self._number
        return self._of_result(tensor) if known else tensor.detach()

    def _of_result(self, tensor: Tensor) -> Place:
        number = self._number[tensor.untyped_storage()._cdata]
        size, stride = tuple(tensor.shape), tensor.stride()
        return Place(number, int(tensor.storage_offset()), size, stride, tensor.dtype)


def replaying(update: Update, said: Callable[[str], None]) -> Update:
    """The same update, whose third and later calls replay the operations of the second.

    Inputs and targets are copied into tensors of the recording's own; what it returns are its own
    tensors too, overwritten by the next call.  Learning rates must be tensors, changed in place;
    nothing in the update may read a value, or it is made as it is, and `said` is told why.  Batches
    of another shape are made as they are.  said: also told how long recording took.
    """
    return _Replayed(update, said)


class _Replayed:
    def __init__(self, update: Update, said: Callable[[str], None]) -> None:
        self.update, self.said = update, said
        self.calls = 0
        self.operations: list[tuple[Callable[..., Any], Any, dict[str, Any]]] = []
        self.refused = False

    def __call__(self, inputs: Tensor, targets: Tensor) -> Measured:
        self.calls += 1
        if self.calls <= WARM_UP or self.refused:
            return self.update(inputs, targets)
        if not self.operations:
            self.inputs, self.targets = inputs.clone(), targets.clone()
            return self.record()
        if (inputs.shape, targets.shape) != (self.inputs.shape, self.targets.shape):
            return self.update(inputs, targets)
        self.inputs.copy_(inputs)
        self.targets.copy_(targets)
        with torch.inference_mode(), collector_paused():
            for operation, args, kwargs in self.operations:
                operation(*args, **kwargs)
        return self.measured

    def record(self) -> Measured:
        """Make a step, and note what it does."""
        began = time.perf_counter()
        with collector_paused():
            with Recording() as recording:
                measured = self.update(self.inputs, self.targets)
            if recording.refused:
                self.refused = True
                self.said(f"a step cannot be replayed: it uses {recording.refused}")
                return measured
            places = converted(tuple(measured), recording.place)
            trim_memory()
            with torch.inference_mode():
                self.operations, tensor = bound(recording, set(numbers_in(places)))
                self.measured = Measured(*converted(places, tensor, Place))
        seconds, count = time.perf_counter() - began, len(self.operations)
        self.said(f"recorded a step: {count} operations, to be replayed; {seconds:.1f} s")
        return measured


def bound(
    recording: Recording, kept: set[int]
) -> tuple[list[tuple[Callable[..., Any], Any, dict[str, Any]]], Callable[[Place], Tensor]]:
    """The operations of a recording with tensors for Places, and what gives the tensor of a Place.

    kept: results whose values are read when all is done.
    """
    calls = [call for call in recording.calls if call.operation not in UNFILLED]
    offsets, total = layout([call.used for call in calls], recording.sizes, kept)
    memory = torch.empty(total, dtype=torch.uint8).untyped_storage()
    made: dict[Place, Tensor] = {}

    def tensor(place: Place) -> Tensor:
        if place not in made:
            first = offsets[place.result] // place.dtype.itemsize + place.offset
            found = torch.empty(0, dtype=place.dtype)
            made[place] = found.set_(memory, first, place.size, place.stride)
        return made[place]

    return [callable_of(call, tensor) for call in calls], tensor


def layout(
    used: Sequence[frozenset[int]], sizes: Sequence[int], kept: set[int]
) -> tuple[dict[int, int], int]:
    """Offsets of results in one block of memory, and its size, in bytes.

    used: which results each call touches, from the first time to the last, between which their
    memory is theirs alone; that of kept ones is so to the end.
    """
    last = {number: index for index, numbers in enumerate(used) for number in numbers}
    last |= dict.fromkeys(kept, len(used))
    offsets: dict[int, int] = {}
    free: dict[int, list[int]] = {}  # by size, which few results do not share with another one
    total = 0
    for index, numbers in enumerate(used):
        for number in sorted(n for n in numbers if n not in offsets):
            size = padded(sizes[number])
            if free.get(size):
                offsets[number] = free[size].pop()
            else:
                offsets[number] = total
                total += size
        for number in sorted(numbers):
            if last[number] == index:
                free.setdefault(padded(sizes[number]), []).append(offsets[number])
    return offsets, total


def padded(size: int) -> int:
    """Bytes that a result takes in the block."""
    return -(-max(size, 1) // ALIGNMENT) * ALIGNMENT


def callable_of(
    call: Call, tensor: Callable[[Place], Tensor]
) -> tuple[Callable[..., Any], Any, dict[str, Any]]:
    """The call with tensors for Places, writing its results where they belong."""
    args = converted(call.args, tensor, Place)
    kwargs = {name: converted(value, tensor, Place) for name, value in call.kwargs.items()}
    results = {index: tensor(place) for index, place in call.results.items()}
    operation = call.operation
    if results:
        variant = writing(operation)
        if variant is None or len(variant.outs) != len(results):
            return copying(operation, results), args, kwargs
        operation = variant.operation
        kwargs = {name: v for name, v in kwargs.items() if name not in variant.dropped}
        kwargs |= dict(zip(variant.outs, results.values(), strict=True))
    return SHORT.get(operation, operation._op), args, kwargs


class Writing(NamedTuple):
    """The form of an operation that writes its results into the tensors named `outs`."""

    operation: Any
    outs: tuple[str, ...]
    dropped: frozenset[str]  # options of the operation, which are those of its results


@cache
def writing(operation: Any) -> Writing | None:
    """The form of an operation that writes into given tensors, or None where torch has none."""
    packet, own = operation._overloadpacket, operation._schema
    if own.is_mutable:
        return None
    names = [(a.name, str(a.type)) for a in own.arguments]
    for overload in packet.overloads():
        other = getattr(packet, overload)
        outs = [a for a in other._schema.arguments if a.is_out]
        rest = [(a.name, str(a.type)) for a in other._schema.arguments if not a.is_out]
        dropped = frozenset(name for name, _ in names) - {name for name, _ in rest}
        fits = [n for n in names if n[0] not in dropped] == rest and dropped <= OPTIONS
        single = all(str(a.type) == "Tensor" for a in outs)
        if fits and single and len(outs) == len(own.returns) > 0:
            return Writing(other, tuple(a.name for a in outs), dropped)
    return None


def copying(operation: Any, results: dict[int, Tensor]) -> Callable[..., None]:
    """The operation, and its results copied to where they belong: torch has no form that writes."""
    run, places = operation._op, list(results.items())

    def both(*args: Any, **kwargs: Any) -> None:
        found = list(tensors_in(run(*args, **kwargs)))
        for index, place in places:
            place.copy_(found[index])

    return both


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in nested lists, tuples and dicts, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from tensors_in(inner)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))


def converted(value: Any, change: Callable[[Any], Any], kind: type = Tensor) -> Any:
    """The same nested lists, tuples and dicts with everything of this kind changed."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return type(value)(converted(inner, change, kind) for inner in value)
    if isinstance(value, dict):
        return {name: converted(inner, change, kind) for name, inner in value.items()}
    return value


def numbers_in(value: Any) -> Iterator[int]:
    """The numbers of the results in nested lists, tuples and dicts."""
    if isinstance(value, Place):
        yield value.result
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from numbers_in(inner)
    elif isinstance(value, dict):
        yield from numbers_in(list(value.values()))


def trim_memory() -> None:
    """Give memory that was freed back to the system, where the C library can be asked to.

    The recorded step's results were freed one by one; the block for them all is a new one.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
