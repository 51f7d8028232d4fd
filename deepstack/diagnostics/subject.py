"""Measurements of a PyTorch model that deepstack did not build: F, layers, parameter groups.

Nothing here changes the model: modes, random states, gradients and parameters are restored bit for
bit.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from itertools import count, cycle
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from deepstack.errors import ConfigError
from deepstack.registry import nearest

T = TypeVar("T")

Hidden = str | nn.Module | Callable[[nn.Module, Any], Tensor] | None
"""Source of F: a module, or its name, whose output is F; a function of model and batch; or None
for the model's return value."""

Layers = str | Sequence[nn.Module] | None
"""The layers: modules, or the name of the module that holds them; None: longest ModuleList."""

Groups = Mapping[str, str | Sequence[str]]
"""Name -> patterns of parameter names, as in `{"attention": "*.self_attn.*"}`."""

WHOLE = ("whole", "unexplained")
REST = "rest"


class Subject:
    """A model under observation: F on the probe batch, ‖x_l‖ after each layer, shares of ‖ΔF‖.

    F is taken in evaluation mode, without autocast, as float32 at least.  Raises ConfigError where
    the arguments do not fit the model, with a suggestion to type instead.
    """

    def __init__(self, model: nn.Module, batch: Any, hidden: Hidden, layers: Layers) -> None:
        self.model, self.batch = model, copied(batch)
        self.parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        if not self.parameters:
            kind = type(model).__name__
            raise ConfigError(f"model: found {kind} without a trained parameter; nothing to probe")
        self.modules = dict(model.named_modules())
        self.layers_name, self.layers = find_layers(self.modules, layers)
        self._source = find_module(self.modules, hidden) if isinstance(hidden, str) else hidden
        self.f_name = hidden if isinstance(hidden, str) else "given" if hidden else "output"
        # before F: the width of the stream says whether an output is a hidden state
        self.width: int | None = self._streams()[-1][1] if self.layers else None
        self.initial = self.hidden()
        self.normalised = self._ends_with_norm()

    def hidden(self) -> Tensor:
        """Return F on the probe batch, (…, width), detached."""
        source = self._source
        with undisturbed(self.model):
            if isinstance(source, nn.Module):
                F = self._outputs([source], lambda x: x)[0]
                if F is None:
                    raise ConfigError(f"hidden: {self.f_name} gives no tensor in model(batch)")
            elif source is not None:
                F = source(self.model, self.batch)
                if not isinstance(F, Tensor):
                    kind = type(F).__name__
                    raise ConfigError(f"hidden: the function gave {kind}; it must give a tensor")
            else:
                returned = self._run()
                F = tensor_of(returned)
                if F is None or not self._is_hidden_state(F.shape):
                    raise ConfigError(self._no_hidden_state(returned))
        return as_float(F).clone()  # a model may give the same storage twice

    def stream_norm(self) -> Tensor:
        """Return the mean over tokens of ‖x_l‖₂, the stream after each layer, (layers,)."""
        return torch.stack([norm for norm, _ in self._streams()]).float()

    def by_layer(self, tensors: Callable[[nn.Parameter], Tensor | None]) -> Tensor:
        """Return the norm over the tensors of each layer's parameters, (layers,); NaN for none.

        tensors: a parameter -> its value, its gradient or its change.
        """
        norms = []
        for layer in self.layers:
            parts = [tensors(p) for p in layer.parameters() if p.requires_grad]
            norm = norm_of([part for part in parts if part is not None])
            norms.append(norm.to(self.initial.device))
        return torch.stack(norms) if norms else torch.zeros(0)

    @torch.no_grad()
    def attribution(
        self, groups: Mapping[str, Sequence[str]], start: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return ‖F(θ_0 + Δθ_g) − F_0‖ for each group g, the whole ‖ΔF‖, and the unexplained rest.

        All are means over tokens.  groups: name -> names of parameters; start: θ_0, with buffers.
        `unexplained` is the norm of ΔF − Σ_g (F(θ_0 + Δθ_g) − F_0): interactions of groups.
        """
        moved = self.hidden() - self.initial
        explained = torch.zeros_like(moved)
        tensors = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        norms = {}
        for name, members in groups.items():
            moving = set(members)
            with holding({tensors[n]: v for n, v in start.items() if n not in moving}):
                alone = self.hidden() - self.initial
            explained += alone
            norms[name] = alone.norm(dim=-1).mean()
        norms["whole"] = moved.norm(dim=-1).mean()
        norms["unexplained"] = (moved - explained).norm(dim=-1).mean()
        return norms

    def state(self) -> dict[str, Tensor]:
        """Return copies of the trained parameters and the persistent buffers, by name."""
        keys = self.model.state_dict().keys()
        buffers = {n: b for n, b in self.model.named_buffers() if n in keys}
        return {n: t.detach().clone() for n, t in (self.parameters | buffers).items()}

    def groups(self, patterns: Groups | None) -> dict[str, list[str]]:
        """Return group -> names of parameters; every trained parameter is in one group.

        None: one group per child of a layer (`self_attn`, `linear1`, …), and per child of the
        model elsewhere.  Parameters that match no pattern are the group `rest`.  Raises
        ConfigError for a pattern without a match and for a parameter in two groups.
        """
        if patterns is not None:
            return names_by_group(list(self.parameters), patterns)
        layers = set(self.layers)
        prefixes = [f"{name}." for name, module in self.modules.items() if module in layers]
        groups: dict[str, list[str]] = {}
        for name in self.parameters:
            prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
            child = name.removeprefix(prefix).split(".")[0]
            groups.setdefault(child, []).append(name)
        return groups

    def _run(self) -> Any:
        return call_model(self.model, self.batch)

    def _outputs(self, modules: Sequence[nn.Module], take: Callable[[Tensor], T]) -> list[T | None]:
        """Return `take(output)` of each module in a forward pass on the probe batch."""
        with undisturbed(self.model), outputs_of(modules, take) as outputs:
            self._run()
        return outputs

    def _streams(self) -> list[tuple[Tensor, int]]:
        """Return mean ‖x_l‖₂ and width of the stream after each layer."""

        def size(x: Tensor) -> tuple[Tensor, int]:
            return as_float(x).norm(dim=-1).mean(), x.shape[-1]

        sizes = self._outputs([last_module(layer) for layer in self.layers], size)
        if None in sizes:
            raise ConfigError(
                f"layers: number {sizes.index(None) + 1} of {self.layers_name} gives no tensor in "
                "model(batch); name what holds the layers, as in layers='encoder.layers', or "
                "layers=() for no values by layer"
            )
        return [size for size in sizes if size is not None]

    def _ends_with_norm(self) -> bool:
        """Return whether F is the output of a norm module, which fixes its scale."""
        norms = [m for m in self.modules.values() if "norm" in type(m).__name__.lower()]
        # hooks may change the kernel (nn.TransformerEncoder), so both passes have them
        with outputs_of(norms, lambda x: None):
            F = self.hidden()
        with outputs_of(norms, lambda x: torch.equal(as_float(x), F)) as equal:
            self.hidden()
        return any(equal)

    def _is_hidden_state(self, shape: torch.Size) -> bool:
        return len(shape) > 1 and self.width in (None, shape[-1])

    def _no_hidden_state(self, returned: Any) -> str:
        """Return the error message for a model whose output is not F."""
        names, calls = [name for name in self.modules if name], count()
        outputs = self._outputs(
            [self.modules[name] for name in names], lambda x: (next(calls), x.shape)
        )
        ran = sorted((*output, name) for output, name in zip(outputs, names, strict=True) if output)
        fits = [name for _, shape, name in ran if self._is_hidden_state(shape)]
        F = tensor_of(returned)
        text = type(returned).__name__ if F is None else f"of shape {tuple(F.shape)}"
        width = f" of width {self.width}" if self.width else ""
        return (
            f"hidden: what model(batch) returns is {text}, no hidden state{width}; name the module "
            f"whose output is F, as in hidden={(fits or ['encoder'])[-1]!r}\n"
            f"modules with such an output: {', '.join(fits[-6:]) or 'none'}; or give a function of "
            "model and batch"
        )


def names_by_group(names: Sequence[str], patterns: Groups) -> dict[str, list[str]]:
    """Return group -> names of the parameters that match its patterns, and the others as `rest`.

    Raises ConfigError for a pattern without a match and for a parameter in two groups.
    """
    groups: dict[str, list[str]] = {}
    owner: dict[str, str] = {}
    for group, wanted in patterns.items():
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", group) or group in (*WHOLE, REST, "step"):
            raise ConfigError(
                f"groups: found the name {group!r}; allowed letters, digits and _ . -, but not "
                f"step, {REST}, {', '.join(WHOLE)}"
            )
        for pattern in [wanted] if isinstance(wanted, str) else wanted:
            matches = [name for name in names if fnmatchcase(name, pattern)]
            if not matches:
                raise ConfigError(
                    f"groups: {group}: no trained parameter is named {pattern!r}; "
                    f"one is named {nearest(pattern, names) or names[0]!r}"
                )
            for name in matches:
                if owner.setdefault(name, group) != group:
                    raise ConfigError(f"groups: {name} is in {owner[name]} and in {group}")
        groups[group] = [name for name, of in owner.items() if of == group]
    rest = [name for name in names if name not in owner]
    return groups | ({REST: rest} if rest else {})


def call_model(model: nn.Module, batch: Any) -> Any:
    """Call the model with the batch unpacked according to its type."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def find_module(modules: Mapping[str, nn.Module], name: str) -> nn.Module:
    """Return the module of this name.  Raises ConfigError with the nearest name."""
    if name not in modules:
        near = nearest(name, list(modules))
        hint = f"; did you mean {near!r}?" if near else ""
        raise ConfigError(f"the model has no module {name!r}{hint}")
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
    lists = {n: m for n, m in modules.items() if isinstance(m, nn.ModuleList) and len(m)}
    if not lists:
        raise ConfigError(
            "layers: the model has no ModuleList; name what holds the layers, as in "
            "layers='blocks', or layers=() for no values by layer"
        )
    name = max(lists, key=lambda n: len(lists[n]))
    return name, list(lists[name])


def last_module(layer: nn.Module) -> nn.Module:
    """Return the module that outputs the stream after a layer: itself, or a container's last child.

    A ModuleList is never called: x-transformers keeps a sublayer's norm, block and residual in one.
    """
    while isinstance(layer, (nn.ModuleList, nn.ModuleDict)) and len(layer):
        layer = list(layer.children())[-1]
    return layer


def tensor_of(output: Any) -> Tensor | None:
    """Return the hidden state of a module's output: a tensor, `last_hidden_state`, or the first."""
    if isinstance(output, Tensor):
        return output
    named = getattr(output, "last_hidden_state", None)
    if named is None and isinstance(output, Mapping):
        named = output.get("last_hidden_state")
    if isinstance(named, Tensor):
        return named
    if isinstance(output, (tuple, list)) and output:
        return tensor_of(output[0])
    return None


def as_float(x: Tensor) -> Tensor:
    """Return x detached, as float32 or float64; a nested tensor as its tokens, (tokens, d)."""
    x = torch.cat(x.detach().unbind()) if x.is_nested else x.detach()
    return x if x.dtype is torch.float64 else x.float()


def norm_of(tensors: Sequence[Tensor]) -> Tensor:
    """Return sqrt(sum ‖t‖²), 0-d, as the norm of the norms, in float32 at least; NaN for none."""
    if not tensors:
        return torch.tensor(float("nan"))
    # a float16 norm would overflow at 65504; a bfloat16 norm would have three digits
    tensors, half = [t.detach() for t in tensors], (torch.float16, torch.bfloat16)
    parts = [torch.linalg.vector_norm(t, dtype=torch.float32) for t in tensors if t.dtype in half]
    full = [t for t in tensors if t.dtype not in half]
    parts += torch._foreach_norm(full) if full else []
    device = parts[0].device  # a model may use several
    return torch.linalg.vector_norm(torch.stack([part.to(device).float() for part in parts]))


def copied(batch: Any) -> Any:
    """Return the batch with copies of its tensors, so that a loader may reuse its memory.

    Raises ConfigError for a batch that is not a tensor, tuple, list or mapping.
    """

    def copied_value(value: Any) -> Any:
        return value.detach().clone() if isinstance(value, Tensor) else value

    if isinstance(batch, Tensor):
        return copied_value(batch)
    if isinstance(batch, Mapping):
        return {key: copied_value(value) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return type(batch)(map(copied_value, batch)) if type(batch) in (tuple, list) else batch
    raise ConfigError(
        f"batch: found {type(batch).__name__}; allowed a tensor, given as model(batch), a tuple or "
        "list, as model(*batch), or a mapping, as model(**batch)"
    )


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
    modules: Sequence[nn.Module], take: Callable[[Tensor], T]
) -> Iterator[list[T | None]]:
    """Collect `take(output)` of each module, from its last call inside the block.

    A module listed several times, such as a layer with shared weights, has one entry for each of
    its calls, in their order.  None where a module returns no tensor.
    """
    outputs: list[T | None] = [None] * len(modules)
    indices: dict[nn.Module, list[int]] = {}
    for index, module in enumerate(modules):
        indices.setdefault(module, []).append(index)
    turns = {module: cycle(entries) for module, entries in indices.items()}

    def record(module: nn.Module, args: Any, output: Any) -> None:
        x = tensor_of(output)
        outputs[next(turns[module])] = None if x is None else take(x)

    with ExitStack() as hooks:
        for module in turns:
            hooks.callback(module.register_forward_hook(record).remove)
        yield outputs


@contextmanager
def holding(values: Mapping[Tensor, Tensor]) -> Iterator[None]:
    """Give the parameters these values inside the block, and restore their storage afterwards."""
    before = {parameter: parameter.data for parameter in values}
    try:
        for parameter, value in values.items():
            parameter.data = value
        yield
    finally:
        for parameter, data in before.items():
            parameter.data = data
