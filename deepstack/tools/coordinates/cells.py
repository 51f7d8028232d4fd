"""Trains one model for a few steps and returns the sizes that a check compares."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import NamedTuple

import torch
from torch import Tensor, nn

from deepstack.base import ConfigError
from deepstack.model import plain_name
from deepstack.tools.coordinates.recording import (
    LOGITS,
    MASKED,
    SOFTMAX,
    Pass,
    call_again,
    record,
)
from deepstack.tools.coordinates.source import Source
from deepstack.tools.coordinates.stacks import Names, Stack, names_of, outline_of

ADDED = 0.4  # least coefficient of a layer's input in its output, if the layer adds to the input


class Value(NamedTuple):
    """A size: root mean square over all numbers of a tensor.

    name: of the module.
    quantity: `size` of its output; `change` of its output since the start; `own`, the change by its
        matrices alone, or by its vectors if it has no matrix, for the input of the start; `branch`,
        a layer's output minus its input.
    step: 0 for the start.
    """

    name: str
    quantity: str
    step: int
    value: float


@dataclass
class Cell:
    """The values of one model.

    order: names of modules in order of execution, each with the size of its output in numbers.
    same: names of modules whose output is the output of an earlier one.
    paths: name -> path, of modules with parameters whose own change is measured.
    final: name of the model's output, as its loss takes it.
    inside: names of modules in layers that repeat with depth.
    shares: name of a layer -> coefficient of its input in its output at the start.
    """

    width: int
    depth: int
    seed: int
    values: list[Value] = field(default_factory=list)
    order: dict[str, int] = field(default_factory=dict)
    same: set[str] = field(default_factory=set)
    paths: dict[str, str] = field(default_factory=dict)
    final: str = ""
    inside: set[str] = field(default_factory=set)
    shares: dict[str, float] = field(default_factory=dict)


def train_cell(
    source: Source,
    width: int,
    depth: int,
    seed: int,
    steps: Sequence[int],
    stacks: dict[str, Stack],
) -> Cell:
    """Train a model for max(steps) steps on one batch; return its values at the start and at them.

    Raises ConfigError if a function of the user fails, or if the first step is not finite.
    """
    model = source.model(width, depth, seed)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            f"{source.name}: no parameter is trained (requires_grad is False for all); allowed a "
            "model with trained parameters"
        )
    names = names_of(outline_of(model), stacks)
    torch.manual_seed(seed)
    with source.guarded(f"batch({seed})"):
        batch = source.batch(seed)
    optimizer = source.optimizer_of(model, width, depth)

    def pass_of(wants_calls: bool = False) -> Pass:
        return record(model, names, lambda: source.loss_of(model, batch), seed, wants_calls)

    start = pass_of(wants_calls=True)
    final = final_of(start)
    if final != LOGITS:
        start.outputs.pop(LOGITS, None)
    calls = {key: call for key, call in start.calls.items() if is_leaf(model, call[0], start)}
    vectors = vectors_of(model, {path for path, _ in calls.values()})
    cell = Cell(width, depth, seed, final=final)
    cell.order = {name: sum(x.numel() for x in calls) for name, calls in start.outputs.items()}
    cell.same = set(start.same)
    cell.paths = {name: path for name, (path, _) in calls.items()}
    cell.inside, cell.shares = inside_of(names, start), start.shares
    for name, outputs in start.outputs.items():
        if name.endswith(SOFTMAX):
            outputs = list(map(content_logits, outputs))
        cell.values.append(Value(name, "size", 0, rms(outputs)))
    for name, branch in start.branches.items():
        cell.values.append(Value(name, "branch", 0, rms([branch])))
    at = f"{source.name}: width {width}, depth {depth}, seed {seed}"
    for step in range(1, max(steps) + 1):
        optimizer.zero_grad()
        loss = source.loss_of(model, batch)
        if not math.isfinite(float(loss.detach())) and step == 1:
            raise ConfigError(f"{at}: the loss is {float(loss.detach())} before training")
        with source.guarded("loss(model, batch).backward()"):
            loss.backward()
        with source.guarded("optimizer.step()"):
            optimizer.step()
        if step in steps:
            now = pass_of()
            cell.values += changes(start, now, step)
            for name, x in call_again(model, calls, vectors).items():
                if name in start.outputs and start.outputs[name][0].shape == x.shape:
                    own = rms([change(x, start.outputs[name][0])])
                    cell.values.append(Value(name, "own", step, own))
    return cell


def changes(start: Pass, now: Pass, step: int) -> list[Value]:
    """Return the change of each output since the start, where its shapes are equal."""
    values = []
    for name, before in start.outputs.items():
        after = now.outputs.get(name, [])
        if [x.shape for x in before] == [x.shape for x in after]:
            pairs = list(zip(after, before, strict=True))
            if name.endswith(SOFTMAX):
                moved = [(x - y)[(x > MASKED) & (y > MASKED)] for x, y in pairs]
            else:
                moved = [change(x, y) for x, y in pairs]
            values.append(Value(name, "change", step, rms(moved)))
    return values


def change(now: Tensor, before: Tensor) -> Tensor:
    """Return the differences of all numbers but those that a mask made -inf."""
    return (now - before)[(now != -math.inf) & (before != -math.inf)]


def content_logits(x: Tensor) -> Tensor:
    """Return logits of attention without the part that all members of the batch share.

    That part holds the biases of positions, whose size does not depend on width.  Masked logits are
    left out.
    """
    shown = (x > MASKED).all(dim=0)
    return (x - x.mean(dim=0))[:, shown] if len(x) > 1 else x[:, shown]


def plain_layers(cells: Sequence[Cell]) -> list[str]:
    """Return the names of layers that do not add to their input, by the mean over all models."""
    names = dict.fromkeys(name for cell in cells for name in cell.shares)
    means = {name: mean(c.shares[name] for c in cells if name in c.shares) for name in names}
    return [name for name, share in means.items() if share < ADDED]


def rms(tensors: Sequence[Tensor]) -> float:
    """Return the root mean square of all numbers in some tensors but -inf, which masks give."""
    tensors = [x[x != -math.inf] for x in tensors]
    count = sum(x.numel() for x in tensors)
    squares = sum(float(x.cpu().double().square().sum()) for x in tensors)
    return math.sqrt(squares / count) if count else 0.0


def is_leaf(model: nn.Module, path: str, start: Pass) -> bool:
    """Return whether no other module with parameters is called inside of a module."""
    for name, module in model.named_modules():
        inner = plain_name(name)
        below = inner != path and (inner.startswith(f"{path}.") or not path)
        if below and inner in start.called and any(True for _ in module.parameters()):
            return False
    return True


def vectors_of(model: nn.Module, paths: set[str]) -> dict[str, dict[str, Tensor]]:
    """Return path -> copies of the biases and gains of modules that have matrices too."""
    found = {}
    for name, module in model.named_modules():
        if (path := plain_name(name)) in paths:
            parameters = dict(module.named_parameters())
            if any(p.ndim > 1 for p in parameters.values()):
                vectors = {key: p for key, p in parameters.items() if p.ndim < 2}
                found[path] = {key: p.detach().clone() for key, p in vectors.items()}
    return found


def final_of(start: Pass) -> str:
    """Return the name of the model's output: the module's, or the logits that the loss takes."""
    for name in ("", LOGITS):
        name = start.same.get(name, name)
        if name in start.outputs:
            return name
    return next(reversed(start.outputs), "")


def inside_of(names: Names, start: Pass) -> set[str]:
    """Return the names of modules in layers, and of their softmaxes and inputs."""
    inside = {key for path in names.inside for key in names.keys[path]}
    return {name for name in start.outputs if name in inside or name.rpartition(" ")[0] in inside}
