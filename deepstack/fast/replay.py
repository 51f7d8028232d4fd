"""Runs a whole training step on a CPU from a recorded list of operations.

A narrow layer's operations take a few microseconds each, and autograd, allocation, views and Python
take as long again.  `ReplayedStep` runs a step under a recorder that notes every operation of
forward, backward, optimizer and probe.  It gives each result a fixed place in a block of memory
and then runs the same kernels on the same numbers in the same order, so every bit stays the same.
`FUNCTIONS` lists functions that run the kernel of an operation on given outputs: torch's own, which
take a microsecond less to call than the operation, or an `out=` variant.  All other operations run
as they are, and their results are copied.  Functions with `out=` save a tenth of a step at 200
layers of width 32.
The shards of a batch (`shards`) have separate blocks, and threads run them at the same time.
"""

import ctypes
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepstack.fast.products import with_onednn
from deepstack.fast.recording import Call, Recording, TensorRef, map_nested, numbers_in
from deepstack.fast.step import Measured, Probe, Update, with_probe
from deepstack.gc_control import gc_paused

aten = torch.ops.aten

Operation = tuple[Callable[..., Any], Any, dict[str, Any]]

# Eager steps before the recording: the optimizer creates its state.
WARM_UP = 1
# Results begin at multiples of this many bytes, as torch's own allocations do.
ALIGNMENT = 64
# Operations that only allocate uninitialized memory.
UNFILLED = (aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default,
            aten.new_empty.default, aten.new_empty_strided.default)  # fmt: skip


