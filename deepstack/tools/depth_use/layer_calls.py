"""The call of one layer: its arguments, its output, and the forward that replaces its own."""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only

from deepstack.base import ConfigError
from deepstack.model import tensor_of

STREAM_NAMES = ("hidden_states", "x", "src", "input")


@dataclass
class Place:
    """The arguments and results of a layer, apart from the stream.

    args, kwargs: arguments without the stream.
    name: its keyword, or None for the first argument.
    output: the layer's output with None for the stream.
    in_place: whether its stream is the tensor that the layer was given.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    name: str | None
    output: Any = None
    in_place: bool = False

    def arguments(self, x: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with the stream x."""
        if self.name is None:
            return (x, *self.args), self.kwargs
        return self.args, self.kwargs | {self.name: x}

    def differing(self, other: "Place") -> list[str]:
        """Return the names of the arguments that another place does not have, or as others."""
        own, others = self.named(), other.named()
        return [name for name in {**own, **others} if not same(own.get(name), others.get(name))]

    def named(self) -> dict[str, Any]:
        """Return name -> value, with numbers for names where there are none."""
        start = 1 if self.name is not None else 2
        return {f"argument {i}": x for i, x in enumerate(self.args, start)} | self.kwargs


def same(one: Any, two: Any) -> bool:
    """Return whether two arguments are equal in structure, and their tensors in every value."""
    if one is two:
        return True
    (first, form), (second, other) = tree_flatten(one), tree_flatten(two)
    if form != other or len(first) != len(second):
        return False
    for a, b in zip(first, second, strict=True):
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            if a.shape != b.shape or a.dtype != b.dtype or not equal(a, b):
                return False
        elif isinstance(a, (bool, int, float, str, type(None))):
            if type(a) is not type(b) or a != b:
                return False
        elif a is not b:
            return False
    return True


def equal(a: Tensor, b: Tensor) -> bool:
    """Return whether all values are equal; NaN equals NaN."""
    return bool(((a == b) | ((a != a) & (b != b))).all())


def is_passed_on(x: Tensor, before: Tensor, version: int) -> bool:
    """Return whether x is the stream that the layer before returned, unchanged since then.

    version: of that tensor, which an operation in place raises.
    """
    if x is before:
        return x._version == version
    return x.shape == before.shape and x.dtype == before.dtype and equal(x, before)


def refuse_kind(x: Tensor) -> None:
    """Raise ConfigError for a stream that is not a dense real tensor."""
    kinds = {
        "nested": x.is_nested,
        "sparse": not x.is_nested and x.layout is not torch.strided,
        "complex": x.is_complex(),
    }
    for kind, is_so in kinds.items():
        if is_so:
            raise ConfigError(
                f"layers: the stream: found a {kind} tensor; allowed a dense real one, padded"
            )


def place_of(args: tuple[Any, ...], kwargs: dict[str, Any], kind: type) -> tuple[Any, Place]:
    """Return the stream among the arguments of a layer, and the rest.

    kind: of a stream that is the first argument.
    """
    if args and isinstance(args[0], kind):
        return args[0], Place(args[1:], kwargs, None)
    known = [name for name in STREAM_NAMES if isinstance(kwargs.get(name), Tensor)]
    if known:
        rest = {name: value for name, value in kwargs.items() if name != known[0]}
        return kwargs[known[0]], Place(args, rest, known[0])
    raise ConfigError("layers: a layer is called without a tensor as its first argument")


def with_stream(output: Any, y: Any) -> Any:
    """Return the output of a layer with y in place of its stream, see `tensor_of`."""
    if isinstance(output, (tuple, list)) and output:
        items = [with_stream(output[0], y), *output[1:]]
        return type(output)(*items) if hasattr(output, "_fields") else type(output)(items)
    if isinstance(output, Mapping):
        changed: Any = copy.copy(output)
        changed["last_hidden_state"] = y
        return changed
    if hasattr(output, "last_hidden_state"):
        changed = copy.copy(output)
        changed.last_hidden_state = y
        return changed
    return y


def logits_of(output: Any) -> Tensor | None:
    """Return the logits of a model's output: `logits`, or the tensor in it."""
    logits = getattr(output, "logits", None)
    if logits is None and isinstance(output, Mapping):
        logits = output.get("logits")
    logits = tensor_of(output) if logits is None else logits
    return logits if isinstance(logits, Tensor) else None


def copy_of(x: Any) -> Any:
    """Return a stream with copies of its tensors."""
    return x.clone() if isinstance(x, Tensor) else tree_map_only(Tensor, torch.clone, x)


def in_full(x: Any) -> Any:
    """Return a stream of one tensor in float32 at least."""
    return x.float() if isinstance(x, Tensor) and x.dtype is not torch.float64 else x


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Give a module another forward inside the block.  Its hooks stay."""
    own = vars(module).get("forward")
    vars(module)["forward"] = forward
    try:
        yield
    finally:
        if own is None:
            del vars(module)["forward"]
        else:
            vars(module)["forward"] = own
