"""Records the torch operations of a training step, one by one, through a dispatch mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Operations that return a value to Python or whose output size depends on values: no replay.
DEPENDS_ON_VALUES = frozenset(
    {"_local_scalar_dense", "equal", "is_nonzero", "item", "masked_select", "nonzero", "set_"}
)
# Attribute set on a storage: the recording that numbered it, and its number there.
MARK, NOBODY = "_deepstack_number", (None, -1)


class TensorRef(NamedTuple):
    """Identifies a tensor of the step by its storage number, offset, size, stride and dtype."""

    number: int
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class Call(NamedTuple):
    """One recorded operation with its arguments, in which TensorRefs replace tensors.

    results: the returned values that are new tensors, by index.  used: the numbers of the storages
    that the operation reads or writes.
    """

    operation: Any
    args: Any
    kwargs: dict[str, Any]
    results: dict[int, TensorRef]
    used: frozenset[int]


class Recording(TorchDispatchMode):
    """Dispatch mode that records every operation executed inside the context.

    like: an earlier recording; equal calls are shared with it, so that memory holds them once.
    calls: the operations that compute something; a view is only another TensorRef.
    sizes: bytes of each storage by number.
    before: the storages that existed before the step, by number.
    made: TensorRefs of the results.  refused: why the step cannot be replayed, or ''.
    """

    def __init__(self, like: Recording | None = None) -> None:
        super().__init__()
        self._like = iter(like.calls if like else ())
        self.calls: list[Call] = []
        self.sizes: list[int] = []
        self.before: dict[int, torch.UntypedStorage] = {}
        self.made: Any = None
        self.refused = ""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: True would import torch's compiler, which takes a second."""
        return False

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if made_of_others(operation):  # in inference mode autograd does not decompose it
            with self:
                return operation.decompose(*args, **kwargs)
        found = operation(*args, **kwargs)
        if not self.refused:
            self._note(operation, args, kwargs, found)
        return found

    def _note(self, operation: Any, args: Any, kwargs: dict[str, Any], found: Any) -> None:
        if operation._opname in DEPENDS_ON_VALUES:
            self.refused = f"it reads a value ({operation._opname})"
            return
        if operation.is_view and shares(found, args):
            return
        used: set[int] = set()

        def place(tensor: Tensor) -> TensorRef:
            found = self.place(tensor)
            used.add(found.number)
            return found

        placed = converted(args, place)
        options = {name: converted(value, place) for name, value in kwargs.items()}
        values = found if isinstance(found, (list, tuple)) else (found,)
        fresh = {
            index: value
            for index, value in enumerate(values)
            if isinstance(value, Tensor) and self._known(value.untyped_storage()) is None
        }
        for storage in dict.fromkeys(value.untyped_storage() for value in fresh.values()):
            self._add(storage)
        results = {index: place(value) for index, value in fresh.items()}
        if results or operation._schema.is_mutable:
            call = Call(operation, placed, options, results, frozenset(used))
            known = next(self._like, None)
            self.calls.append(known if known == call else call)

    def _known(self, storage: torch.UntypedStorage) -> int | None:
        """Return the number of a storage, or None if this recording has not seen it."""
        recording, number = getattr(storage, MARK, NOBODY)
        return number if recording is self else None

    def _add(self, storage: torch.UntypedStorage) -> int:
        """Number a storage by an attribute on it, because addresses are reused."""
        setattr(storage, MARK, (self, len(self.sizes)))
        self.sizes.append(storage.nbytes())
        return len(self.sizes) - 1

    def place(self, tensor: Tensor) -> TensorRef:
        """Return the TensorRef of a tensor; number its storage if it is new."""
        storage = tensor.untyped_storage()
        number = self._known(storage)
        if number is None:
            number = self._add(storage)
            self.before[number] = storage
        size, stride = tuple(tensor.shape), tensor.stride()
        return TensorRef(number, int(tensor.storage_offset()), size, stride, tensor.dtype)

    def end(self, made: Any) -> None:
        """Keep the TensorRefs of the results and remove the numbers from older storages."""
        self.made = converted(made, self.place)
        for storage in self.before.values():
            delattr(storage, MARK)

    def __eq__(self, other: object) -> bool:
        """Return whether both recordings contain the same operations on the same tensors."""
        return (
            isinstance(other, Recording)
            and (self.calls, self.sizes) == (other.calls, other.sizes)
            and self.made == other.made
            and self.before.keys() == other.before.keys()
            and all(s._cdata == other.before[n]._cdata for n, s in self.before.items())
        )


@cache
def made_of_others(operation: Any) -> bool:
    """Return whether an operation only decomposes into others and has no CPU kernel."""
    keys = torch._C.DispatchKey
    return bool(
        operation.has_kernel_for_dispatch_key(keys.CompositeImplicitAutograd)
        and not operation.has_kernel_for_dispatch_key(keys.CPU)
    )


def shares(found: Any, args: Any) -> bool:
    """Return whether an operation's result shares the storage of its first argument."""
    first = found[0] if isinstance(found, (list, tuple)) and found else found
    return (
        isinstance(first, Tensor)
        and isinstance(args[0], Tensor)
        and first.untyped_storage()._cdata == args[0].untyped_storage()._cdata
    )


def converted(value: Any, change: Callable[[Any], Any], kind: type = Tensor) -> Any:
    """Return the nested lists, tuples and dicts with `change` applied to values of type `kind`."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, (list, tuple)) and value.__class__ is not torch.Size:
        return type(value)([converted(inner, change, kind) for inner in value])
    if isinstance(value, dict):
        return {name: converted(inner, change, kind) for name, inner in value.items()}
    return value


def refs_in(value: Any) -> Iterator[TensorRef]:
    """Yield the TensorRefs in nested lists, tuples and dicts."""
    if isinstance(value, TensorRef):
        yield value
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from refs_in(inner)
    elif isinstance(value, dict):
        yield from refs_in(list(value.values()))


def numbers_in(value: Any) -> Iterator[int]:
    """Return the storage numbers of all TensorRefs in nested lists, tuples and dicts."""
    return (place.number for place in refs_in(value))


class Shape(NamedTuple):
    """A TensorRef without its storage and offset: the properties that select a kernel."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


def shapes_of(value: Any) -> Any:
    """Return a hashable key: the nested value with Shapes for TensorRefs, tuples for lists."""
    if isinstance(value, TensorRef):
        return Shape(value.size, value.stride, value.dtype)
    return tuple(map(shapes_of, value)) if isinstance(value, (list, tuple)) else value
