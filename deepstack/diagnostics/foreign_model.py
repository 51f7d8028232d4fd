"""Runs a PyTorch model that deepstack did not build, and reads the outputs of its modules.

Nothing here changes the model: modes, random states, gradients and parameters are restored bit for
bit.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from deepstack.errors import ConfigError
from deepstack.registry import nearest

T = TypeVar("T")

Layers = str | Sequence[nn.Module] | None
"""The layers: modules, or the name of the module that holds them; None: longest ModuleList."""


def call_model(model: nn.Module, batch: Any) -> Any:
    """Call the model with the batch unpacked according to its type."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def copied(batch: Any) -> Any:
    """Return the batch with copies of its tensors, so that a loader may reuse its memory.

    Raises ConfigError for a batch that is not a tensor, tuple, list or mapping.
    """
    if isinstance(batch, Mapping):
        batch = dict(batch)
    elif not isinstance(batch, (Tensor, tuple, list)):
        raise ConfigError(
            f"batch: found {type(batch).__name__}; allowed a tensor, given as model(batch), a "
            "tuple or list, as model(*batch), or a mapping, as model(**batch)"
        )
    return tree_map_only(Tensor, lambda x: x.detach().clone(), batch)


def find_module(modules: Mapping[str, nn.Module], name: str) -> nn.Module:
    """Return the module of this name.  Raises ConfigError with the nearest name."""
    if name not in modules:
        near = nearest(name, modules)
        hint = f"did you mean {near!r}?" if near else "allowed a name of model.named_modules()"
        raise ConfigError(f"unknown module {name!r}; {hint}")
    return modules[name]


def find_layers(modules: Mapping[str, nn.Module], layers: Layers) -> tuple[str, list[nn.Module]]:
    """Return the name of the container of the layers, and the layers."""
    if isinstance(layers, str):
        children = list(find_module(modules, layers).children())
        if not children:
            raise ConfigError(f"layers: {layers!r} holds no modules")
        return layers, children
    if layers is not None:
        return "those given", list(layers)
    lists = {n: list(m) for n, m in modules.items() if isinstance(m, nn.ModuleList) and len(m)}
    if not lists:
        raise ConfigError(
            "layers: the model has no ModuleList; name what holds the layers, as in "
            "layers='blocks', or layers=() for no values by layer"
        )
    return max(lists.items(), key=lambda item: len(item[1]))


def last_module(layer: nn.Module) -> nn.Module:
    """Return the module that outputs the stream after a layer: itself, or a container's last child.

    A ModuleList is never called: x-transformers keeps a sublayer's norm, block and residual in one.
    """
    while isinstance(layer, (nn.ModuleList, nn.ModuleDict)) and len(layer):
        layer = list(layer.children())[-1]
    return layer


def tensor_of(output: Any) -> Tensor | None:
    """Return the hidden state of a module's output: a tensor, `last_hidden_state`, or the first."""
    if isinstance(output, (tuple, list)) and output:
        return tensor_of(output[0])
    if isinstance(output, Mapping):
        output = output.get("last_hidden_state")
    output = getattr(output, "last_hidden_state", output)
    return output if isinstance(output, Tensor) else None


def as_float(x: Tensor) -> Tensor:
    """Return x detached, as float32 or float64; a nested tensor as its tokens, (tokens, d)."""
    x = torch.cat(x.detach().unbind()) if x.is_nested else x.detach()
    return x if x.dtype is torch.float64 else x.float()


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Disable training mode, gradients and autocast; restore modes and random states afterwards."""
    training = [module for module in model.modules() if module.training]
    devices = {t.device for t in model.parameters() if t.device.type == "cuda"}
    device = next((t.device.type for t in model.parameters()), "cpu")
    plain, numbers = random.getstate(), np.random.get_state()
    for module in training:
        module.training = False
    try:
        with (
            torch.random.fork_rng(devices=[d.index for d in devices]),
            torch.no_grad(),
            torch.autocast(device, enabled=False),
        ):
            yield
    finally:
        for module in training:
            module.training = True
        random.setstate(plain)
        np.random.set_state(numbers)


@contextmanager
def outputs_of(
    modules: Iterable[nn.Module], take: Callable[[Tensor], T]
) -> Iterator[list[tuple[nn.Module, T]]]:
    """Collect each call of these modules that returns a tensor x, as (module, take(x)), in order.

    While it has hooks, nn.TransformerEncoder uses other kernels: F may differ in its last bits.
    """
    calls: list[tuple[nn.Module, T]] = []

    def record(module: nn.Module, args: Any, output: Any) -> None:
        x = tensor_of(output)
        if x is not None:
            calls.append((module, take(x)))

    with ExitStack() as hooks:
        for module in set(modules):
            hooks.callback(module.register_forward_hook(record).remove)
        yield calls
