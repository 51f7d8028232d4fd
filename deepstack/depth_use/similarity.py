"""Similarity of the streams after any two layers: cosine, and linear CKA."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from deepstack.depth_use.measure import Request, measure
from deepstack.errors import ConfigError
from deepstack.records import Analysis, Column

PAIRS = "l of `layers`, m of `layers`"
COLUMNS = {
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


@measure("similarity", COLUMNS)
def similarity(request: Request, result: Analysis) -> None:
    """Compare the streams after all pairs of layers, and with those of another run.

    Linear CKA: ‖YᵀX‖_F² / (‖XᵀX‖_F ‖YᵀY‖_F) of centred X, Y (tokens, d).  Kornblith et al. 2019,
    arXiv:1905.00414.  It does not depend on rotations of X or Y, so models can be compared.
    One forward pass, and products of d² times the tokens for each pair.
    """
    request.refuse_no_tensor("similarity")
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
        if not request.other.one_tensor:
            raise ConfigError(f"similarity with another run: {request.other.why_not}")
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
