"""What a user's own scheme keeps in Python, which a recorded step does not read again."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import is_, itemgetter
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType, NoneType
from typing import Any

import numpy as np
from torch import Tensor, nn

from deepstack.errors import PluginError
from deepstack.records import removal
from deepstack.speed import Measured, Step

# What deepstack changes from step to step is in tensors, as its tests of recorded steps show.
TESTED = ("deepstack", "torch")
# Set by how a model is built and run; what a module's buffers are is looked at by itself.
NOT_ITS_OWN = frozenset({*vars(nn.Module()), "_norms"})
# Changes when another object takes its place; what is written into a tensor, a step reads anew.
WHOLE = (Tensor, nn.Module, FunctionType, BuiltinFunctionType, MethodType, ModuleType, type)
PLAIN = (NoneType, bool, int, float, complex, str, bytes)
NESTED = 4  # containers and objects inside of each other that are looked into
ABSENT = object()


class PythonState:
    """Attributes of a model's own modules and their classes, and the globals that these name.

    Of deepstack's and torch's modules nothing is looked at: for their models it costs nothing, for
    others three microseconds a layer and step. What a closure, a file, a clock or another module
    holds is not seen; that F has become another one is, when the validation loss is taken.
    """

    def __init__(self, model: nn.Module) -> None:
        own = own_modules(model)
        kinds = dict.fromkeys(kind for m in own for kind in type(m).__mro__ if is_own(kind))
        self._parts: list[_Part] = []
        for module in own:
            name = type(module).__name__
            self._parts.append(_Part(name, vars(module)))
            if module._buffers:
                self._parts.append(_Part(name, module._buffers))
        for kind in kinds:
            self._parts.append(_Part(kind.__name__, vars(kind)))
            if kind.__module__ in sys.modules:
                there = vars(sys.modules[kind.__module__])
                self._parts.append(_Part("the file", there, named_by(kind, there)))

    def __bool__(self) -> bool:
        """Whether there is anything to look at."""
        return bool(self._parts)

    def changed(self) -> str | None:
        """'alpha of Mine', where that is not what it was when this was asked before, or None."""
        found = [name for part in self._parts if (name := part.changed()) is not None]
        return found[0] if found else None


def watched(step: Step, model: nn.Module) -> Step:
    """The step, whose first call raises PluginError where it writes into a user's own buffer.

    What is kept there would be in no checkpoint, and every measurement would change it.  Only what
    a scheme sets in `at_step`, before the step, is made again from the number of the step.
    """
    kept = [
        (f"{name} of {type(module).__name__}", module._buffers, name)
        for module in own_modules(model)
        for name in module._buffers
    ]
    waiting = bool(kept)

    def written() -> list[Any]:
        every = (buffers.get(name) for _, buffers, name in kept)
        return [(id(tensor), None if tensor is None else tensor._version) for tensor in every]

    def run(inputs: Tensor, targets: Tensor, lr: float) -> Measured:
        nonlocal waiting
        if not waiting:
            return step(inputs, targets, lr)
        before, waiting = written(), False
        measured = step(inputs, targets, lr)
        for (what, _, _), was, now in zip(kept, before, written(), strict=True):
            if was != now:
                raise PluginError(
                    f"a step writes into the buffer {what}, which no checkpoint keeps and every "
                    "measurement would change; allowed are values that at_step sets, and parameters"
                )
        return measured

    return run


def not_read_again(run: Path, step: int) -> str:
    """What to say where recorded steps have gone on with old values."""
    return (
        f"{run}: before step {step} the model became another function of its parameters, by "
        "something in Python that its recorded steps do not read again, so that their rows are "
        f"wrong; first: {removal(run)}, then keep what changes in a buffer, or train with "
        "runtime.replay=false runtime.cuda_graph=false"
    )


class _Part:
    """A mapping of names to values; names: those that count, None for all."""

    def __init__(
        self, owner: str, values: Mapping[str, Any], names: list[str] | None = None
    ) -> None:
        self.owner, self.values, self.names = owner, values, names
        self.fetch: Callable[[Mapping[str, Any]], Sequence[Any]] | None = None
        self.size = 0
        self.held: Sequence[Any] = ()
        self.inside: dict[str, Any] = {}
        self.loose: list[str] = []  # names of what can change in its place

    def changed(self) -> str | None:
        if self.fetch is not None and self.is_as_it_was(self.fetch):
            return None
        values, before = self.values, self.fetch is not None
        counted = values if self.names is None else [n for n in self.names if n in values]
        kept = {n: values[n] for n in counted if self.names is not None or n not in NOT_ITS_OWN}
        was, self.inside = self.inside, {name: frozen(value) for name, value in kept.items()}
        self.held, self.size = [*kept.values()], len(values)
        self.loose = [name for name, value in kept.items() if not fixed(value)]
        first = next(iter(kept), None)
        self.fetch = itemgetter(*kept) if len(kept) > 1 else lambda there: [there.get(first or "")]
        self.held = self.held or [None]
        others = [
            name
            for name in dict.fromkeys((*was, *self.inside))
            if was.get(name, ABSENT) != self.inside.get(name, ABSENT)
        ]
        return f"{others[0]} of {self.owner}" if before and others else None

    def is_as_it_was(self, fetch: Callable[[Mapping[str, Any]], Sequence[Any]]) -> bool:
        """Whether each name stands for the very same object, and none of these has changed."""
        if self.names is None and len(self.values) != self.size:
            return False
        try:
            same = all(map(is_, fetch(self.values), self.held))
        except KeyError:
            return False
        if not self.loose:
            return same
        return same and all(frozen(self.values[n]) == self.inside[n] for n in self.loose)


class _Same:
    """An object that equals nothing but itself."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    __hash__ = None  # type: ignore[assignment]


