"""Runs a whole training step on a CPU from a recorded list of operations.

A narrow layer's operations take a few microseconds each, and autograd, allocation, views and Python
take as long again.  `ReplayedStep` runs the first step under a recorder that notes every operation
of forward, backward, optimizer and probe, and undoes it.  It gives each result a fixed place in a
block of memory and then runs the recorded operations at every step, the first one included, so that
a resumed run computes the same numbers.

With `kernels` most operations run in C++, from tables of records between which Python calls torch
for the rest (see `native`); the numbers then equal the eager step's to rounding.  Without kernels
torch's functions run on the same numbers in the same order, so every bit stays the same:
`recording.FUNCTIONS` lists those that write into given outputs, torch's own or an `out=` variant.
All other operations run as they are, and their results are copied.
All micro-batches of a batch replay one recording, one after the other, in one block of memory.

Threads divide the operations of a table between them.  Under `train.shards` they replay the
micro-batches at the same time instead, each in a block of its own.  The numbers do not depend on
the threads.
"""

import ctypes
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from deepstack.base.gc_control import gc_paused
from deepstack.fast.native import Kernels, Translator
from deepstack.fast.native.record import RECORD
from deepstack.fast.recording import Call, Recording, Saved, TensorRef, map_nested
from deepstack.fast.step import Measured, Probe, Update, with_probe

Operation = tuple[Callable[..., Any], Any, dict[str, Any]]

# Results begin at multiples of this many bytes, as torch's own allocations do.
ALIGNMENT = 64


class ReplayedStep:
    """A step, update then probe, that replays the recording of its first call.

    The step must run the same operations at every call, and create no state that stays.

    threads: that replay the step.
    kernels: that run most operations; None to run all of them by torch.
    concurrent: whether threads may replay micro-batches at the same time; not if these draw random
        numbers, whose order would otherwise change.
    notify: receives the reason if the update reads a value; every step then runs eagerly.

    Inputs and targets are copied into tensors of the recording.  The returned tensors belong to the
    recording too; the next call overwrites them.  Learning rates must be tensors, changed in place.
    Batches of another shape run eagerly.
    """

    def __init__(
        self,
        update: Update,
        probe: Probe | None,
        notify: Callable[[str], None],
        threads: int = 1,
        kernels: Kernels | None = None,
        concurrent: bool = True,
    ) -> None:
        self.update, self.notify, self.kernels = update, notify, kernels
        self.whole = with_probe(update, probe)
        self.finish = with_probe(lambda *_: update.apply(*update.total()), probe)
        self.is_recorded = False
        self.bound: list[Bound] = []
        self.parts: list[Part] = []
        self.threads = threads
        self.workers = min(threads, update.batch.count) if concurrent else 1
        self.map: Callable[..., Iterable[None]] = map
        if self.workers > 1:
            one_each = partial(torch.set_num_threads, 1)
            self.map = ThreadPoolExecutor(self.workers, "shard", one_each).map

    def __call__(self, inputs: Tensor, targets: Tensor) -> Measured:
        shapes = inputs.shape, targets.shape
        if not self.is_recorded:
            self.is_recorded = True
            self.inputs, self.targets, self.shapes = inputs.clone(), targets.clone(), shapes
            with gc_paused():
                self.record()
        if not self.bound or shapes != self.shapes:
            return self.whole(inputs, targets)
        self.inputs.copy_(inputs)
        self.targets.copy_(targets)
        with gc_paused():
            return self.replay()

    def replay(self) -> Measured:
        """Run the recorded operations: of all micro-batches, then of the rest of the step.

        The sums are the step's own for the first micro-batch, to which the others are added.
        """
        begin, *bound, rest = self.bound
        begin.run()
        batches = self.update.batch.split(self.inputs, self.targets)
        if len(bound) == 1:
            for batch in batches:
                self.parts[0].run(bound[0], batch)
        else:
            list(self.map(Part.run, self.parts, bound, batches))  # raises the error of a thread
            for part in self.parts[1:]:
                torch._foreach_add_(self.parts[0].sums, part.sums)
        rest.run()
        return Measured(*rest.results)

    def record(self) -> None:
        """Run a step, note its operations, undo it, and bind the operations to memory.

        It notes one micro-batch.  No operation is bound if the step cannot be replayed.
        """
        batch = self.update.batch
        first = [tensor.clone() for tensor in batch.split(self.inputs, self.targets)[0]]
        recordings = []
        saved: Saved = WeakKeyDictionary()
        random_state = torch.get_rng_state()
        begin = partial(batch.begin, self.targets)
        for part in (begin, partial(batch.add, *first), partial(self.finish, *first)):
            with Recording(saved) as recording:
                measured = part()
            recording.finish(tuple(measured or ()))
            recordings.append(recording)
        restore(saved)
        torch.set_rng_state(random_state)
        if reason := next((r.refused for r in recordings if r.refused), ""):
            self.notify(f"a step cannot be replayed: {reason}")
            return
        copies = batch.count - 1 if self.workers > 1 else 0
        own = Part(first, batch.tensors)
        self.parts = [own, *(own.copy() for _ in range(copies))]
        beginning, add, rest = recordings
        replaced = [zip([*first, *batch.tensors], part.tensors, strict=True) for part in self.parts]
        of_part = 1 if self.workers > 1 else self.threads
        bindings = (
            (beginning, (), self.threads),
            *((add, pairs, of_part) for pairs in replaced),
            (rest, (), self.threads),
        )
        with torch.inference_mode():
            self.bound = [
                bind_recording(recording, pairs, self.kernels, threads)
                for recording, pairs, threads in bindings
            ]
        trim_memory()


