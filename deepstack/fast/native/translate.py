"""Turns recorded calls into records of the table that the C++ kernels run."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from deepstack.fast.native import layouts
from deepstack.fast.native.layouts import UntranslatableError, need
from deepstack.fast.native.library import Kernels
from deepstack.fast.native.record import pack_record
from deepstack.fast.recording import Call, TensorRef

Translation = TypeVar("Translation", bound=Callable[..., None])
TRANSLATIONS: dict[str, Callable[["Translator", "Operands"], None]] = {}


def translates(*names: str) -> Callable[[Translation], Translation]:
    """Register the function that adds the records of these operations, 'add.Tensor'."""

    def register(function: Translation) -> Translation:
        TRANSLATIONS.update(dict.fromkeys(names, function))
        return function

    return register


# Multiplications below which a product is computed by a kernel instead of torch's library: calls
# of larger ones cost little, and oneDNN's code for wide products is as fast or faster.
LARGEST_PRODUCT, LARGEST_BESIDE_ONEDNN = 2**27, 2**24


class Operands(NamedTuple):
    """Arguments and results of a call; tensors are TensorRefs.

    results: by the index that the operation returns them at.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: dict[int, TensorRef]

    def arg(self, index: int, name: str, default: Any = None) -> Any:
        """Return an argument by position or name."""
        return self.args[index] if index < len(self.args) else self.kwargs.get(name, default)

    @property
    def out(self) -> TensorRef:
        """The tensor that the operation writes: a new result, `out=`, or its first argument."""
        if self.results:
            need(self.results.keys() == {0})
            return self.results[0]
        names = [name for name in ("out", "grad_input") if name in self.kwargs]
        written = self.kwargs[names[0]] if names else self.args[0]
        need(isinstance(written, TensorRef))
        return written


class Translator:
    """Adds records of one call after the other; a call that it cannot translate adds none.

    locate: TensorRef -> address of its storage and the storage's bytes.
    """

    def __init__(self, kernels: Kernels, locate: Callable[[TensorRef], tuple[int, int]]) -> None:
        self.kernels, self.locate = kernels, locate
        self.records: list[bytes] = []
        self.largest_product = LARGEST_PRODUCT

    def translate(self, call: Call) -> bytes | None:
        """Return the records of a call, or None if no kernel computes it."""
        function = TRANSLATIONS.get(str(call.operation).removeprefix("aten."))
        if function is None:
            return None
        self.largest_product = LARGEST_BESIDE_ONEDNN if call.by_onednn else LARGEST_PRODUCT
        self.records = []
        try:
            function(self, Operands(tuple(call.args), call.kwargs, dict(call.results)))
        except UntranslatableError:
            return None
        return b"".join(self.records)

    def address(self, tensor: Any, dtype: torch.dtype = torch.float32) -> int:
        """Return a tensor's address; refuse another type, and elements outside of its storage."""
        need(isinstance(tensor, TensorRef) and tensor.dtype is dtype)
        need(layouts.fits(tensor.size, tensor.stride) and tensor.offset >= 0)
        base, size = self.locate(tensor)
        width = dtype.itemsize
        first = tensor.offset * width
        need(first + layouts.extent(tensor.size, tensor.stride) * width <= size)
        need((base + first) % width == 0)
        return base + first

    def add(
        self,
        kind: str,
        addresses: Sequence[int],
        integers: Sequence[int] = (),
        constants: Sequence[float] = (),
        dimensions: int = 0,
    ) -> None:
        """Add a record."""
        number = self.kernels.kinds[kind]
        self.records.append(pack_record(number, dimensions, addresses, integers, constants))

    def elementwise(
        self, kind: str, out: TensorRef, *inputs: TensorRef, constants: Sequence[float] = ()
    ) -> None:
        """Add an elementwise operation of broadcast inputs; a bool input is a mask."""
        masks = {"masked_fill": 1, "where": 0}
        types = [torch.float32] * len(inputs)
        if kind in masks:
            types[masks[kind]] = torch.bool
        operands = tuple((x.size, x.stride) for x in inputs if isinstance(x, TensorRef))
        need(len(operands) == len(inputs))
        dimensions, integers = layouts.elementwise(out.size, out.stride, operands)
        addresses = [self.address(out), *map(self.address, inputs, types)]
        if dimensions:
            self.add(kind, addresses, integers, constants, dimensions)

    def copy(self, out: TensorRef, source: TensorRef) -> None:
        """Add a copy."""
        self.elementwise("copy", out, source)

    def part(
        self, tensor: TensorRef, dim: int, start: int, length: int, step: int = 1
    ) -> TensorRef:
        """Return the slice of a tensor, a TensorRef."""
        dim %= len(tensor.size)
        size, stride = list(tensor.size), list(tensor.stride)
        offset = tensor.offset + start * stride[dim]
        size[dim], stride[dim] = length, stride[dim] * step
        return tensor._replace(offset=offset, size=tuple(size), stride=tuple(stride))

    def entry(self, tensor: TensorRef, dim: int, index: int) -> TensorRef:
        """Return one entry along a dimension, which the result lacks."""
        dim %= len(tensor.size)
        part = self.part(tensor, dim, index, 1)
        size, stride = list(part.size), list(part.stride)
        del size[dim], stride[dim]
        return part._replace(size=tuple(size), stride=tuple(stride))
