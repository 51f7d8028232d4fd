"""Records the torch operations of a training step, one by one, through a dispatch mode."""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from deepstack.fast.products import uses_onednn, with_onednn

aten = torch.ops.aten

# Operations that only allocate uninitialized memory.
UNFILLED = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})


def convert(x: Tensor, *, out: Tensor, **options: Any) -> None:
    """Write x into `out`, which has the format of the options."""
    out.copy_(x)


# By operation: the function that replaces it, and the names of its output arguments.  Not every
# `out=` variant of torch equals its operation: batch norm's is wrong for strided rows.
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


# Operations that write every element and do not read it.
OVERWRITES = frozenset({"zero_", "_foreach_zero_", "fill_"})

Saved = WeakKeyDictionary[torch.UntypedStorage, torch.UntypedStorage | None]


class TensorRef(NamedTuple):
    """Identifies a tensor of the step by its storage number, offset, size, stride and dtype."""

    number: int
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class Call(NamedTuple):
    """An operation, in whose arguments TensorRefs replace tensors.

    results: the new tensors among its results, by index.
    used: the numbers of the storages that it reads or writes.
    by_onednn: whether it multiplies by oneDNN.
    """

    operation: Any
    args: Any
    kwargs: dict[str, Any]
    results: list[tuple[int, TensorRef]]
    used: set[int]
    by_onednn: bool = False

    def as_function(self) -> tuple[Callable[..., Any], Any, dict[str, Any]]:
        """Return a function with its arguments that repeats the operation and writes its results.

        The results are among the arguments.
        """
        function, *outputs = FUNCTIONS.get(self.operation, (self.operation._op,))
        if len(outputs) != len(self.results):
            return copying(self.operation), (self.results, *self.args), self.kwargs
        named = zip(outputs, (reference for _, reference in self.results), strict=True)
        function = with_onednn(function) if self.by_onednn else function
        return function, self.args, self.kwargs | dict(named)


