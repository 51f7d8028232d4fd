"""Layer diagnostics: pure functions of a snapshot with one value per layer or per sublayer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import update_wrapper
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from deepstack import config as conf
from deepstack.base.errors import PluginError
from deepstack.base.registry import Registry, place_of

if TYPE_CHECKING:
    from deepstack.diagnostics.snapshot import Snapshot

Values = Tensor | Mapping[str, Tensor]
Function = TypeVar("Function", bound="Callable[[Snapshot], Values]")

ATTENTIONS = ("attention", "cross_attention")
SUBLAYERS = ("attention", "cross_attention", "feed_forward")


def covers_all(model: conf.Model) -> bool:
    """Return True: a definition covers every model."""
    return True


@dataclass
class Diagnostic:
    """A function of a snapshot and its place in a run folder.

    files: the names of its files: its own name, or one name per part.
    covers: function that returns whether its derivation covers a model; the values are NaN if not.
    """

    function: Callable[[Snapshot], Values]
    symbol: str
    unit: str
    files: list[str]
    covers: Callable[[conf.Model], bool] = covers_all

    def __post_init__(self) -> None:
        update_wrapper(self, self.function)

    def __call__(self, snapshot: Snapshot) -> Values:
        return self.function(snapshot)


DIAGNOSTICS: Registry[Diagnostic] = Registry("diagnostic")


def diagnostic(
    name: str,
    symbol: str,
    *,
    unit: str = "",
    parts: tuple[str, ...] = SUBLAYERS,
    covers: Callable[[conf.Model], bool] = covers_all,
) -> Callable[[Function], Function]:
    """Register a function Snapshot -> (depth,), or (depth, S) with one value per sublayer.

    It may also return part -> (depth,) for any of `parts`, or an empty mapping.  Each part has a
    separate file, `<name>_<part>`.  A diagnostic with one value per layer has parts=().

    covers: whether its derivation covers a model; if not, the values are NaN.

    Raises PluginError if another diagnostic has a file of that name.
    """

    def register(function: Function) -> Function:
        files = [f"{name}_{part}" for part in parts] or [name]
        for other, one in DIAGNOSTICS.items():
            both = {name, *files} & {other, *one.files}
            if both and other != name:
                raise PluginError(
                    f"diagnostic {name!r}: its file {min(both)} is also one of {other!r}; choose "
                    "another name"
                )
        DIAGNOSTICS.register(name, Diagnostic(function, symbol, unit, files, covers))
        return function

    return register


def evaluate(snapshots: Sequence[Snapshot], model: conf.Model | None = None) -> dict[str, Tensor]:
    """Return every registered diagnostic, one (layers,) tensor per file of the run folder.

    layers: first the encoder's, then the decoder's; NaN where a stack has no such sublayer, and for
    diagnostics that do not cover this model.
    """
    by_stack = [(values_of(s), torch.full_like(s.param_norm, torch.nan)) for s in snapshots]
    files = {file: None for values, _ in by_stack for file in values}
    uncovered = [one for one in DIAGNOSTICS.values() if model and not one.covers(model)]
    left_out = {file for one in uncovered for file in one.files}
    return {
        file: torch.cat(
            [
                nothing if file in left_out else values.get(file, nothing)
                for values, nothing in by_stack
            ]
        )
        for file in files
    }


def values_of(snapshot: Snapshot) -> dict[str, Tensor]:
    """Return the values of every diagnostic for one stack: file -> (depth,).

    Raises PluginError if a diagnostic returns another shape or changes the snapshot.
    """
    result: dict[str, Tensor] = {}
    untouched = versions(snapshot)
    for name, one in DIAGNOSTICS.items():
        values = one(snapshot)
        if versions(snapshot) != untouched:
            raise PluginError(
                f"diagnostic {name!r}: {place_of(one.function)}it changes the snapshot in place, "
                "which other diagnostics read; write a new tensor, or .clone() it first"
            )
        depth, count = snapshot.alpha.shape
        if isinstance(values, Mapping):
            by_file = {f"{name}_{part}": value for part, value in values.items()}
        elif isinstance(values, Tensor) and values.shape == (depth, count):
            files = [f"{name}_{part}" for part in snapshot.sublayers]
            by_file = dict(zip(files, values.unbind(dim=1), strict=True))
        else:
            by_file = {name: values}
        for file, value in by_file.items():
            is_tensor = isinstance(value, Tensor)
            if not is_tensor or value.shape != (depth,):
                shape = f"{tuple(value.shape)}" if is_tensor else type(value).__name__
                raise PluginError(
                    f"diagnostic {name!r}: found {shape} for {file}; allowed a tensor ({depth},), "
                    f"one value a layer, or ({depth}, {count}), one a sublayer "
                    f"({place_of(one.function).rstrip(': ')})"
                )
        result |= by_file
    return result


def versions(snapshot: Snapshot) -> list[int]:
    """Return the number of in-place changes of each tensor of a snapshot."""
    fields = {name: value for name, value in vars(snapshot).items() if name != "shared"}
    return [leaf._version for leaf in tree_leaves(fields) if isinstance(leaf, Tensor)]


def describe() -> dict[str, tuple[str, str, str]]:
    """Return file name -> symbol, unit, one sentence, for the run folder's columns.json."""
    return {
        file: (one.symbol, one.unit, (inspect.getdoc(one) or "").split("\n")[0])
        for name, one in DIAGNOSTICS.items()
        for file in (name, *one.files)
    }


