"""A PyTorch model that deepstack did not build, under observation: F, its layers, its groups.

Nothing here changes the model: all that it holds, random states, gradients and parameters are
restored bit for bit.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from deepstack.base import ConfigError
from deepstack.diagnostics import token_distance
from deepstack.model import (
    Layers,
    call_model,
    copied,
    find_layers,
    find_module,
    is_sharded,
    last_module,
    outputs_of,
    plain_name,
    refuse_noise,
    refuse_partial_parameters,
    reshard,
    tensor_of,
    trainable,
    undisturbed,
    unwrapped,
    written_parameters,
)


def as_float(x: Tensor) -> Tensor:
    """Return x detached, as float32 or float64, with the same norm over its last axis.

    A nested tensor becomes its tokens, (tokens, d), and complex numbers (real, imaginary), 2 d.
    """
    x = torch.cat(x.detach().unbind()) if x.is_nested else x.detach()
    if x.is_complex():
        x = torch.view_as_real(x.resolve_conj()).reshape(*x.shape[:-1], -1)
    return x if x.dtype is torch.float64 else x.float()


def stored_numbers(x: Tensor) -> Tensor:
    """Return a tensor with the norm of x: x, or the entries of a sparse x, each once."""
    if x.layout is torch.sparse_coo:
        return x.coalesce().values()
    return x if x.layout is torch.strided else x.to_dense()


Hidden = str | nn.Module | Callable[[nn.Module, Any], Tensor] | None
"""Source of F: a module, or its name, whose output is F; a function of model and batch; or None
for the model's return value."""


