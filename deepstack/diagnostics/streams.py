"""Neighbouring contributions to the stream, and the mixing of several streams."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deepstack.config.instruments import SNAPSHOTS
from deepstack.diagnostics.instrument import Instrument, RunState
from deepstack.diagnostics.layers import Values, diagnostic
from deepstack.diagnostics.snapshot import Snapshot
from deepstack.diagnostics.stream import in_chunks
from deepstack.diagnostics.update import measuring
from deepstack.model import Transformer

DIRECTIONS = ("forward", "backward")
FORWARD, BACKWARD = DIRECTIONS


@dataclass
class StreamMixing:
    """The mixing of n streams in a stack, by sublayer; empty for a scheme with one stream.

    matrices: A_r, (batch, seq, to n, from n) in double precision; batch and seq are 1 where all
        tokens share it.
    powers: ‖H_i‖² of the n streams that enter a sublayer, summed over tokens, (n,).
    """

    matrices: list[Tensor] = field(default_factory=list)
    powers: list[Tensor] = field(default_factory=list)

    def record(self, module: Any, inputs: Any, output: Any) -> None:
        """Append the mixing of a sublayer, whose `connections` map H to A = [… | A_rᵀ] and B."""
        H, A = inputs[0].detach(), output[0].detach()
        self.matrices.append(A[..., -len(A) :].permute(1, 2, 3, 0).double())
        self.powers.append(H.square().sum(dim=(1, 2, 3)))

    def distances(self) -> Tensor:
        """Return ‖A_r − I‖_F/√n, mean over tokens, (sublayers,)."""
        values = []
        for A in self.matrices:
            n = A.shape[-1]
            apart = (A - torch.eye(n, dtype=A.dtype, device=A.device)).square().sum((-1, -2))
            values.append(apart.sqrt().mean() / n**0.5)
        return torch.stack(values)

    def shares(self) -> Tensor:
        """Return the share of the largest stream in ‖H‖² at each sublayer, (sublayers,)."""
        return torch.stack([power.max() / power.sum() for power in self.powers])


def largest_sums(A: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest sum of absolute values in a row and in a column of (…, n, n)."""
    sizes = A.abs()
    return sizes.sum(-1).amax(-1), sizes.sum(-2).amax(-1)


@torch.no_grad()
def stream_mixing(model: Transformer, tokens: Tensor) -> dict[str, StreamMixing]:
    """Return the mixing of each stack in a forward pass in evaluation mode: side -> mixing."""
    recorded = {side: StreamMixing() for side in model.stacks}
    hooks = [
        connections.register_forward_hook(recorded[side].record)
        for side, stack in model.stacks.items()
        for scheme in stack.schemes
        if scheme.mixes_streams
        for connections in scheme.per_sublayer("connections")
    ]
    try:
        with measuring(model):
            model.hidden(tokens)
    finally:
        for hook in hooks:
            hook.remove()
    return recorded


class Streams(Instrument, name="streams"):
    """Adds the mixing of the streams to snapshots, a `StreamMixing`."""

    every = SNAPSHOTS
    switch = "streams"
    adds = "mixing"

    def of_layers(self, state: RunState) -> Mapping[str, StreamMixing]:
        return stream_mixing(state.model, state.inputs)


def recorded(snapshot: Snapshot) -> StreamMixing | None:
    """Return the mixing of a stack, None if it was not requested or the scheme has one stream."""
    mixing: StreamMixing | None = snapshot.added.get("mixing")
    return mixing if mixing is not None and mixing.matrices else None


def by_sublayer(snapshot: Snapshot, values: Tensor) -> Tensor:
    """Return values of all sublayers of a stack, (depth S,), as (depth, S) in fp32."""
    return values.float().view(-1, len(snapshot.sublayers))


@diagnostic("mixing_distance", "‖A_r − I‖_F/√n")
def mixing_distance(snapshot: Snapshot) -> Values:
    """‖A_r − I‖_F/√n of the matrix that mixes n streams, mean over probe tokens (log.streams).

    0: the streams do not mix; √((n − 1)/n): every stream becomes their mean.
    """
    mixing = recorded(snapshot)
    return {} if mixing is None else by_sublayer(snapshot, mixing.distances())


@diagnostic("stream_share", "max_i ‖H_i‖²/Σ_i ‖H_i‖²")
def stream_share(snapshot: Snapshot) -> Values:
    """Share of the largest of the streams that enter a sublayer in their power (log.streams).

    1/n: all n streams are as large; 1: one is alone.  Powers are sums over all probe tokens.
    """
    mixing = recorded(snapshot)
    return {} if mixing is None else by_sublayer(snapshot, mixing.shares())


@diagnostic("composite_gain", "max Σ|A_r … A_r|", parts=DIRECTIONS)
def composite_gain(snapshot: Snapshot) -> Values:
    """Largest sum |·| in a row (forward) or column (backward) of ∏ A_r, layer l on (log.streams).

    ∏ A_r: the product of the mixing matrices of all sublayers from the first of layer l to the last
    of the stack.  The mean over probe tokens.  Xie et al. 2025, arXiv:2512.24880, section 3.1 and
    equation 4, the Amax gain magnitude of the composite mapping: how much the stream entering layer
    l, or the gradient leaving the stack, is amplified at the most.
    """
    mixing = recorded(snapshot)
    if mixing is None:
        return {}
    product, gains = None, []
    for A in reversed(mixing.matrices):
        product = A if product is None else product @ A
        gains.append(torch.stack([sums.mean() for sums in largest_sums(product)]))
    entering = torch.stack(gains).flip(0)[:: len(snapshot.sublayers)].float()
    return dict(zip(DIRECTIONS, entering.unbind(dim=1), strict=True))


@diagnostic("contribution_cosine", "cos(x_l − x_{l−1}, x_{l+1} − x_l)", parts=())
def contribution_cosine(snapshot: Snapshot) -> Values:
    """Mean cosine of a layer's change of a token's stream and the next layer's (log.streams).

    Negative: the next layer takes back a part.  NaN in the last layer.  Of several streams, the
    first one's.
    """
    if snapshot.added.get("mixing") is None:
        return {}
    cosine = partial(torch.nn.functional.cosine_similarity, dim=-1)

    def cosines(states: Tensor) -> Tensor:
        added = states[1:] - states[:-1]
        return cosine(added[:-1], added[1:]).mean(dim=(1, 2))

    last = snapshot.states.new_full((1,), torch.nan)
    if len(snapshot.states) < 3:
        return last
    return torch.cat([in_chunks(snapshot.states, cosines, overlap=2), last])