@diagnostic("grad_norm", "‖∂L/∂θ_l‖", parts=())
def grad_norm(snapshot: Snapshot) -> Tensor:
    """Norm of the probe loss's gradient with respect to the trained parameters of each layer."""
    return snapshot.grad_norm


@diagnostic("matrix_grad_norm", "‖∂L/∂W_l‖", parts=())
def matrix_grad_norm(snapshot: Snapshot) -> Tensor:
    """Norm of the probe loss's gradient with respect to each layer's trained weight matrices."""
    return snapshot.matrix_grad_norm


def has_plain_norm_and_relu(model: conf.Model) -> bool:
    """Return whether ‖∂LN(z)/∂z‖ = √d/‖z‖ of each token, and feed-forwards have ReLU, ungated.

    Attention and feed-forward are the standard ones.
    """
    relu = model.activation == "relu" and not model.gated
    if model.attention != "softmax" or model.feed_forward != "mlp":
        return False
    return model.norm.kind in ("layer", "rms") and relu


@diagnostic(
    "grad_norm_predicted",
    "‖∂L/∂W_N‖ Π ((α² − v²w²)/(α² + v²w²))^(1/2)",
    parts=(),
    covers=has_plain_norm_and_relu,
)
def grad_norm_predicted(snapshot: Snapshot) -> Tensor:
    """matrix_grad_norm of layer N times ((α² − v²w²)/(α² + v²w²))^(1/2) a sublayer after layer l.

    Effective gains of the current weights, E[W²] the mean square of the entries: attention w² =
    d E[W_v²], v² = d E[W_o²]; feed-forward w² = d E[W_1²]/2, for ReLU, v² = d_ff E[W_2²].  A ratio
    below 0 counts as 0: at α = v = w = 1 the prediction is 0 below the last layer.  NaN where a
    sublayer above is not LN(α x + G(x)), and where the derivation does not cover norm or activation
    (`has_plain_norm_and_relu`).  NaN in a decoder with cross-attention, whose branch hardly
    depends on x.  This is DeepNet's prediction of ‖∂F/∂θ_i‖, θ_i the matrices of a sublayer;
    compare it with matrix_grad_norm.
    """
    last = snapshot.matrix_grad_norm[-1:]
    if snapshot.sublayers != ("attention", "feed_forward"):
        return torch.full_like(snapshot.matrix_grad_norm, torch.nan)
    power = {
        role: W.square().mean(dim=(1, 2)) * (1.0 if snapshot.scaled else W.shape[2])
        for role, W in snapshot.matrices.items()
    }
    gains = [power["v"] * power["o"], power["w1"] / 2 * power["w2"]]
    squared_gains, squares = torch.stack(gains, dim=1).double(), snapshot.alpha.double().square()
    ratios = (squares - squared_gains).clamp(min=0) / (squares + squared_gains)
    from_above = ratios.sqrt().prod(dim=1)[1:].flip(0).cumprod(dim=0).flip(0)
    return torch.cat([(from_above * last).to(last.dtype), last])


@diagnostic("param_norm", "‖θ_l‖", parts=())
def param_norm(snapshot: Snapshot) -> Tensor:
    """Norm of the parameters of each layer."""
    return snapshot.param_norm


@diagnostic("param_update_norm", "‖θ_l,t − θ_l,t−1‖", parts=())
def param_update_norm(snapshot: Snapshot) -> Tensor:
    """Norm of the change that the last step made to the parameters of each layer."""
    return snapshot.param_update_norm


@diagnostic("update_to_weight", "‖θ_l,t − θ_l,t−1‖/‖θ_l‖", parts=())
def update_to_weight(snapshot: Snapshot) -> Tensor:
    """Norm of the last step's change of each layer's parameters over the norm of the parameters."""
    return snapshot.param_update_norm / snapshot.param_norm


@diagnostic("attention_entropy", "H", unit="nats", parts=ATTENTIONS)
def attention_entropy(snapshot: Snapshot) -> Mapping[str, Tensor]:
    """H = −Σ_j p_j ln p_j of the attention weights, mean over sequences, heads and positions.

    ln n if all n positions read have equal weight; 0 if one has all.  A causal position
    i reads i positions.  Zhai et al. 2023, arXiv:2303.06296, follow it through training.
    """
    return snapshot.entropy


@diagnostic("largest_logit", "max_{ij} q_i·k_j/√d_head", parts=ATTENTIONS)
def largest_logit(snapshot: Snapshot) -> Mapping[str, Tensor]:
    """Largest logit of the attention, over sequences, heads and pairs of positions.

    Its growth precedes divergence in large models: Dehghani et al. 2023, arXiv:2302.05442.
    """
    return snapshot.largest_logit
