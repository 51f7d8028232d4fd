"""Layer diagnostics: pure functions of a snapshot with one value per layer or per sublayer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import update_wrapper
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from deepstack.errors import PluginError
from deepstack.registry import Registry, place_of

if TYPE_CHECKING:
    from deepstack.diagnostics.snapshot import Snapshot

Values = Tensor | Mapping[str, Tensor]
Function = TypeVar("Function", bound="Callable[[Snapshot], Values]")
SUBLAYERS = ("attention", "cross_attention", "feed_forward")


@dataclass
class Diagnostic:
    """A function of a snapshot and its place in a run folder.

    files: the names of its files: its own name, or one name per part.
    """

    function: Callable[[Snapshot], Values]
    symbol: str
    unit: str
    files: list[str]

    def __post_init__(self) -> None:
        update_wrapper(self, self.function)  # its name, docstring and place in a file

    def __call__(self, snapshot: Snapshot) -> Values:
        return self.function(snapshot)


DIAGNOSTICS: Registry[Diagnostic] = Registry("diagnostic")


def diagnostic(
    name: str, symbol: str, *, unit: str = "", parts: tuple[str, ...] = SUBLAYERS
) -> Callable[[Function], Function]:
    """Register a function Snapshot -> (depth,), or (depth, S) with one value per sublayer.

    It may also return part -> (depth,) for any of `parts`, or an empty mapping.  Each part has a
    separate file, `<name>_<part>`.  A diagnostic with one value per layer has parts=().  Raises
    PluginError if another diagnostic has a file of that name.
    """

    def register(function: Function) -> Function:
        files = [f"{name}_{part}" for part in parts] or [name]
        for other, one in DIAGNOSTICS.items():
            if other != name and (both := {name, *files} & {other, *one.files}):
                raise PluginError(
                    f"diagnostic {name!r}: its file {min(both)} is also one of {other!r}; choose "
                    "another name"
                )
        DIAGNOSTICS.register(name, Diagnostic(function, symbol, unit, files))
        return function

    return register


@diagnostic("grad_norm", "‖∂L/∂θ_l‖", parts=())
def grad_norm(snapshot: Snapshot) -> Tensor:
    """Norm of the probe loss's gradient by the trained parameters of each layer."""
    return snapshot.grad_norm


@diagnostic("matrix_grad_norm", "‖∂L/∂W_l‖", parts=())
def matrix_grad_norm(snapshot: Snapshot) -> Tensor:
    """Norm of the probe loss's gradient by the trained weight matrices of each layer."""
    return snapshot.matrix_grad_norm


@diagnostic("param_norm", "‖θ_l‖", parts=())
def param_norm(snapshot: Snapshot) -> Tensor:
    """Norm of the parameters of each layer."""
    return snapshot.param_norm


@diagnostic("param_update_norm", "‖θ_l,t − θ_l,t−1‖", parts=())
def param_update_norm(snapshot: Snapshot) -> Tensor:
    """Norm of the change that the last step made to the parameters of each layer."""
    return snapshot.param_update_norm


@diagnostic("stream_norm", "‖x_l‖", parts=())
def stream_norm(snapshot: Snapshot) -> Tensor:
    """Mean over probe tokens of ‖x_l‖₂, the stream that leaves each layer."""
    return snapshot.stream[1:].mean(dim=-1)


def evaluate(snapshots: Sequence[Snapshot]) -> dict[str, Tensor]:
    """Return every registered diagnostic, one (layers,) tensor per file of the run folder.

    layers: first the encoder's, then the decoder's; NaN where a stack has no such sublayer.
    """
    by_snapshot = [_values(snapshot) for snapshot in snapshots]
    names = list(dict.fromkeys(name for values in by_snapshot for name in values))

    nothing = [torch.full_like(values["grad_norm"], float("nan")) for values in by_snapshot]
    pairs = list(zip(by_snapshot, nothing, strict=True))
    return {name: torch.cat([values.get(name, nan) for values, nan in pairs]) for name in names}


def _values(snapshot: Snapshot) -> dict[str, Tensor]:
    values: dict[str, Tensor] = {}
    depth, count = len(snapshot.grad_norm), len(snapshot.sublayers)
    for name, function in DIAGNOSTICS.items():
        before = versions(snapshot)
        value = function(snapshot)
        if versions(snapshot) != before:
            raise PluginError(
                f"diagnostic {name!r}: {place_of(function)}it changes the snapshot in place, which "
                "other diagnostics read; write a new tensor, or .clone() it first"
            )
        if isinstance(value, Tensor) and value.shape == (depth, count):
            value = dict(zip(snapshot.sublayers, value.unbind(dim=1), strict=True))
        if isinstance(value, Mapping):
            files = {f"{name}_{part}": one for part, one in value.items()}
        else:
            files = {name: value}
        for file, one in files.items():
            if not isinstance(one, Tensor) or one.shape != (depth,):
                shape = f"{tuple(one.shape)}" if isinstance(one, Tensor) else type(one).__name__
                raise PluginError(
                    f"diagnostic {name!r}: found {shape} for {file}; allowed a "
                    f"tensor ({depth},), one value a layer, or ({depth}, {count}), one a sublayer "
                    f"({place_of(function).rstrip(': ')})"
                )
        values |= files
    return values


def versions(snapshot: Snapshot) -> list[int]:
    """Return the number of in-place changes of each tensor of a snapshot."""
    fields = [value for name, value in vars(snapshot).items() if name != "shared"]
    return [leaf._version for leaf in tree_leaves(fields) if isinstance(leaf, Tensor)]


def describe() -> dict[str, tuple[str, str, str]]:
    """Return file name -> symbol, unit, one sentence, for the run folder's columns.json."""
    return {
        key: (one.symbol, one.unit, (inspect.getdoc(one) or "").split("\n")[0])
        for name, one in DIAGNOSTICS.items()
        for key in (name, *one.files)
    }
