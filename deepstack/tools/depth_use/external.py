"""Analyses of PyTorch models that deepstack did not build."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deepstack.base import ConfigError
from deepstack.model import Layers, copied, find_layers, find_module, unwrapped
from deepstack.records import Analysis
from deepstack.tools.depth_use.analyses import MEASURES, Request, measure_all
from deepstack.tools.depth_use.external_layers import ExternalLayers
from deepstack.tools.depth_use.layered import Sample

Reader = Callable[[Tensor], Tensor]
Head = str | Sequence[str] | Reader


def analyze_model(
    model: nn.Module,
    batch: Any,
    what: Sequence[str] = ("lens",),
    *,
    head: Head | None = None,
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
        ("transformer.ln_f", "lm_head"), or a function of the stream.  By default the model itself
        reads each stream, with layers that do nothing.
    targets: (batch, seq), the true token at each position, -100 where none is predicted; without
        them nothing is measured that needs a loss, and the lens covers all positions.
    layers: as in `deepstack.probe`, modules that take the stream first, and return it, or a tuple
        that begins with it.
    training: a batch on which `linear` fits its maps.
    settings: every, probes, iterations, ridge, seed.

    The model runs in evaluation mode, without autocast, compilation and key-value caches.  If one
    of several analyses fails, its result is empty, and its note has the reason.
    Raises ConfigError for a model that cannot be taken apart: unless its layers pass on one dense
    stream, as it is, and the head of the last one gives the model's logits, twice the same.  Names
    the module that draws random numbers in evaluation mode.
    After each pass random states and all that the modules hold are as before.
    """
    for name in what:
        MEASURES[name]
    inner = unwrapped(model)
    modules = dict(inner.named_modules())
    refuse_kinds(modules)
    batch, training = copied(batch), None if training is None else copied(training)
    sample = Sample(batch, targets)
    unknown = ExternalLayers(inner, (), "", reader(modules, head))
    with unknown.ready(), unknown.guarded():
        unknown.learn_written(sample)
        name, stack = find_layers(inner, batch, layers, written=unknown.written)
    if not stack:
        raise ConfigError("layers: found none; name what holds the layers, as in layers='blocks'")
    layered = ExternalLayers(inner, stack, name, reader(modules, head))
    layered.written = unknown.written
    with layered.ready():
        layered.check(sample)
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
            "model": f"{type(inner).__module__}.{type(inner).__qualname__}",
            "layers": layered.name,
            "depth": layered.depth,
            "every": request.step,
        }
    return results


def reader(modules: Mapping[str, nn.Module], head: Head | None) -> Reader | None:
    """Return the head as a function of the stream; None: the model itself reads it."""
    if head is None or callable(head):
        return head
    names = [head] if isinstance(head, str) else head
    return nn.Sequential(*(find_module(modules, name) for name in names))


def refuse_kinds(modules: Mapping[str, nn.Module]) -> None:
    """Raise ConfigError for modules whose code or whose parameters cannot be reached."""
    for name, module in modules.items():
        where = f"model: {name or type(module).__name__}"
        if isinstance(module, torch.jit.ScriptModule):
            raise ConfigError(f"{where} is a TorchScript module; give the Python module of it")
        if type(module).__module__.startswith("torch.distributed.fsdp") or type(
            module
        ).__name__.startswith("FSDP"):
            raise ConfigError(
                f"{where} is sharded over processes; gather its parameters in one model first"
            )