class Part(NamedTuple):
    """The tensors of a micro-batch that a recording reads and adds to.

    inputs: inputs and targets, into which the values of each batch are copied.
    sums: the gradients and the loss.
    is_copy: whether the sums are not the step's own, so that they start from zero.
    """

    inputs: list[Tensor]
    sums: list[Tensor]
    is_copy: bool = False

    @property
    def tensors(self) -> list[Tensor]:
        """All of them."""
        return [*self.inputs, *self.sums]

    def copy(self) -> "Part":
        """Return tensors of the same shapes."""
        inputs, sums = ([*map(torch.empty_like, group)] for group in (self.inputs, self.sums))
        return Part(inputs, sums, is_copy=True)

    def run(self, bound: "Bound", batch: tuple[Tensor, Tensor]) -> None:
        """Add gradients and loss of the micro-batch, whose operations these are."""
        with torch.inference_mode():
            torch._foreach_copy_(self.inputs, batch)
            if self.is_copy:
                torch._foreach_zero_(self.sums)
        bound.run()


class ReplayedPass:
    """A function of one tensor that replays the recording of its call.

    The first call records; later calls with inputs of the same shape replay, and so does the first
    one itself.  Other shapes, and a function that reads a value, run eagerly.  The tensors of the
    result belong to the recording; the next call overwrites them.

    function: inputs -> nested tensors; must run the same operations at every call, and create no
        state that stays.
    kernels: that run most operations; None to run all of them by torch.
    threads: that run the kernels.
    """

    def __init__(
        self, function: Callable[[Tensor], Any], kernels: Kernels | None, threads: int
    ) -> None:
        self.function, self.kernels, self.threads = function, kernels, threads
        self.inputs: Tensor | None = None
        self.bound: Bound | None = None

    def __call__(self, inputs: Tensor) -> Any:
        if self.inputs is None:
            self.inputs = inputs.clone()
            with gc_paused():
                self.record()
        if self.bound is None or inputs.shape != self.inputs.shape:
            return self.function(inputs)
        self.inputs.copy_(inputs)
        self.bound.run()
        return self.bound.results

    def record(self) -> None:
        """Run the function, undo its changes, and bind its operations to memory."""
        assert self.inputs is not None
        with Recording() as recording:
            result = self.function(self.inputs)
        recording.finish(result)
        del result
        restore(recording.saved)
        if not recording.refused:
            with torch.inference_mode():
                self.bound = bind_recording(recording, kernels=self.kernels, threads=self.threads)
            trim_memory()


def restore(saved: Saved) -> None:
    """Copy the contents that storages had before a recording back."""
    for storage, copy in saved.items():
        if copy is not None and copy.nbytes():
            storage.copy_(copy)
        elif copy is not None:
            torch.empty(0, dtype=torch.uint8).set_(storage).zero_()
    saved.clear()