class Recording(TorchDispatchMode):
    """Dispatch mode that records every operation executed inside the context.

    calls: the operations that compute something; a view is only another TensorRef.
    sizes: the most bytes of each storage, by number.
    before: the storages that existed before the step, by number.
    results: TensorRefs of the step's results.
    kept: the numbers of their storages.
    refused: why it cannot be replayed, or ''.
    saved: copies of storages that existed before the step, made before it first changes them; an
        empty one for zeros; None for a storage that the step overwrites before it reads it.
    """

    def __init__(self, saved: Saved | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.saved: Saved = WeakKeyDictionary() if saved is None else saved
        self.calls: list[Call] = []
        self.sizes: list[int] = []
        self.before: dict[int, torch.UntypedStorage] = {}
        self.results: Any = None
        self.kept: set[int] = set()
        self.refused = ""
        self._used: set[int] = set()  # the storages of the operation that is noted
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
        traits = traits_of(operation)
        if traits.is_composite:  # in inference mode autograd does not decompose it
            with self:
                return operation.decompose(*args, **kwargs)
        if traits.changes_values:
            self._save(operation, args, kwargs)
        values = operation(*args, **kwargs)
        if not (traits.is_view or self.refused):
            self._note(operation, args, kwargs, values, traits)
        return values

    def _note(
        self, operation: Any, args: Any, kwargs: dict[str, Any], values: Any, traits: "Traits"
    ) -> None:
        if traits.depends_on_values(args):
            self.refused = f"it reads a value ({operation._opname})"
            return
        self._used = used = set[int]()
        args, kwargs = map_nested((args, kwargs), self.refer)
        new = [
            (index, value)
            for index, value in enumerate(values if isinstance(values, (list, tuple)) else [values])
            if isinstance(value, Tensor) and value.untyped_storage() not in self._numbers
        ]
        for _, value in new:
            self._number(value.untyped_storage())
        if operation._opname in UNFILLED or not (new or traits.changes_values):
            return
        results = [(index, self.refer(value)) for index, value in new]
        self.calls.append(Call(operation, args, kwargs, results, used, uses_onednn()))

    def _save(self, operation: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Copy the storages that an operation changes first, if they existed before the step."""
        for index, name in written_arguments(operation):
            written = args[index] if index < len(args) else kwargs.get(name)
            for tensor in written if isinstance(written, (list, tuple)) else [written]:
                if not isinstance(tensor, Tensor):  # an optional argument
                    continue
                storage = tensor.untyped_storage()
                number = self._numbers.get(storage)
                if storage in self.saved or not (number is None or number in self.before):
                    continue
                is_whole = tensor.nbytes == storage.nbytes() and tensor.is_contiguous()
                unread = number is None and is_whole and operation._opname in OVERWRITES
                self.saved[storage] = None if unread else copy_of(storage)

    def _number(self, storage: torch.UntypedStorage) -> int:
        """Return the number of a storage, the next one if it has none, and note its size."""
        number = self._numbers.setdefault(storage, len(self.sizes))
        if number == len(self.sizes):
            self.sizes.append(0)
        self.sizes[number] = max(self.sizes[number], storage.nbytes())  # `out=` lets it grow
        return number

    def refer(self, tensor: Tensor) -> TensorRef:
        """Return the TensorRef of a tensor; a storage without a number existed before the step."""
        storage, count = tensor.untyped_storage(), len(self.sizes)
        number = self._number(storage)
        if number == count:
            self.before[number] = storage
        self._used.add(number)
        size, stride = tuple(tensor.shape), tensor.stride()
        return TensorRef(number, int(tensor.storage_offset()), size, stride, tensor.dtype)

    def finish(self, results: Any) -> None:
        """Keep the TensorRefs of the step's results and forget the storages' numbers."""
        self._used = self.kept
        self.results = map_nested(results, self.refer)
        self._numbers.clear()


def copy_of(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """Return a copy of a storage, or an empty one if all its bytes are 0, as new moments are."""
    values = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    values = values.view(torch.int64) if len(values) % 8 == 0 else values
    return storage.clone() if values.any() else torch.UntypedStorage(0)


class Traits(NamedTuple):
    """The properties of an operation that decide how it is recorded.

    is_composite: whether it only decomposes into others and has no CPU kernel.
    is_view: whether every result is a view of an argument.
    changes_values: whether it writes into an argument, and not only changes its shape.
    depends_on_values: arguments -> whether values decide a Python value, a size or the storage of
        its result.
    """

    is_composite: bool
    is_view: bool
    changes_values: bool
    depends_on_values: Callable[[Any], bool]


@cache
def traits_of(operation: Any) -> Traits:
    """Return the properties of an operation."""
    schema, tags, keys = operation._schema, operation.tags, torch._C.DispatchKey
    aliases = [result.alias_info for result in schema.returns]
    of_values = torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape
    by_values = operation._opname in ("is_nonzero", "set_") or any(t in tags for t in of_values)
    return Traits(
        is_composite=bool(
            operation.has_kernel_for_dispatch_key(keys.CompositeImplicitAutograd)
            and not operation.has_kernel_for_dispatch_key(keys.CPU)
        ),
        is_view=bool(aliases) and None not in aliases and not schema.is_mutable,
        changes_values=schema.is_mutable and torch.Tag.inplace_view not in tags,
        depends_on_values=has_mask if operation is aten.index.Tensor else lambda args: by_values,
    )


def has_mask(args: Any) -> bool:
    """Return whether a tensor is indexed by a mask, whose values decide the result's size."""
    masks = torch.bool, torch.uint8
    return any(index is not None and index.dtype in masks for index in args[1])


@cache
def written_arguments(operation: Any) -> list[tuple[int, str]]:
    """Return positions and names of the arguments that an operation writes into."""
    return [
        (index, argument.name)
        for index, argument in enumerate(operation._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


@cache
def copying(operation: Any) -> Callable[..., None]:
    """Return a function that runs the operation and copies its results into given tensors.

    results: index and tensor of each.
    """
    run = operation._op
    is_single = [str(value.type) for value in operation._schema.returns] == ["Tensor"]

    def copy(results: list[tuple[int, Tensor]], *args: Any, **kwargs: Any) -> None:
        values = run(*args, **kwargs)
        for index, result in results:
            result.copy_(values if is_single else values[index])

    copy.__name__ = f"{operation} and a copy"
    return copy


def map_nested(value: Any, change: Callable[[Any], Any], kind: type = Tensor) -> Any:
    """Return the nested lists, tuples and dicts with `change` applied to values of type `kind`."""
    if isinstance(value, kind):
        return change(value)
    if value is None or isinstance(value, (int, float)):  # the most frequent of the others
        return value
    if isinstance(value, (list, tuple)):
        return type(value)([map_nested(inner, change, kind) for inner in value])
    if isinstance(value, dict):
        return {name: map_nested(inner, change, kind) for name, inner in value.items()}
    return value
