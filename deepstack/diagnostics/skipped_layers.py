"""The probe loss with one layer after the other replaced by the identity."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from deepstack.config.instruments import SNAPSHOTS
from deepstack.diagnostics.instrument import Instrument, RunState
from deepstack.diagnostics.layers import Values, diagnostic
from deepstack.diagnostics.snapshot import Snapshot
from deepstack.diagnostics.update import evaluating
from deepstack.model import Transformer
from deepstack.model.stack import Layer, Layers
from deepstack.schemes import Stream


class SkippedLayers(Instrument, name="skipped_layers"):
    """Adds the loss without each layer to snapshots: (depth,), NaN for layers not tried."""

    every = SNAPSHOTS
    switch = "skipped_layers"
    adds = "skip_loss"

    def of_layers(self, state: RunState) -> Mapping[str, Tensor]:
        count = state.config.log.skipped_layers
        with state.model.with_fast_paths():
            return losses_without(state.model, state.inputs, state.loss, count)


@diagnostic("skip_loss", "L without layer l", unit="nats", parts=())
def skip_loss(snapshot: Snapshot) -> Values:
    """Probe loss with one layer replaced by the identity (log.skipped_layers of them are tried)."""
    without = snapshot.added.get("skip_loss")
    return {} if without is None else without


@diagnostic("skip_loss_increase", "L without layer l − L", unit="nats", parts=())
def skip_loss_increase(snapshot: Snapshot) -> Values:
    """Increase of the probe loss when the identity replaces a layer: the layer's contribution."""
    without = snapshot.added.get("skip_loss")
    return {} if without is None else without - snapshot.loss


def losses_without(
    model: Transformer, tokens: Tensor, loss: Callable[[Tensor], Tensor], count: int
) -> dict[str, Tensor]:
    """Return L with layer l replaced by the identity: side -> (depth,); see `Scheme.pass_over`.

    tokens: (batch, seq).
    loss: logits -> mean loss.
    count: how many layers are tried, one forward pass each, evenly spaced over all stacks; NaN for
        the others.  Nothing is trained in between. Gromov et al. 2024, arXiv:2403.17887, and Sun et
        al. 2025, arXiv:2502.05795, use this removal.
    """
    layers = model.layers
    losses = torch.full((len(layers),), torch.nan, device=tokens.device)
    with torch.no_grad(), evaluating(model):
        for index in divide_evenly(len(layers), count):
            losses[index] = loss(logits_without(model, tokens, layers[index]))
    depths = [len(stack.layers) for stack in model.stacks.values()]
    return dict(zip(model.stacks, losses.split(depths), strict=True))


def logits_without(model: Transformer, tokens: Tensor, skipped: Layer) -> Tensor:
    """Return the model's logits with one layer replaced by the identity."""

    def run(layers: Layers, x: Stream, memory: Tensor | None = None) -> Stream:
        for layer in layers:
            x = skipped.scheme.pass_over(x) if layer is skipped else layer(x, memory)
        return x

    with model.replace_runner(lambda _: run):
        logits: Tensor = model(tokens)
    return logits


def divide_evenly(total: int, count: int) -> list[int]:
    """Return `count` of 0, …, total − 1, evenly spaced with both ends; all of them if fewer."""
    if count >= total:
        return list(range(total))
    if count == 1:
        return [total - 1]
    return [round(i * (total - 1) / (count - 1)) for i in range(count)]
