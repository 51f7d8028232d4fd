"""Records the torch operations of a training step, one by one, through a dispatch mode."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from deepstack.fast.products import uses_onednn

# Operations that return a value to Python or whose output size depends on values: no replay.
DEPENDS_ON_VALUES = frozenset(
    {"_local_scalar_dense", "equal", "is_nonzero", "item", "masked_select", "nonzero", "set_"}
)


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
    that the operation reads or writes.  onednn: whether oneDNN computes its products.
    """

    operation: Any
    args: Any
    kwargs: dict[str, Any]
    results: dict[int, TensorRef]
    used: frozenset[int]
    onednn: bool


class Recording(TorchDispatchMode):
    """Dispatch mode that records every operation executed inside the context.

    calls: the operations that compute something; a view is only another TensorRef.
    sizes: bytes of each storage by number.
    before: the storages that existed before the step, by number.
    results: TensorRefs of the step's results.  refused: why it cannot be replayed, or ''.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        self.sizes: list[int] = []
        self.before: dict[int, torch.UntypedStorage] = {}
        self.results: Any = None
        self.refused = ""
        # Numbers of the living storages.  A weak reference by torch would keep the small objects
        # of all others, between which freed memory lies in pieces too small for new results.
        self._numbers: WeakKeyDictionary[torch.UntypedStorage, int] = WeakKeyDictionary()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: True would import torch's compiler, which takes a second."""
        return False

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_composite(operation):  # in inference mode autograd does not decompose it
            with self:
                return operation.decompose(*args, **kwargs)
        values = operation(*args, **kwargs)
        if not self.refused:
            self._note(operation, args, kwargs, values)
        return values

    def _note(self, operation: Any, args: Any, kwargs: dict[str, Any], values: Any) -> None:
        if operation._opname in DEPENDS_ON_VALUES:
            self.refused = f"it reads a value ({operation._opname})"
            return
        values = values if isinstance(values, (list, tuple)) else (values,)
        if operation.is_view and shares_storage(values, args):
            return
        references = map_nested(args, self.refer), map_nested(kwargs, self.refer)
        new = {
            index: value
            for index, value in enumerate(values)
            if isinstance(value, Tensor) and value.untyped_storage() not in self._numbers
        }
        for value in new.values():
            self._number(value.untyped_storage())
        results = {index: self.refer(value) for index, value in new.items()}
        if results or operation._schema.is_mutable:
            used = frozenset(numbers_in([references, results]))
            self.calls.append(Call(operation, *references, results, used, uses_onednn()))

    def _number(self, storage: torch.UntypedStorage) -> int:
        """Return the number of a storage; give it the next one if it has none."""
        number = self._numbers.setdefault(storage, len(self.sizes))
        if number == len(self.sizes):
            self.sizes.append(storage.nbytes())
        return number

    def refer(self, tensor: Tensor) -> TensorRef:
        """Return the TensorRef of a tensor; a storage without a number existed before the step."""
        storage = tensor.untyped_storage()
        if storage not in self._numbers:
            self.before[self._number(storage)] = storage
        size, stride = tuple(tensor.shape), tensor.stride()
        number = self._numbers[storage]
        return TensorRef(number, int(tensor.storage_offset()), size, stride, tensor.dtype)

    def finish(self, results: Any) -> None:
        """Keep the TensorRefs of the step's results and forget the storages' numbers."""
        self.results = map_nested(results, self.refer)
        self._numbers.clear()


@cache
def is_composite(operation: Any) -> bool:
    """Return whether an operation only decomposes into others and has no CPU kernel."""
    keys = torch._C.DispatchKey
    return bool(
        operation.has_kernel_for_dispatch_key(keys.CompositeImplicitAutograd)
        and not operation.has_kernel_for_dispatch_key(keys.CPU)
    )


def shares_storage(values: Sequence[Any], args: Sequence[Any]) -> bool:
    """Return whether an operation's first result shares the storage of its first argument."""
    both = [*values[:1], *args[:1]]
    tensors = [value for value in both if isinstance(value, Tensor)]
    addresses = {tensor.untyped_storage()._cdata for tensor in tensors}
    return len(tensors) == 2 and len(addresses) == 1


def map_nested(value: Any, change: Callable[[Any], Any], kind: type = Tensor) -> Any:
    """Return the nested lists, tuples and dicts with `change` applied to values of type `kind`."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, (list, tuple)) and value.__class__ is not torch.Size:
        return type(value)([map_nested(inner, change, kind) for inner in value])
    if isinstance(value, dict):
        return {name: map_nested(inner, change, kind) for name, inner in value.items()}
    return value


def numbers_in(value: Any) -> set[int]:
    """Return the storage numbers of all TensorRefs in nested lists, tuples and dicts."""
    numbers: set[int] = set()
    map_nested(value, lambda reference: numbers.add(reference.number), TensorRef)
    return numbers
