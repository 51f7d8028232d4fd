"""Analyses of a PyTorch model that deepstack did not build."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deepstack.depth_use.layered import Layered, Sample
from deepstack.depth_use.measure import MEASURES, Request, measure_all
from deepstack.diagnostics.foreign_model import Layers, find_layers, find_module
from deepstack.errors import ConfigError
from deepstack.records import Analysis

Head = str | Sequence[str] | Callable[[Tensor], Tensor]


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
    modules = dict(model.named_modules())
    name, stack = find_layers(modules, layers)
    names = [head] if isinstance(head, str) else head
    last = names if callable(names) else [find_module(modules, name) for name in names]
    read: Any = last if callable(last) else nn.Sequential(*last)
    layered = Layered(model, stack, name, lambda sample, x: read(x))
    sample = Sample(batch, targets)
    with layered.ready():
        refuse_other_head(layered, sample)
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


def refuse_other_head(layered: Layered, sample: Sample) -> None:
    """Raise ConfigError unless the head makes the logits of the last layer's output."""
    states, logits = layered.states_and_logits(sample)
    read = layered.read_out(sample, states[-1])
    if read.shape != logits.shape or not torch.allclose(read, logits, rtol=1e-3, atol=1e-3):
        raise ConfigError(
            "head: after the last layer it does not give the model's logits "
            f"{tuple(logits.shape)}; name all that follows the layers, as in "
            "head=('transformer.ln_f', 'lm_head')"
        )
