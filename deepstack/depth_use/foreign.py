"""Analyses of a PyTorch model that deepstack did not build."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from deepstack.depth_use.layered import UNCHANGED, Changes, Layered, Sample, Take, ignore
from deepstack.depth_use.measure import MEASURES, Request, measure_all
from deepstack.diagnostics.foreign_model import (
    Layers,
    call_model,
    find_layers,
    find_module,
    tensor_of,
    undisturbed,
)
from deepstack.errors import ConfigError
from deepstack.records import Analysis

Head = str | Sequence[str] | Callable[[Tensor], Tensor]
STREAM_NAMES = ("hidden_states", "x", "src", "input")


def analyze_model(
    model: nn.Module,
    batch: Any,
    what: Sequence[str] = ("lens",),
    *,
    head: Head,
    targets: Tensor | None = None,
    layers: Layers = None,
    training: Any = None,
    **settings: Any,
) -> dict[str, Analysis]:
    """Analyze any PyTorch model whose layers pass on one stream; return name -> result.

    batch: as in `deepstack.probe`: model(batch), model(*batch) or model(**batch).  The model
    returns logits, (batch, seq, vocabulary), or an object with `logits`.
    what: names of analyses, see `deepstack list analyses`; they write nothing.
    head: what follows the last layer: the names of modules, applied in their order, as in
    ("transformer.ln_f", "lm_head"), or a function of the stream.
    targets: (batch, seq), the true token at each position, -100 where none is predicted; without
    them nothing is measured that needs a loss, and the lens covers all positions.
    layers: as in `deepstack.probe`, modules that take the stream first, and return it, or a tuple
    that begins with it.  training: a batch on which `linear` fits its maps.
    settings: every, top, probes, iterations, ridge, seed.

    Raises ConfigError unless the head of the last layer's output gives the model's logits.
    Restores modes and random states of the model; changes no parameter.
    """
    for name in what:
        MEASURES[name]
    layered = ForeignLayers(model, layers, head)
    sample = Sample(batch, targets)
    with layered.ready():
        layered.refuse_other_head(sample)
    request = Request(
        model=layered,
        held_out=sample,
        probe=sample,
        training=None if training is None else Sample(training),
        **settings,
    )
    results = measure_all(what, request)
    for result in results.values():
        result.about = {
            "model": f"{type(model).__module__}.{type(model).__qualname__}",
            "layers": layered.name,
            "depth": layered.depth,
            "every": request.step,
        }
    return results


class ForeignLayers(Layered):
    """The layers of any model; a layer is replaced by a hook on its call while the model runs."""

    def __init__(self, model: nn.Module, layers: Layers, head: Head) -> None:
        self.model, modules = model, dict(model.named_modules())
        self.name, self.layers = find_layers(modules, layers)
        self.depth = len(self.layers)
        if len(set(self.layers)) < self.depth:
            raise ConfigError("layers: found one module several times; allowed each once")
        names = [head] if isinstance(head, str) else head
        last = names if callable(names) else [find_module(modules, name) for name in names]
        self.head = last if callable(last) else nn.Sequential(*last)

    def ready(self) -> AbstractContextManager[None]:
        return undisturbed(self.model)

    def run(self, sample: Sample, change: Changes = UNCHANGED, take: Take = ignore) -> Tensor:
        order = iter(range(self.depth))
        forwards = [layer.forward for layer in self.layers]

        def replaced(index: int, *args: Any, **kwargs: Any) -> Any:
            if next(order, None) != index:
                raise ConfigError(f"layers: {self.name} are not called once each, in their order")
            x, rebuild = stream_of(args, kwargs)
            if index == 0:
                take(0, x)

            def call(other: int, x: Tensor) -> Tensor:
                args, kwargs = rebuild(x)
                return stream_in(forwards[other](*args, **kwargs))

            def stream_in(output: Any) -> Tensor:
                y = tensor_of(output)
                if y is None or y.shape != x.shape:
                    raise ConfigError(f"layers: layer {index + 1} does not return the stream")
                return y

            output = forwards[index](*args, **kwargs)  # has the form to return
            y = change[index](call, x) if index in change else stream_in(output)
            take(index + 1, y)
            return (y, *output[1:]) if isinstance(output, tuple) else y

        with ExitStack() as stack:
            for index, layer in enumerate(self.layers):
                layer.forward = partial(replaced, index)
                stack.callback(layer.__dict__.pop, "forward")
            output = call_model(self.model, sample.inputs)
        logits = getattr(output, "logits", None)
        logits = tensor_of(output) if logits is None else logits
        if not isinstance(logits, Tensor) or next(order, None) is not None:
            raise ConfigError(f"model(batch) gives no logits, or does not call all {self.name}")
        return logits

    def read_out(self, sample: Sample, x: Any) -> Tensor:
        logits: Tensor = self.head(x)
        return logits

    def refuse_other_head(self, sample: Sample) -> None:
        """Raise ConfigError unless the head makes the logits of the last layer's output."""
        states, logits = self.states_and_logits(sample)
        read = self.head(states[-1])
        if read.shape != logits.shape or not torch.allclose(read, logits, rtol=1e-3, atol=1e-3):
            raise ConfigError(
                "head: after the last layer it does not give the model's logits "
                f"{tuple(logits.shape)}; name all that follows the layers, as in "
                "head=('transformer.ln_f', 'lm_head')"
            )


def stream_of(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, Callable[[Tensor], tuple[tuple[Any, ...], dict[str, Any]]]]:
    """Return the stream among the arguments of a layer, and a function that replaces it."""
    if args and isinstance(args[0], Tensor):
        return args[0], lambda x: ((x, *args[1:]), kwargs)
    known = [name for name in STREAM_NAMES if isinstance(kwargs.get(name), Tensor)]
    if known:
        return kwargs[known[0]], lambda x: (args, kwargs | {known[0]: x})
    raise ConfigError("layers: a layer is called without a tensor as its first argument")
