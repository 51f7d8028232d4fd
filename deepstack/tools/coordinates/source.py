"""The model under check: a user's file, module or functions."""

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepstack.base import ConfigError, nearest
from deepstack.model import call_model, guarded, run_file

Build = Callable[..., nn.Module]
"""(width, depth, seed) -> a fresh model."""
Batch = Callable[[int], Any]
"""seed -> a batch."""
Loss = Callable[[nn.Module, Any], Tensor | None]
"""(model, batch) -> the training loss, with its graph."""
MakeOptimizer = Callable[[nn.Module, int, int], torch.optim.Optimizer]
"""(model, width, depth) -> its optimizer."""

LINES = {
    "build": "def build(width, depth, seed):  # returns a torch.nn.Module",
    "batch": "def batch(seed):  # returns (inputs, targets), or what your loss takes",
    "loss": "def loss(model, batch):  # returns a number with its graph",
    "optimizer": "def optimizer(model, width, depth):  # returns a torch.optim.Optimizer",
}
"""The line to type for each function."""
RATE = 1e-3  # of Adam, where the file has no optimizer


@dataclass(frozen=True)
class Source:
    """The functions of a check; name: of messages, file: of the lines of errors."""

    name: str
    build: Build
    batch: Batch
    loss: Loss
    optimizer: MakeOptimizer
    file: str = ""

    @property
    def notes(self) -> list[str]:
        """Sentences on functions that the file does not have."""
        if self.optimizer is default_optimizer:
            return [f"{self.name} has no optimizer: Adam with the rate {RATE:g} for all parameters"]
        return []

    def guarded(self, call: str) -> AbstractContextManager[None]:
        """Return a context that raises errors of the user's code with the line and the call."""
        return guarded(f"{self.name}: {call}", self.file)

    def model(self, width: int, depth: int, seed: int) -> nn.Module:
        """Return a fresh model.  Raises ConfigError if `build` fails or returns something else."""
        call = f"build(width={width}, depth={depth}, seed={seed})"
        torch.manual_seed(seed)
        with self.guarded(call):
            model = self.build(width=width, depth=depth, seed=seed)
        if not isinstance(model, nn.Module):
            raise ConfigError(
                f"{self.name}: {call} returned {type(model).__name__}; allowed a torch.nn.Module"
            )
        return model

    def optimizer_of(self, model: nn.Module, width: int, depth: int) -> torch.optim.Optimizer:
        """Return the optimizer of a model."""
        call = f"optimizer(model, {width}, {depth})"
        with self.guarded(call):
            made = self.optimizer(model, width, depth)
        if not (hasattr(made, "step") and hasattr(made, "zero_grad")):
            raise ConfigError(
                f"{self.name}: {call} returned {type(made).__name__}; allowed a "
                "torch.optim.Optimizer"
            )
        return made

    def loss_of(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the loss.  Raises ConfigError if it is not one number."""
        with self.guarded("loss(model, batch)"):
            value = self.loss(model, batch)
        if self.loss is default_loss and value is None:
            given = shapes_of(model, batch) or type(batch).__name__
            raise ConfigError(
                f"{self.name}: loss is missing, and the batch does not tell it: found {given}; "
                "allowed (inputs, targets) for a model that returns a tensor, or a mapping for one "
                f"whose output has `loss`; else type:\n    {LINES['loss']}"
            )
        if not isinstance(value, Tensor) or value.numel() != 1:
            found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ConfigError(
                f"{self.name}: loss(model, batch) returned {found}; allowed a tensor with one "
                "number"
            )
        return value


def load_source(source: Any, **functions: Any) -> Source:
    """Return the functions of a file, a module, or of `build` and keywords.

    functions: batch, loss and optimizer, in place of the file's; None: the file's.
    Raises ConfigError with the line to type for a missing function.
    """
    file = ""
    if isinstance(source, str | Path):
        source = run_file(Path(source), "docs/coordinates.md")
    given = {name: function for name, function in functions.items() if function is not None}
    if isinstance(source, ModuleType):
        file = str(getattr(source, "__file__", ""))
        name = Path(file).name or source.__name__
        found = {key: getattr(source, key) for key in LINES if hasattr(source, key)} | given
        written = [key for key in vars(source) if not key.startswith("_")]
    else:
        name = str(getattr(source, "__qualname__", source))
        found, written = {"build": source} | given, []
        file = str(getattr(getattr(source, "__code__", None), "co_filename", ""))
    for key in ("build", "batch"):
        if key not in found:
            near = nearest(key, written)
            raise ConfigError(
                f"{name}: {key} is missing"
                + (f"; rename {near!r}, or type:" if near else "; type:")
                + f"\n    {LINES[key]}"
            )
    for key, function in found.items():
        if not callable(function):
            raise ConfigError(
                f"{name}: {key} is {type(function).__name__}; type:\n    {LINES[key]}"
            )
    for key, function in found.items():
        refuse_parameters(name, key, function)
    return Source(
        name,
        found["build"],
        found["batch"],
        found.get("loss", default_loss),
        found.get("optimizer", default_optimizer),
        file,
    )


def refuse_parameters(name: str, key: str, function: Callable[..., Any]) -> None:
    """Raise ConfigError unless a function takes the arguments of the call, and needs no others."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # some built-in functions have no signature
        return
    try:
        if key == "build":
            signature.bind(width=0, depth=0, seed=0)
        else:
            signature.bind(*range({"batch": 1, "loss": 2, "optimizer": 3}[key]))
    except TypeError as error:
        raise ConfigError(f"{name}: {key} has {signature}; type:\n    {LINES[key]}") from error


def default_optimizer(model: nn.Module, width: int, depth: int) -> torch.optim.Optimizer:
    """Return Adam with one rate for all parameters."""
    return torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=RATE)


def shapes_of(model: nn.Module, batch: Any) -> str:
    """Return the shapes of an output and of targets that do not fit, or ''."""
    if not (isinstance(batch, tuple | list) and len(batch) == 2):
        return ""
    output, targets = call_model(model, batch[0]), batch[1]
    if not (isinstance(output, Tensor) and isinstance(targets, Tensor)):
        return ""
    return f"an output {tuple(output.shape)} and targets {tuple(targets.shape)}"


def default_loss(model: nn.Module, batch: Any) -> Tensor | None:
    """Return the loss of a batch whose kind tells it, or None.

    A mapping is unpacked, and the output has `loss`, as an attribute or a key.  Of a pair (inputs,
    targets) it is the cross-entropy for targets of integers, and the mean square otherwise.
    """
    if isinstance(batch, Mapping):
        output = call_model(model, batch)
        value = getattr(output, "loss", None)
        if value is None and isinstance(output, Mapping):
            value = output.get("loss")
        if isinstance(value, Tensor):
            return value
    elif isinstance(batch, tuple | list) and len(batch) == 2:
        inputs, targets = batch
        output = call_model(model, inputs)
        if isinstance(output, Tensor) and isinstance(targets, Tensor):
            if targets.is_floating_point() and targets.shape == output.shape:
                return F.mse_loss(output, targets)
            if not targets.is_floating_point() and targets.shape == output.shape[:-1]:
                return F.cross_entropy(output.flatten(0, -2), targets.flatten())
    return None