class ExternalModel:
    """A model with its probe batch: F, ‖x_l‖ after each layer, shares of ‖ΔF‖.

    F is taken in evaluation mode, without autocast, as float32 at least.  Raises ConfigError where
    the arguments do not fit the model, with a suggestion to type instead.

    f_width: the width of F.
    given: the model as it was given.
    model: that inside of torch.compile and of data parallel wrappers.
    written: parameters that a forward pass writes into.
    is_sharded: whether every process has a part of it, so that all must call each method.
    """

    def __init__(self, model: nn.Module, batch: Any, hidden: Hidden, layers: Layers) -> None:
        self.given, self.model, self.batch = model, unwrapped(model), copied(batch)
        reshard(self.model)
        refuse_partial_parameters(self.model)
        self.parameters = trainable(self.model)
        self.is_sharded = any(map(is_sharded, self.parameters.values()))
        if not any(p.requires_grad for p in self.parameters.values()):
            kind = type(self.model).__name__
            raise ConfigError(f"model: found {kind} without a trained parameter; nothing to probe")
        self.modules = dict(self.model.named_modules())
        self.f_name = hidden if isinstance(hidden, str) else "given" if hidden else "output"
        self._source = find_module(self.modules, hidden) if isinstance(hidden, str) else hidden
        self.written: list[nn.Parameter] = []
        self.written = written_parameters(self.given, self._value, self.batch)
        self.layers_name, self.layers = self._find_layers(layers)
        # before F: the width of the stream says whether an output is a hidden state
        self.width = self._streams()[-1][1] if self.layers else None
        self.initial = self.hidden()
        refuse_noise(self.given, self.hidden)
        self.normalised = self._ends_with_norm()

    def _find_layers(self, layers: Layers) -> tuple[str, list[nn.Module]]:
        """Return the layers, by default ones that return F's width."""
        if layers is not None:
            return find_layers(self.model, self.batch, layers, written=self.written)
        with self._pass():
            F = tensor_of(self._value())
        width = None if F is None or F.ndim < 2 else F.shape[-1]
        try:
            return find_layers(self.model, self.batch, None, width, self.written)
        except ConfigError:
            if self._source is not None and F is not None:
                raise
            # the output may be logits
            return find_layers(self.model, self.batch, None, written=self.written)

    def _pass(self) -> AbstractContextManager[None]:
        """Return the context of one pass, after which all is as before."""
        return undisturbed(self.given, self.batch, written=self.written)

    def hidden(self) -> Tensor:
        """Return F on the probe batch, (…, width), detached."""
        with self._pass():
            value = self._value()
            F = tensor_of(value)
            found = None if F is None else as_float(F).clone()  # the model may keep the tensor
        if F is None or found is None or (self._source is None and not self._is_hidden_state(F)):
            raise ConfigError(self._no_hidden_state(value))
        self.f_width = F.shape[-1]
        return found

    def _value(self) -> Any:
        """Return the value that holds F."""
        if self._source is None:
            return call_model(self.model, self.batch)
        if not isinstance(self._source, nn.Module):
            return self._source(self.given, self.batch)
        # a copy: a later module may overwrite the output in place
        with outputs_of([self._source], lambda x: as_float(x).clone()) as calls:
            call_model(self.model, self.batch)
        return calls[-1][1] if calls else None

    def stream_norm(self) -> Tensor:
        """Return the mean over tokens of ‖x_l‖₂, the stream after each layer, (layers,)."""
        return torch.stack([norm for norm, _ in self._streams()]).float()

    def _streams(self) -> list[tuple[Tensor, int]]:
        """Return mean ‖x_l‖₂ and width of the stream after each layer.

        The last calls count, if the model calls its layers more often than they are listed.
        """

        def size(x: Tensor) -> tuple[Tensor, int]:
            return as_float(x).norm(dim=-1).mean(), x.shape[-1]

        ends = [last_module(layer) for layer in self.layers]
        with self._pass(), outputs_of(ends, size) as calls:
            call_model(self.model, self.batch)
        called = [module for module, _ in calls[-len(ends) :]]
        for number, end in enumerate(ends, 1):
            if called[number - 1 : number] != [end]:
                raise ConfigError(
                    f"layers: number {number} of {self.layers_name} gives no tensor, or not in its "
                    "turn, in model(batch); name what holds the layers, as in "
                    "layers='encoder.layers', or layers=() for no values by layer"
                )
        return [value for _, value in calls[-len(ends) :]]

    def by_layer(self, values: Callable[[nn.Parameter], Tensor | None]) -> Tensor:
        """Return the norm over the tensors of each layer's parameters, (layers,); NaN for none.

        values: a parameter -> its value, its gradient or its change.
        """
        norms = []
        for layer in self.layers:
            tensors = [values(p) for p in layer.parameters()]
            norm = norm_of([tensor for tensor in tensors if tensor is not None])
            norms.append(norm.to(self.initial.device))
        return torch.stack(norms)

    @torch.no_grad()
    def attribution(
        self, groups: Mapping[str, Sequence[str]], start: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return ‖F(θ_0 + Δθ_g) − F_0‖ for each group g, the whole ‖ΔF‖, and the unexplained rest.

        All are means over tokens.

        groups: name -> names of parameters.
        start: θ_0, with buffers. `unexplained` is the norm of ΔF − Σ_g (F(θ_0 + Δθ_g) − F_0):
            interactions of groups.

        Raises ConfigError if the model has other parameters than at the start.
        """
        self.refuse_replaced(start)
        moved = self.hidden() - self.initial
        unexplained = moved.clone()
        tensors = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        # θ_0 of frozen parameters lies on the host, and stays there unless they have moved
        moved_names = self._moved(tensors, start)
        changed = {n: on_device_of(tensors[n], start[n]) for n in moved_names}
        norms = {}
        for name, members in groups.items():
            moving = changed.keys() & set(members)
            fixed = {tensors[n]: value for n, value in changed.items() if n not in moving}
            alone = torch.zeros_like(moved)
            if moving:
                with holding(fixed):
                    alone = self.hidden() - self.initial
            unexplained -= alone
            norms[name] = alone
        norms |= {"whole": moved, "unexplained": unexplained}
        return {name: token_distance(change) for name, change in norms.items()}

    def state(self) -> dict[str, Tensor]:
        """Return copies of the parameters and the persistent buffers, by name.

        Frozen parameters count too: they may be trained later.  Their copies lie on the host.
        Copies of sharded parameters are the parts of this process.
        """
        keys = self.model.state_dict().keys()
        buffers = {n: b for n, b in self.model.named_buffers() if n in keys}
        return {
            n: t.detach().clone()
            if t.requires_grad or n in buffers or is_sharded(t)
            else t.detach().cpu().clone()
            for n, t in (self.parameters | buffers).items()
        }

    def _moved(self, now: Mapping[str, Tensor], start: Mapping[str, Tensor]) -> list[str]:
        """Return the names of the tensors that differ from θ_0, in any process."""
        differs = [
            not torch.equal(local(now[n]), local(on_device_of(now[n], value)))
            for n, value in start.items()
        ]
        if self.is_sharded:
            flags = torch.tensor(differs, dtype=torch.int32, device=self.initial.device)
            torch.distributed.all_reduce(flags, torch.distributed.ReduceOp.MAX)
            differs = flags.bool().tolist()
        return [name for name, differ in zip(start, differs, strict=True) if differ]

    def refuse_replaced(self, start: Mapping[str, Tensor]) -> None:
        """Raise ConfigError if a parameter of the start is missing, new or reshaped.

        A buffer must be there: some begin without entries.
        """
        now, buffers = trainable(self.model), dict(self.model.named_buffers())
        new = now.keys() - start.keys()
        other = {n for n, t in start.items() if n not in now or now[n].shape != t.shape}
        if wrong := sorted(new | other - buffers.keys()):
            raise ConfigError(
                f"model: {wrong[0]} is new, missing or of another shape since the probe began, so "
                "that shares of ‖ΔF‖ have no start; allowed the parameters of the start, or "
                "attribution_every=0"
            )

    def _ends_with_norm(self) -> bool:
        """Return whether F is the output of a norm module, which fixes its scale."""
        norms = [m for m in self.modules.values() if "norm" in type(m).__name__.lower()]
        with outputs_of(norms, lambda x: as_float(x).clone()) as calls:
            F = self.hidden()
        return any(torch.equal(x, F) for _, x in calls)

    def _is_hidden_state(self, x: Tensor) -> bool:
        return x.ndim > 1 and self.width in (None, x.shape[-1])

    def _no_hidden_state(self, value: Any) -> str:
        """Return the error message for a value that is not F."""
        names = {module: plain_name(name) for name, module in self.modules.items() if name}
        with self._pass(), outputs_of(names, self._is_hidden_state) as calls:
            call_model(self.model, self.batch)
        fits = [names[module] for module, is_fitting in calls if is_fitting]
        F = tensor_of(value)
        text = type(value).__name__ if F is None else f"a tensor of shape {tuple(F.shape)}"
        width = f" of width {self.width}" if self.width else ""
        return (
            f"hidden: found {text}, no hidden state{width}; name the module whose output is F, as "
            f"in hidden={(fits or ['encoder'])[-1]!r}, or give a function of model and batch"
        )


def norm_of(tensors: Sequence[Tensor]) -> Tensor:
    """Return sqrt(sum ‖t‖²), 0-d, in float32 at least; NaN for no tensors."""
    if not tensors:
        return torch.tensor(float("nan"))
    # a float16 norm would overflow at 65504; a bfloat16 norm would have three digits
    numbers = [as_float(stored_numbers(t)) for t in tensors]
    if any(map(is_sharded, numbers)):
        parts = [x for x in numbers if is_sharded(x)]
        joined: Any = torch.nn.utils.get_total_norm(parts)
        numbers = [joined.full_tensor(), *(x for x in numbers if not is_sharded(x))]
    return torch.nn.utils.get_total_norm(numbers).float()


def local(x: Any) -> Tensor:
    """Return the part of a tensor that this process holds; a whole tensor as it is."""
    return x.detach().to_local() if is_sharded(x) else x


def on_device_of(like: Any, value: Tensor) -> Tensor:
    """Return a value on the device of a tensor, and cut over the processes as that is."""
    if not is_sharded(like):
        return value.to(like)
    if is_sharded(value):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)


@contextmanager
def holding(values: Mapping[Tensor, Tensor]) -> Iterator[None]:
    """Give the parameters these values inside the block, and restore their storage afterwards.

    fully_shard gathers from the storage of a part, so that its content changes.
    """
    parts = {local(p): local(value) for p, value in values.items() if is_sharded(p)}
    saved = {part: part.clone() for part in parts}
    before = {parameter: parameter.data for parameter in values if not is_sharded(parameter)}
    try:
        for part, value in parts.items():
            part.copy_(value)
        for parameter in before:
            parameter.data = values[parameter]
        yield
    finally:
        for part, content in saved.items():
            part.copy_(content)
        for parameter, data in before.items():
            parameter.data = data
