"""The state of a PyTorch model that deepstack did not build: kept, and put back after a pass.

A forward pass may change the model, also in evaluation mode.  Some count in a buffer, keep a cache
or a memory as an attribute, or append to a list; some write into their input, or merge weights.
"""

import enum
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

Restore = Callable[[], object]

# Values that nothing changes, and parameters, which only a few models write into (`written`).
FIXED = (
    str, bytes, bool, int, float, complex, range, slice, type(None), type, enum.Enum, torch.dtype,
    torch.device, torch.layout, FunctionType, BuiltinFunctionType, MethodType, ModuleType, partial,
    nn.Parameter,
)  # fmt: skip
HOOKS = {*vars(nn.Module())} - {
    "training", "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"
}  # fmt: skip
"""Attributes of every module that are empty, but for hooks."""
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class KeptState:
    """All that some modules and other values hold at one moment; `restore` puts it back.

    It keeps the attributes of each module, the content of lists, dicts, sets, arrays and tensors,
    and the state of random generators.  It also keeps the attributes of objects that hold nothing
    else, such as a cache.  An object that holds anything else, such as a trainer or a file, stays
    as it is.  Parameters keep their identity; of `written` ones the content is kept as well.
    """

    def __init__(self, values: Iterable[Any], written: Iterable[nn.Parameter] = ()) -> None:
        self._tensors = [KeptTensor(p) for p in written]
        # by id, with the value itself, which lives on with its id
        self._kept: dict[int, tuple[Any, Restore | None]] = {}
        self._others: dict[int, Any] = {}
        for value in values:
            self._keep(value)

    def restore(self) -> None:
        """Put back each value that has changed; write into no other."""
        for _, put_back in self._kept.values():
            if put_back is not None:
                put_back()
        for tensor in changed(self._tensors):
            tensor.restore()

    def _keep(self, value: Any) -> bool:
        """Keep a value with all that it holds; return whether it is data throughout."""
        if isinstance(value, FIXED) or id(value) in self._kept:
            return True
        if isinstance(value, Tensor):
            self._kept[id(value)] = value, None
            self._tensors.append(KeptTensor(value))
            return True
        if isinstance(value, nn.Module):
            attributes = vars(value)
            self._kept[id(value)] = value, of_mapping(attributes)
            for name, each in list(attributes.items()):
                if name not in HOOKS or each:
                    self._keep(each)
            return True
        if isinstance(value, (list, deque, set, dict)):
            put_back = of_mapping(value) if isinstance(value, dict) else of_items(value)
            self._kept[id(value)] = value, put_back
            return self._keep_all(value.values() if isinstance(value, dict) else value)
        if isinstance(value, (tuple, frozenset)):
            return self._keep_all(value)
        if (other := of_other(value)) is not None:
            self._kept[id(value)] = value, other
            return True
        return self._keep_object(value)

    def _keep_all(self, values: Iterable[Any]) -> bool:
        return all([self._keep(value) for value in list(values)])

    def _keep_object(self, value: Any) -> bool:
        """Keep an object that holds data alone; forget what another one holds."""
        attributes = getattr(value, "__dict__", None)
        if not isinstance(attributes, dict) or id(value) in self._others:
            return False
        tensors, values = len(self._tensors), len(self._kept)
        self._kept[id(value)] = value, of_mapping(attributes)
        with suppress(RecursionError):
            if all(self._keep(each) for each in list(attributes.values())):
                return True
        del self._tensors[tensors:]
        while len(self._kept) > values:
            self._kept.popitem()
        self._others[id(value)] = value
        return False


def of_mapping(mapping: dict[Any, Any]) -> Restore:
    """Return the function that puts back the items of a dict, in their order."""
    kind: Any = OrderedDict if isinstance(mapping, OrderedDict) else dict
    items = list(kind.items(mapping))

    def put_back() -> None:
        now = kind.items(mapping)
        if len(now) != len(items) or any(
            name is not key or value is not held
            for (name, value), (key, held) in zip(now, items, strict=True)
        ):
            kind.clear(mapping)
            kind.update(mapping, items)

    return put_back