class Bound(NamedTuple):
    """A recording bound to memory: its operations in order, and the tensors of its results.

    kept: the memory to which tables of records point.
    """

    operations: list[Operation]
    results: Any
    kept: list[Any]

    def run(self) -> None:
        """Run the operations."""
        with torch.inference_mode():
            for operation, args, kwargs in self.operations:
                operation(*args, **kwargs)


def bind_recording(
    recording: Recording,
    replaced: Iterable[tuple[Tensor, Tensor]] = (),
    kernels: Kernels | None = None,
    threads: int = 1,
) -> Bound:
    """Bind a recording to one block of memory and return its operations and results.

    replaced: pairs of tensors that existed before, each alone in its storage; the operations use
        the second in place of the first.
    threads: that run a table of records.
    """
    instead = {old.untyped_storage(): new.untyped_storage() for old, new in replaced}
    before = {number: instead.get(one, one) for number, one in recording.before.items()}
    used = [*(call.used for call in recording.calls), recording.kept]
    # `numbers - before.keys()` would go through all of `before` for every call.
    new = [{number for number in numbers if number not in before} for numbers in used]
    offsets, total = layout(new, recording.sizes)
    memory = torch.empty(total, dtype=torch.uint8).untyped_storage()
    start = memory.data_ptr()

    @cache
    def tensor(reference: TensorRef) -> Tensor:
        number, offset, size, stride, dtype = reference
        first = offsets.get(number, 0) // dtype.itemsize + offset
        storage = before.get(number, memory)
        return torch.empty(0, dtype=dtype).set_(storage, first, size, stride)

    def locate(reference: TensorRef) -> tuple[int, int]:
        number = reference.number
        if number in before:
            return before[number].data_ptr(), before[number].nbytes()
        return start + offsets[number], recording.sizes[number]

    def by_torch(call: Call) -> Operation:
        function, args, kwargs = call.as_function()
        return (function, *map_nested((args, kwargs), tensor, TensorRef))

    results = map_nested(recording.results, tensor, TensorRef)
    if kernels is None:
        return Bound([by_torch(call) for call in recording.calls], results, [])
    translator = Translator(kernels, locate)
    operations: list[Operation] = []
    tables: list[Any] = [memory, *before.values()]
    records = bytearray()

    def finish_table() -> None:
        """Add the call that runs the records since the last call of torch."""
        if records:
            table = ctypes.create_string_buffer(bytes(records), len(records))
            count = len(records) // RECORD.size
            plan = (ctypes.c_int32 * (count * (1 + threads)))()
            address = ctypes.addressof(table), count, threads, ctypes.addressof(plan)
            kernels.plan(*address)
            tables.extend((table, plan))
            operations.append((kernels.run, address, {}))
            records.clear()

    for call in recording.calls:
        translated = translator.translate(call)
        if translated is None:
            finish_table()
            operations.append(by_torch(call))
        else:
            records += translated
    finish_table()
    return Bound(operations, results, tables)


def layout(used: Sequence[Set[int]], sizes: Sequence[int]) -> tuple[dict[int, int], int]:
    """Return offsets of results in one block of memory, and the block's size, in bytes.

    used: the results that each call touches.  A result occupies memory from its first use to its
        last.
    sizes: bytes by number.
    """
    last = {number: index for index, numbers in enumerate(used) for number in numbers}
    offsets: dict[int, int] = {}
    free = defaultdict[int, list[int]](list)  # by size: many results have equal sizes
    total = 0
    for index, numbers in enumerate(used):
        for number in sorted(number for number in numbers if number not in offsets):
            size = padded(sizes[number])
            if free[size]:
                offsets[number] = free[size].pop()
            else:
                offsets[number] = total
                total += size
        for number in sorted(numbers):
            if last[number] == index:
                free[padded(sizes[number])].append(offsets[number])
    return offsets, total


def padded(size: int) -> int:
    """Return the bytes that a result occupies in the block: its size, aligned."""
    return -(-max(size, 1) // ALIGNMENT) * ALIGNMENT


def trim_memory() -> None:
    """Return freed memory to the system, if the C library has `malloc_trim`.

    The results of the recorded step were freed one by one; the replay uses one separate block.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
