"""Values of sublayers recorded during a pass, and their statistics."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from deepstack.config.estimate import SUBLAYERS_AT_A_TIME
from deepstack.model import Transformer
from deepstack.model.attention import Heads
from deepstack.schemes import LayerNorm, Tap
from deepstack.schemes.norms import RMSNorm
from deepstack.schemes.tap import tapped

# Largest ‖z − α x − G(x)‖/‖z‖ that counts as rounding.
SAME = 1e-4


@dataclass
class SublayerStatistics:
    """The part of a snapshot that `sublayer_statistics` computes for every sublayer.

    (depth, S, tokens):

    - entering, branch, norm_input: ‖x‖₂ of its input, ‖G‖₂ of its output, ‖z‖₂ of its last norm's
      input.  branch_variance, norm_variance: the variance of G and of z.
    - norm_slope: max_i |g_i|/σ(z), g the last norm's gain.

    (depth, S):

    - alpha: the alpha of z = alpha x + G(x), NaN for other z.
    - delta_in, delta_sum: norm of the loss's gradient with respect to its input and residual sum.
    - delta_norm_in, delta_norm_out: the same with respect to input and output of its last norm.
    """

    entering: Tensor
    branch: Tensor
    branch_variance: Tensor
    norm_input: Tensor
    norm_variance: Tensor
    norm_slope: Tensor
    alpha: Tensor
    delta_in: Tensor
    delta_sum: Tensor
    delta_norm_in: Tensor
    delta_norm_out: Tensor


@dataclass
class ResidualCall:
    """One call of a scheme's `residual`.

    x, G, z: (batch, seq, d), the sublayer's input, the branch's output, the last norm's input.
    norm: the last norm.
    sums: whether z can be alpha x + G(x): the sublayer returns the norm's output, and its branch
        reads x itself.
    deltas: name -> 0-d, norms of the loss's gradient over the whole probe batch.  'in': by x,
        through all its uses.  'sum': by the residual sum.  'norm_in': by z, through the norm alone.
        'norm_out': by its output.
    """

    x: Tensor
    G: Tensor | None = None
    z: Tensor | None = None
    norm: nn.Module | None = None
    sums: bool = False
    deltas: dict[str, Tensor] = field(default_factory=dict)


class SublayerTap(Tap):
    """Records the `residual` calls of a stack, in the order of the forward pass.

    attention: sublayer -> mean entropy and largest logit by layer, (2,).
    nodes: nodes of the graph that have hooks, see `free_graph`.
    """

    def __init__(self) -> None:
        self.calls: list[ResidualCall] = []
        self.attention: dict[str, list[Tensor]] = {}
        self.nodes: list[Any] = []

    def enter(self, x: Tensor) -> None:
        self.x, self.branch_inputs = x, list[Tensor]()
        self.norm_input: Tensor | None = None
        self.norm_output: Tensor | None = None
        self.calls.append(ResidualCall(x.detach()))
        self.record_gradient("in", x)

    def branch(self, G: Callable[[Tensor], Tensor], y: Tensor) -> Tensor:
        out = G(y)
        self.calls[-1].G = out.detach()
        self.branch_inputs.append(y)
        return out

    def norm(self, norm: Callable[[Tensor], Tensor], z: Tensor, last: bool) -> Tensor:
        if not last:
            return norm(z)
        # The gradient with respect to this view passes through the norm alone.
        self.norm_input = z = z.view_as(z)
        self.norm_output = out = norm(z)
        self.calls[-1].z = z.detach()
        self.calls[-1].norm = norm if isinstance(norm, nn.Module) else None
        self.record_gradient("norm_in", z)
        self.record_gradient("norm_out", out)
        return out

    def leave(self, x: Tensor) -> None:
        ends_in_norm = x is self.norm_output
        reads_x = len(self.branch_inputs) == 1 and self.branch_inputs[0] is self.x
        self.calls[-1].sums = ends_in_norm and reads_x
        if x.shape == self.x.shape:  # otherwise x is not the stream to which G is added
            total = self.norm_input if ends_in_norm else x
            assert total is not None
            self.record_gradient("sum", total)
        # A tensor kept here would keep the graph of the layers before it; see free_graph.
        del self.x, self.branch_inputs, self.norm_input, self.norm_output

    def record_gradient(self, name: str, y: Tensor) -> None:
        """Record the norm of the gradient with respect to y once the backward pass reaches it."""
        if y.requires_grad:
            deltas = self.calls[-1].deltas
            y.register_hook(lambda grad: deltas.update({name: torch.linalg.vector_norm(grad)}))
            self.nodes.append(y.grad_fn)

    def free_graph(self) -> None:
        """Free the graph node by node from its end, once its last tensors are freed.

        A node with a hook is a Python object that frees its predecessor recursively.  With ten
        thousand layers that overflows the stack of the process.
        """
        while self.nodes:
            self.nodes.pop()

    def statistics(self, depth: int, count: int, x_0: Tensor) -> dict[str, Tensor]:
        """Return the `SublayerStatistics` of a stack by name.

        NaN where a scheme has no such value or does not call `residual` once per sublayer.

        count: the number of sublayers of a layer.
        x_0: (batch, seq, d).
        """
        calls = self.calls
        if len(calls) != depth * count:
            calls = [ResidualCall(torch.full_like(x_0, torch.nan))] * (depth * count)
        starts = range(0, len(calls), SUBLAYERS_AT_A_TIME)
        groups = [sublayer_statistics(calls[i : i + SUBLAYERS_AT_A_TIME]) for i in starts]
        return {
            name: torch.cat([group[name] for group in groups]).unflatten(0, (depth, count))
            for name in groups[0]
        }


@contextmanager
def record_values(model: Transformer) -> Iterator[dict[str, SublayerTap]]:
    """Record the values of every `residual` and attention while the block runs plain layers.

    The symbols of a scheme's equation are the arguments of its `residual`: x on entry, G(…), and
    input and output of the last norm of the sublayer.  Yields side -> what its stack recorded.
    """
    taps = {side: SublayerTap() for side in model.stacks}
    with ExitStack() as block:
        block.enter_context(model.unfused())
        for layer in model.layers:
            tap = taps[layer.scheme.place.side]
            block.enter_context(tapped([layer.scheme], tap))
            for name, module in zip(layer.names, layer.modules_in_order(), strict=True):
                if isinstance(module, Heads):
                    values = tap.attention.setdefault(name, [])
                    block.callback(record_attention(module, values))
        yield taps


def record_attention(module: Heads, values: list[Tensor]) -> Callable[[], None]:
    """Make an attention append `entropy_and_largest`; return a function that undoes it.

    The logits come from the q and k, or the logits, that the forward pass itself computes.
    """
    causal = getattr(module, "causal", False)

    def record(q: Tensor, k: Tensor, masked: Any = None, logits: Any = None) -> None:
        logits = module.logits(q.detach(), k.detach()) if logits is None else logits.detach()
        logits = module.limited(logits)
        if masked is not None:
            logits = logits.masked_fill(masked, float("-inf"))
        values.append(entropy_and_largest(logits, causal))

    module.listener = record
    return partial(setattr, module, "listener", None)


def entropy_and_largest(logits: Tensor, causal: bool) -> Tensor:
    """Return the mean entropy −Σ_j p_j ln p_j in nats, p = softmax(logits), and the largest logit.

    The mean is over sequences, heads and positions.  (2,)
    """
    if causal:
        future = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).triu(1)
        logits = logits.masked_fill(future, float("-inf"))
    entropy = torch.special.entr(torch.softmax(logits, dim=-1)).sum(dim=-1).mean()
    return torch.stack([entropy, logits.max()])


def sublayer_statistics(calls: list[ResidualCall]) -> dict[str, Tensor]:
    """Return the `SublayerStatistics` of some calls: (calls, tokens) or (calls,)."""
    nothing = torch.full_like(calls[0].x, torch.nan)
    nan = nothing[0, 0, 0]
    x, G, z = (
        torch.stack([nothing if y is None else y for y in values]).flatten(1, 2)
        for values in zip(*((call.x, call.G, call.z) for call in calls), strict=True)
    )
    rest = z - G
    alpha = (rest * x).sum(dim=(1, 2)) / x.square().sum(dim=(1, 2))
    off = (rest - alpha[:, None, None] * x).flatten(1).norm(dim=1) / z.flatten(1).norm(dim=1)
    is_sum = on_device([float(call.sums) for call in calls], off).bool() & (off < SAME)
    deltas = {
        f"delta_{name}": torch.stack([call.deltas.get(name, nan) for call in calls])
        for name in ("in", "sum", "norm_in", "norm_out")
    }
    return deltas | {
        "entering": x.norm(dim=-1),
        "branch": G.norm(dim=-1),
        "branch_variance": variance(G),
        "norm_input": z.norm(dim=-1),
        "norm_variance": variance(z),
        "norm_slope": norm_slope(z, [call.norm for call in calls]),
        "alpha": torch.where(is_sum, alpha, nan),
    }


def variance(x: Tensor) -> Tensor:
    """Return (1/d)·Σ_i (x_i − mean)² over the last dimension, 10 times faster than CPU `var`."""
    return torch.linalg.vector_norm(x - x.mean(dim=-1, keepdim=True), dim=-1).square() / x.shape[-1]


def on_device(values: Sequence[float], like: Tensor) -> Tensor:
    """Return numbers as a tensor of the dtype and device of `like`, without a copy from the host.

    A captured pass cannot read memory of the host.
    """
    runs = [(value, len([*run])) for value, run in groupby(values)]
    return torch.cat([like.new_full((length,), value) for value, length in runs])


def norm_slope(z: Tensor, norms: Sequence[nn.Module | None]) -> Tensor:
    """Return max_i |g_i| / σ(z), or / rms(z) for RMSNorm, epsilon included: (sublayers, tokens).

    z: (sublayers, tokens, d).  NaN for other norms and without a norm.
    """
    values = torch.full_like(z[..., 0], float("nan"))
    first = 0
    for kind, run in groupby(norms, type):
        some: list[Any] = list(run)
        rows, first = slice(first, first + len(some)), first + len(some)
        if kind in (LayerNorm, RMSNorm):
            rows_z = z[rows]
            power = variance(rows_z) if kind is LayerNorm else rows_z.square().mean(-1)
            one = rows_z.new_ones(z.shape[-1])
            gains = torch.stack([one if n.gain is None else n.gain.detach() for n in some])
            eps = on_device([norm.eps for norm in some], rows_z)[:, None]
            values[rows] = gains.abs().amax(dim=1, keepdim=True) * (power + eps).rsqrt()
    return values