def of_items(values: Any) -> Restore:
    """Return the function that puts back the items of a list, a deque or a set."""
    items = list(values)

    def put_back() -> None:
        if len(values) != len(items) or any(
            now is not held for now, held in zip(values, items, strict=True)
        ):
            values.clear()
            (values.update if isinstance(values, set) else values.extend)(items)

    return put_back


def of_other(value: Any) -> Restore | None:
    """Return the function that puts back an array or a random generator; None for others."""
    if isinstance(value, np.ndarray):
        return partial(np.copyto, value, value.copy())
    if isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    if isinstance(value, random.Random):
        return partial(value.setstate, value.getstate())
    if isinstance(value, np.random.Generator):
        bits: Any = value.bit_generator
        return partial(setattr, bits, "state", bits.state)
    if isinstance(value, np.random.RandomState):
        return partial(value.set_state, value.get_state())
    return None


class KeptTensor:
    """A tensor with a copy of its content, and its place in memory."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.content = tensor, tensor.detach().clone()
        self.place: tuple[Any, ...] | None = None
        if type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided:
            offset = tensor.storage_offset()
            self.place = tensor.untyped_storage(), offset, tensor.shape, tensor.stride()

    def is_moved(self) -> bool:
        """Return whether the tensor has another shape, type or memory."""
        now, then = self.tensor, self.content
        if now.shape != then.shape or now.dtype != then.dtype or now.device != then.device:
            return True
        return self.place is not None and now.untyped_storage()._cdata != self.place[0]._cdata

    def differs(self) -> Tensor | bool:
        """Return whether the content is another one, as a 0-d tensor where it lies on a device."""
        now, then = self.tensor.detach(), self.content
        if self.is_moved():
            return True
        if now.is_meta or not now.numel():
            return False
        is_plain = self.place is not None and not (now.is_quantized or now.is_conj())
        if is_plain and now.element_size() in BITS:
            kind = BITS[now.element_size()]
            return (now.view(kind) != then.view(kind)).any()
        try:
            return not torch.equal(now, then)
        except (RuntimeError, TypeError, NotImplementedError):
            return False  # a kind of tensor that cannot be compared

    @torch.no_grad()
    def restore(self) -> None:
        """Put the tensor back to its memory, and write its content."""
        if self.is_moved():
            there = self.content
            if self.place is not None:
                there = torch.empty(0, dtype=there.dtype, device=there.device).set_(*self.place)
            self.tensor.data = there
        self.tensor.detach().copy_(self.content)


def changed(tensors: Sequence[KeptTensor]) -> list[KeptTensor]:
    """Return the tensors whose content is another one; wait for each device once."""
    flags = [tensor.differs() for tensor in tensors]
    devices = {flag.device for flag in flags if isinstance(flag, Tensor)}
    for device in devices:
        indices = [i for i, f in enumerate(flags) if isinstance(f, Tensor) and f.device == device]
        values = torch.stack([torch.as_tensor(flags[i]) for i in indices]).tolist()
        for index, value in zip(indices, values, strict=True):
            flags[index] = value
    return [tensor for tensor, flag in zip(tensors, flags, strict=True) if flag]


class ParameterWrites(TorchDispatchMode):
    """Keep the content of each parameter that an operation inside the block is about to write.

    kept: by parameter.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watched: dict[int, list[nn.Parameter]] = {}  # by storage
        for p in parameters:
            if type(p) is nn.Parameter:
                self._watched.setdefault(p.untyped_storage()._cdata, []).append(p)
        self.kept: dict[nn.Parameter, KeptTensor] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: True would import torch's compiler, which takes a second."""
        return False

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if operation._schema.is_mutable:
            for index, argument in enumerate(operation._schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    self._keep(args[index] if index < len(args) else kwargs.get(argument.name))
        return operation(*args, **kwargs)

    def _keep(self, written: Any) -> None:
        for tensor in written if isinstance(written, (list, tuple)) else [written]:
            if type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided:
                for parameter in self._watched.get(tensor.untyped_storage()._cdata, ()):
                    if parameter not in self.kept:
                        self.kept[parameter] = KeptTensor(parameter)

    def restore(self) -> None:
        """Put back the content of all parameters that were written."""
        for tensor in changed(list(self.kept.values())):
            tensor.restore()