def own_modules(model: nn.Module) -> list[nn.Module]:
    """The modules of a model that are neither deepstack's nor torch's."""
    modules = list(model.modules())
    own = {kind for kind in set(map(type, modules)) if is_own(kind)}
    return [module for module in modules if type(module) in own]


def is_own(kind: type) -> bool:
    """Whether a class is neither Python's nor one of the libraries that are tested."""
    return kind.__module__.split(".")[0] not in (*TESTED, "builtins", "abc", "typing")


def fixed(value: Any) -> bool:
    """Whether a value can only change by another taking its place."""
    if isinstance(value, tuple):
        return all(map(fixed, value))
    return isinstance(value, (*PLAIN, *WHOLE)) or is_frozen(value)


def is_frozen(value: Any) -> bool:
    """Whether it is a dataclass none of whose fields can be set."""
    parameters = getattr(type(value), "__dataclass_params__", None)
    return parameters is not None and bool(parameters.frozen)


def frozen(value: Any, nested: int = NESTED) -> Any:
    """What equals another one's where the two values compute the same."""
    if isinstance(value, PLAIN):
        return type(value), repr(value) if isinstance(value, (float, complex)) else value
    if isinstance(value, WHOLE) or is_frozen(value) or not nested:
        return _Same(value)
    if isinstance(value, (list, tuple)):
        return type(value), [frozen(inner, nested - 1) for inner in value]
    if isinstance(value, dict):
        return type(value), [(key, frozen(value[key], nested - 1)) for key in [*value]]
    if isinstance(value, (set, frozenset)):
        return type(value), frozenset(value)
    if isinstance(value, (np.ndarray, np.generic)):
        return value.dtype.str, value.shape, value.tobytes()
    inner = getattr(value, "__dict__", None)
    return _Same(value), frozen(inner, nested - 1) if isinstance(inner, dict) else None


def named_by(kind: type, there: Mapping[str, Any]) -> list[str]:
    """The globals that the methods of a class name, and the functions that these name."""
    waiting = [code for member in vars(kind).values() for code in codes_of(member)]
    names: dict[str, None] = {}
    while waiting:
        for name in waiting.pop().co_names:
            if name in there and name not in names:
                names[name] = None
                waiting += codes_of(there[name])
    return [*names]


def codes_of(member: Any) -> Iterator[CodeType]:
    """The code of a function, a method or a property, and of the functions inside of it."""
    functions = [getattr(member, name, None) for name in ("__func__", "fget", "func")]
    for function in (member, *functions):
        if isinstance(function, FunctionType):
            waiting = [function.__code__]
            while waiting:
                yield (code := waiting.pop())
                waiting += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
