"""The stream after every layer: the prediction that the head reads from it, and similarities."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deepstack.base import ConfigError
from deepstack.records import Analysis, Column
from deepstack.tools.depth_use.effective_depth import effective_depth
from deepstack.tools.depth_use.measure import Request, measure, numbers

AXIS = "l = 0..N"
TOP = 5
"""Predictions that the lens compares."""
LENS = {
    "loss": Column("L_l", "Loss of the prediction read after layer l.", AXIS, "nats"),
    "kl": Column("KL(p_l ‖ p_N)", "KL divergence of the prediction read after layer l from the "
                 "final one, mean over positions.", AXIS, "nats"),
    "overlap": Column("top-k overlap", "Share of the k most probable tokens after layer l that are "
                      "also among those of the final prediction, mean over positions.", AXIS),
    "agreement": Column("top-1 agreement", "Share of positions whose most probable token after "
                        "layer l is that of the final prediction.", AXIS),
    "final_loss": Column("L_N", "Loss of the model.", unit="nats"),
    "effective_depth": Column("l_eff", "Least l with KL_l < 0.5 max KL (Hu et al. 2025, "
                              "arXiv:2512.14064).", unit="layers"),
    "effective_depth_ratio": Column("l_eff/N", "Effective depth over depth."),
    "k": Column("k", "Number of tokens compared by the overlap."),
}  # fmt: skip


@measure("lens", LENS)
def lens(request: Request, result: Analysis) -> None:
    """Read the prediction after every layer: loss, KL to the final one, overlap of top tokens.

    The head, with the final norm, reads logits from x_l.  KL(p_l ‖ p_N) has the direction of
    Csordás et al. 2025, arXiv:2505.13898.  Two forward passes and N + 1 of the head.
    """
    model, sample = request.model, request.held_out
    final = torch.log_softmax(sample.chosen(model.run(sample)).float(), dim=-1)
    k = min(TOP, final.shape[-1])
    best = final.topk(k, dim=-1).indices
    rows: list[Tensor] = []

    def take(_: int, x: Any) -> None:
        logits = model.read_out(sample, x)
        log_p = torch.log_softmax(sample.chosen(logits).float(), dim=-1)
        kl = (log_p.exp() * (log_p - final)).sum(dim=-1).double().mean()
        best_here = log_p.topk(k, dim=-1).indices
        shared = (best_here[:, :, None] == best[:, None, :]).any(dim=-1)
        same = best_here[:, 0] == best[:, 0]
        loss = sample.loss(logits)
        rows.append(numbers([kl, shared.double().mean(), same.double().mean(), loss]))

    again = torch.log_softmax(sample.chosen(model.run(sample, take=take)).float(), dim=-1)
    if not torch.equal(again, final) and (again - final).abs().max() > 1e-3:
        raise ConfigError("lens: reading after a layer changes what the model computes after it")
    kl, overlap, agreement, losses = torch.stack(rows, dim=1)
    kl = kl.clamp(min=0.0)  # rounding may give -1e-9
    result.add("kl", kl)
    result.add("overlap", overlap)
    result.add("agreement", agreement)
    result.add("k", k)
    if sample.targets is not None:
        result.add("loss", losses)
        result.add("final_loss", losses[-1])
    depth = effective_depth(kl.numpy())
    result.add("effective_depth", depth)
    result.add("effective_depth_ratio", depth / model.depth)


PAIRS = "l of `layers`, m of `layers`"
SIMILARITY = {
    "layers": Column("l", "The layers after which the stream is compared; 0: before the first.",
                     "layers", "layer"),
    "cosine": Column("cos(x_l, x_m)", "Cosine of a token's stream after layers l and m, mean over "
                     "tokens.", PAIRS),
    "cka": Column("CKA(X_l, X_m)", "Linear CKA of all tokens' streams after layers l and m.",
                  PAIRS),
    "layers_with": Column("m", "The layers of the other run.", "layers of the other run", "layer"),
    "cka_with": Column("CKA(X_l, Y_m)", "Linear CKA of the stream after layer l and that after "
                       "layer m of the other run, for the same inputs.",
                       "l of `layers`, m of `layers_with`"),
}  # fmt: skip


@measure("similarity", SIMILARITY, uses=["every", "other"])
def similarity(request: Request, result: Analysis) -> None:
    """Compare the streams after all pairs of layers, and with another run's streams.

    Linear CKA: ‖YᵀX‖_F² / (‖XᵀX‖_F ‖YᵀY‖_F) of centred X, Y (tokens, d).  Kornblith et al. 2019,
    arXiv:1905.00414.  It does not depend on rotations of X or Y, so models can be compared.
    One forward pass, and products of d² times the tokens for each pair.
    """
    states = request.model.states_and_logits(request.held_out)[0]
    # every so many-th layer, with the first and the last
    layers = sorted({0, *(index + 1 for index in request.chosen(result)), len(states) - 1})
    states = [states[index] for index in layers]
    result.add("layers", layers)
    units = torch.stack([F.normalize(x.flatten(0, -2).double(), dim=-1).flatten() for x in states])
    tokens = states[0].flatten(0, -2).shape[0]
    result.add("cosine", (units @ units.T / tokens).float().cpu())
    result.add("cka", linear_cka(states, states).float().cpu())
    if request.other is not None:
        with request.other.ready():
            others = request.other.states_and_logits(request.held_out)[0]
        step = max(request.step, -(-len(others) // len(states)))
        chosen = sorted({*range(0, len(others), step), len(others) - 1})
        result.add("layers_with", chosen)
        result.add("cka_with", linear_cka(states, [others[i] for i in chosen]).float().cpu())


def linear_cka(first: list[Tensor], second: list[Tensor]) -> Tensor:
    """Return the linear CKA of each state of `first` with each of `second`; NaN of a constant."""
    X, Y = ([normalised(x) for x in states] for states in (first, second))
    wide = torch.cat(Y, dim=1)  # (tokens, states · d): one product a row
    rows = []
    for x in X:
        squares = (x.T @ wide).square().sum(dim=0)
        rows.append(squares.unflatten(0, (len(Y), -1)).sum(dim=1))
    return torch.stack(rows)


def normalised(x: Tensor) -> Tensor:
    """Return the centred tokens, (tokens, d), divided by ‖XᵀX‖_F^(1/2)."""
    X = x.flatten(0, -2).double()
    X = X - X.mean(dim=0)
    scale = torch.linalg.matrix_norm(X.T @ X).sqrt()
    return X / torch.where(scale > 0, scale, float("nan"))
