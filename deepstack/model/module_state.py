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
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from deepstack.base.gc_control import gc_paused

Restore = Callable[[], object]

# Values that nothing changes, and parameters, which only a few models write into (`written`).
FIXED = (
    str, bytes, bool, int, float, complex, range, slice, type(None), type, enum.Enum, torch.dtype,
    torch.device, torch.layout, FunctionType, BuiltinFunctionType, MethodType, ModuleType, partial,
    nn.Parameter,
)  # fmt: skip
PLAIN = frozenset(FIXED) - {enum.Enum}
"""The same by exact type: a look-up takes a tenth of the time."""
OWN = frozenset(vars(nn.Module())) - {"training"}
"""Attributes of every module: its parameters, buffers, modules and hooks."""
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class KeptState:
    """All that a model and other values hold at one moment; `restore` puts it back.

    It keeps the attributes of each module, the content of lists, dicts, sets, arrays and tensors,
    and the state of random generators.  It also keeps the attributes of objects that hold nothing
    else, such as a cache.  An object that holds anything else, such as a trainer or a file, stays
    as it is.  Parameters keep their identity; of `written` ones the content is kept as well.
    """

    def __init__(
        self, model: nn.Module, values: Iterable[Any] = (), written: Iterable[nn.Parameter] = ()
    ) -> None:
        self._tensors = [KeptTensor(p) for p in written]
        self._items: list[tuple[dict[Any, Any], dict[Any, Any]]] = []  # a dict and its copy
        self._empty: list[Any] = []  # collections
        self._restores: list[Restore] = []
        self._known: dict[int, Any] = {}  # by id; the value lives on, so that no other has its id
        self._others: dict[int, Any] = {}
        with gc_paused():
            self._keep_module(model)
            for value in values:
                self._keep(value)

    def restore(self) -> None:
        """Put back each value that has changed; write into no other."""
        for mapping, copy in self._items:
            put_back(mapping, copy)
        for collection in self._empty:
            if collection:
                collection.clear()
        for restore in self._restores:
            restore()
        for tensor in changed(self._tensors):
            tensor.restore()

    def _keep(self, value: Any) -> bool:
        """Keep a value with all that it holds; return whether it is data throughout."""
        if type(value) in PLAIN or id(value) in self._known or isinstance(value, FIXED):
            return True
        if isinstance(value, (tuple, frozenset)):
            return self._keep_all(value)
        if isinstance(value, nn.Module):
            self._keep_module(value)
            return True
        if not isinstance(value, (Tensor, dict, list, deque, set)):
            restore = of_other(value)
            if restore is None:
                return self._keep_object(value)
            self._restores.append(restore)
        self._known[id(value)] = value
        if isinstance(value, Tensor):
            self._tensors.append(KeptTensor(value))
        elif isinstance(value, dict):
            return self._keep_items(value)
        elif isinstance(value, (list, deque, set)):
            self._restores.append(of_collection(value))
            return self._keep_all(value)
        return True

    def _keep_all(self, values: Iterable[Any]) -> bool:
        return all([self._keep(value) for value in list(values)])

    def _keep_items(self, mapping: dict[Any, Any]) -> bool:
        if not mapping:
            self._empty.append(mapping)
            return True
        self._items.append((mapping, dict(mapping)))
        return self._keep_all(mapping.values())

    def _keep_module(self, root: nn.Module) -> None:
        """Keep a module and those inside of it."""
        waiting = [root]
        while waiting:
            module = waiting.pop()
            if id(module) in self._known:
                continue
            self._known[id(module)] = module
            attributes = vars(module)
            self._items.append((attributes, dict(attributes)))
            for name, value in list(attributes.items()):
                if name in OWN:
                    if not value:
                        self._empty.append(value)
                    elif name == "_modules":
                        self._items.append((value, dict(value)))
                        waiting += [each for each in value.values() if each is not None]
                    elif name == "_parameters":
                        self._items.append((value, dict(value)))
                    else:
                        self._keep(value)
                elif type(value) not in PLAIN:
                    self._keep(value)

    def _keep_object(self, value: Any) -> bool:
        """Keep an object that holds data alone; forget what another one holds."""
        attributes = getattr(value, "__dict__", None)
        if not isinstance(attributes, dict) or id(value) in self._others:
            return False
        lists: tuple[list[Any], ...] = (self._tensors, self._items, self._empty, self._restores)
        sizes, known = [len(each) for each in lists], len(self._known)
        self._known[id(value)] = value
        self._items.append((attributes, dict(attributes)))
        with suppress(RecursionError):
            if all(self._keep(each) for each in list(attributes.values())):
                return True
        for each, size in zip(lists, sizes, strict=True):
            del each[size:]
        while len(self._known) > known:
            self._known.popitem()
        self._others[id(value)] = value
        return False


def put_back(mapping: dict[Any, Any], copy: dict[Any, Any]) -> None:
    """Give a dict the items of its copy, in their order, unless it has them."""
    same = len(mapping) == len(copy) and all(map(is_, mapping, copy))
    if not (same and all(map(is_, mapping.values(), copy.values()))):
        kind: Any = OrderedDict if isinstance(mapping, OrderedDict) else dict
        kind.clear(mapping)
        kind.update(mapping, copy)


def of_collection(values: Any) -> Restore:
    """Return the function that puts back the items of a list, a deque or a set."""
    items = list(values)

    def put_back() -> None:
        if len(values) != len(items) or not all(map(is_, values, items)):
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
