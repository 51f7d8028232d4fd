"""Parameters of two stacks under common names, so that values can be copied and compared."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from deepstack.base import ConfigError, unknown

Key = tuple[str, int]
"""The name of a parameter in the reference, and its layer, 1..N; 0 outside the layers."""

PATTERN = re.compile(
    r"(?P<name>[\w.]+?)(?P<T>\.T)?(\[(?P<index>\d+)(/(?P<count>\d+))?\])?"
    r"( *(?P<sign>[+-]) *(?P<shift>[\d.]+))?"
)


@dataclass(frozen=True)
class Piece:
    """A parameter, or a part of one, with the number by which it exceeds the reference's.

    index, count: the part, one of `count` equal slices of the first axis; count 0: one row; index
        -1: all of it.
    transposed: whether it is stored as (n_in, n_out).
    """

    parameter: nn.Parameter
    index: int = -1
    count: int = 0
    transposed: bool = False
    shift: float = 0.0

    def view(self, whole: Tensor) -> Tensor:
        """Return the part of a tensor of the parameter's shape."""
        part = whole.t() if self.transposed else whole
        if self.count:
            return part.chunk(self.count)[self.index]
        return part if self.index < 0 else part[self.index]


@dataclass
class Weights:
    """A stack as a function x_0 -> F, and its parameters by the names of the reference.

    module: the owner of all parameters.
    input_change: largest relative change that `run` has made to its input, in place.
    """

    module: nn.Module
    run: Callable[[Tensor], Tensor]
    pieces: dict[Key, list[Piece]] = field(default_factory=dict)
    input_change: float = 0.0

    def value(self, key: Key) -> Tensor:
        """Return a copy of the value that the reference's parameter has here, flat."""
        parts = self.pieces[key]
        return torch.cat([(p.view(p.parameter.detach()) - p.shift).reshape(-1) for p in parts])

    def gradient(self, key: Key) -> Tensor | None:
        """Return the gradient, flat, or None if a part of the parameter is not trained."""
        flat = []
        for part in self.pieces[key]:
            if part.parameter.grad is None:
                return None
            flat.append(part.view(part.parameter.grad).reshape(-1))
        return torch.cat(flat)

    @torch.no_grad()
    def assign(self, key: Key, value: Tensor) -> None:
        """Overwrite the parameter by a flat value of the reference."""
        parts = [(part, part.view(part.parameter.data)) for part in self.pieces[key]]
        for (part, there), piece in zip(
            parts, value.split([there.numel() for _, there in parts]), strict=True
        ):
            there.copy_(piece.view(there.shape) + part.shift)

    def size(self, key: Key) -> int:
        """Return how many numbers the parameter has."""
        return sum(part.view(part.parameter.data).numel() for part in self.pieces[key])

    def clear(self) -> None:
        """Remove all gradients."""
        for parameter in self.module.parameters():
            parameter.grad = None


def at_layer(pattern: str, layer: int) -> str:
    """Return a pattern with the layer's number from 0 in place of {l}, {2l} and {2l+1}."""

    def number(match: re.Match[str]) -> str:
        return str(int(match[1] or 1) * (layer - 1) + int(match[2] or 0))

    return re.sub(r"\{(\d*)l(?:\+(\d+))?\}", number, pattern)


def pieces_of(
    patterns: str | Sequence[str], named: Mapping[str, nn.Parameter], layer: int, where: str
) -> list[Piece]:
    """Return the parts of a module's parameters, by name, that patterns name for a layer.

    Raises ConfigError for a pattern that cannot be read or a parameter that is not there.
    """
    pieces = []
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        text = at_layer(pattern, layer)
        match = PATTERN.fullmatch(text.strip())
        if match is None:
            raise ConfigError(
                f"{where}: found {pattern!r}; allowed a parameter's name with {{l}} for the layer "
                "(from 0), and after it .T, [i/n] (one of n slices), [i] (a row), - 1"
            )
        name = match["name"]
        if name not in named:
            raise ConfigError(f"{where}: {unknown('parameter', name, named)}")
        sign = -1.0 if match["sign"] == "+" else 1.0
        pieces.append(
            Piece(
                named[name],
                int(match["index"] or -1) if match["index"] else -1,
                int(match["count"] or 0),
                bool(match["T"]),
                sign * float(match["shift"] or 0),
            )
        )
    return pieces