class ReplayedStep:
    """A step, update then probe, whose third and later calls replay the second call.

    The step must run the same operations at every call.  threads: that replay the shards of a
    batch; 1 if shards draw random numbers, whose order would otherwise change.  notify: receives
    the reason if the update reads a value; every step then runs eagerly.

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
    ) -> None:
        self.update, self.notify = update, notify
        self.threads = min(threads, len(update.shards))
        self.whole = with_probe(update, probe)
        self.finish = with_probe(lambda *_: update.apply(*update.total()), probe)
        self.calls = 0
        self.bound: list[Bound] = []
        self.pool: ThreadPoolExecutor | None = None
        self.refused = False

    def __call__(self, inputs: Tensor, targets: Tensor) -> Measured:
        self.calls += 1
        if self.calls <= WARM_UP or self.refused:
            return self.whole(inputs, targets)
        if self.calls == WARM_UP + 1:
            self.inputs, self.targets = inputs.clone(), targets.clone()
        if (inputs.shape, targets.shape) != (self.inputs.shape, self.targets.shape):
            return self.whole(inputs, targets)
        self.inputs.copy_(inputs)
        self.targets.copy_(targets)
        with gc_paused():
            return self.replay() if self.bound else self.record()

    def replay(self) -> Measured:
        """Run the recorded operations: of all shards, then of the rest of the step."""
        *shards, rest = self.bound
        if self.pool is None:
            for shard in shards:
                shard.run()
        else:
            list(self.pool.map(Bound.run, shards))  # raises the error of a thread
        rest.run()
        return Measured(*rest.results)

    def record(self) -> Measured:
        """Run a step, note its operations and prepare their replay."""
        recordings = []
        for part in (*(shard.compute for shard in self.update.shards), self.finish):
            with Recording() as recording:
                measured = part(self.inputs, self.targets)
            recording.finish(tuple(measured or ()))
            recordings.append(recording)
        assert measured is not None
        if reason := next((r.refused for r in recordings if r.refused), ""):
            self.refused = True
            self.notify(f"a step cannot be replayed: {reason}")
        else:
            self.prepare(recordings)
        return measured

    def prepare(self, recordings: list[Recording]) -> None:
        """Bind the recordings to memory and start the threads."""
        *shards, rest = recordings
        with torch.inference_mode():
            self.bound = [
                bind_recording(recording, zip(shard.gradients, shard.copies, strict=False))
                for recording, shard in zip(shards, self.update.shards, strict=True)
            ]
            self.bound.append(bind_recording(rest))
        trim_memory()
        if self.threads > 1:
            one_each = partial(torch.set_num_threads, 1)
            self.pool = ThreadPoolExecutor(self.threads, "shard", one_each)


class Bound(NamedTuple):
    """A recording bound to memory: its operations in order, and the tensors of its results."""

    operations: list[Operation]
    results: Any

    def run(self) -> None:
        """Run the operations."""
        with torch.inference_mode():
            for operation, args, kwargs in self.operations:
                operation(*args, **kwargs)


def bind_recording(recording: Recording, replaced: Iterable[tuple[Tensor, Tensor]] = ()) -> Bound:
    """Bind a recording to one block of memory and return its operations and results.

    replaced: pairs of tensors that existed before, each alone in its storage; the operations use
    the second in place of the first.
    """
    storages = {storage._cdata: number for number, storage in recording.before.items()}
    aliases = {
        storages[old.untyped_storage()._cdata]: storages[new.untyped_storage()._cdata]
        for old, new in replaced
    }
    before = frozenset(recording.before)
    calls = [call for call in recording.calls if call.operation not in UNFILLED]
    permanent = numbers_in(recording.results) - before
    offsets, total = layout([call.used - before for call in calls], recording.sizes, permanent)
    memory = torch.empty(total, dtype=torch.uint8).untyped_storage()
    tensors: dict[TensorRef, Tensor] = {}

    def tensor(reference: TensorRef) -> Tensor:
        if reference.number in aliases:
            reference = reference._replace(number=aliases[reference.number])
        if reference not in tensors:
            number, offset, size, stride, dtype = reference
            storage = recording.before.get(number, memory)
            first = offsets.get(number, 0) // dtype.itemsize + offset
            tensors[reference] = torch.empty(0, dtype=dtype).set_(storage, first, size, stride)
        return tensors[reference]

    operations = [bind(call, tensor) for call in calls]
    return Bound(operations, map_nested(recording.results, tensor, TensorRef))


def convert(x: Tensor, *, out: Tensor, **options: Any) -> None:
    """Write x into `out`, which has the format of the options."""
    out.copy_(x)


# By operation: the function that replaces it, and the names of its output arguments.  Not every
# `out=` variant of torch equals its operation: that of batch norm is wrong for strided rows.
FUNCTIONS: dict[Any, tuple[Any, ...]] = {
    aten._softmax.default: (aten._softmax.out, "out"),
    aten._softmax_backward_data.default: (aten._softmax_backward_data.out, "grad_input"),
    aten._to_copy.default: (convert, "out"),
    aten.add.Tensor: (torch.add, "out"),
    aten.addcmul.default: (torch.addcmul, "out"),
    aten.addmm.default: (torch.addmm, "out"),
    aten.baddbmm.default: (torch.baddbmm, "out"),
    aten.bmm.default: (torch.bmm, "out"),
    aten.cat.default: (torch.cat, "out"),
    aten.clone.default: (convert, "out"),
    aten.div.Scalar: (torch.div, "out"),
    aten.div.Tensor: (torch.div, "out"),
    aten.gelu.default: (aten.gelu.out, "out"),
    aten.gelu_backward.default: (aten.gelu_backward.grad_input, "grad_input"),
    aten.linalg_vector_norm.default: (aten.linalg_vector_norm.out, "out"),
    aten.mm.default: (torch.mm, "out"),
    aten.mul.Scalar: (torch.mul, "out"),
    aten.mul.Tensor: (torch.mul, "out"),
    aten.mv.default: (torch.mv, "out"),
    aten.native_layer_norm.default: (aten.native_layer_norm.out, "out0", "out1", "out2"),
    aten.native_layer_norm_backward.default: (
        aten.native_layer_norm_backward.out, "out0", "out1", "out2",
    ),
    aten.sigmoid.default: (torch.sigmoid, "out"),
    aten.sigmoid_backward.default: (aten.sigmoid_backward.grad_input, "grad_input"),
    aten.silu.default: (aten.silu.out, "out"),
    aten.silu_backward.default: (aten.silu_backward.grad_input, "grad_input"),
    aten.sub.Tensor: (torch.sub, "out"),
    aten.sum.dim_IntList: (torch.sum, "out"),
    aten.tanh.default: (torch.tanh, "out"),
    aten.tanh_backward.default: (aten.tanh_backward.grad_input, "grad_input"),
    aten.threshold_backward.default: (aten.threshold_backward.grad_input, "grad_input"),
    # in place
    aten.add_.Tensor: (Tensor.add_,),
    aten.addmm_.default: (Tensor.addmm_,),
    aten.copy_.default: (Tensor.copy_,),
    aten.mul_.Tensor: (Tensor.mul_,),
    aten.relu_.default: (torch.relu_,),
}  # fmt: skip


def bind(call: Call, tensor: Callable[[TensorRef], Tensor]) -> Operation:
    """Return the call with tensors for TensorRefs, writing its results into their tensors."""
    args = map_nested(call.args, tensor, TensorRef)
    kwargs = map_nested(call.kwargs, tensor, TensorRef)
    results = {index: tensor(reference) for index, reference in call.results.items()}
    function, *outputs = FUNCTIONS.get(call.operation, (call.operation._op,))
    if call.onednn:
        function = with_onednn(function)
    if len(outputs) != len(results):
        return copying(call.operation, results), args, kwargs
    return function, args, kwargs | dict(zip(outputs, results.values(), strict=True))


def copying(operation: Any, results: dict[int, Tensor]) -> Callable[..., None]:
    """Return a function that runs the operation and copies its results into the given tensors."""
    run, places = operation._op, list(results.items())
    is_single = [str(value.type) for value in operation._schema.returns] == ["Tensor"]

    def copy(*args: Any, **kwargs: Any) -> None:
        values = run(*args, **kwargs)
        for index, result in places:
            result.copy_(values if is_single else values[index])

    copy.__name__ = f"{operation} and a copy"
    return copy


def layout(
    used: Sequence[frozenset[int]], sizes: Sequence[int], kept: set[int]
) -> tuple[dict[int, int], int]:
    """Return offsets of results in one block of memory, and the block's size, in bytes.

    used: the results that each call touches.  A result occupies memory from its first use to its
    last, and forever if it is in `kept`.  sizes: bytes by number.
    """
    last = {number: index for index, numbers in enumerate(used) for number in numbers}
    last |= dict.fromkeys(kept, len(used))
    offsets: dict[int, int] = {}
    free: dict[int, list[int]] = {}  # by size: many results have equal sizes
    total = 0
    for index, numbers in enumerate([frozenset(kept), *used], -1):
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
