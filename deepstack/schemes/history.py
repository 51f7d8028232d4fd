"""Schemes in which a layer reads more than the layer before it."""

from __future__ import annotations

import torch
from torch import Tensor

from deepstack.schemes.scheme import Norm, Parts, Scheme, Stream, Sublayer
from deepstack.speed.parameter import parameter


class DLCL(Scheme, name="dlcl", label="DLCL", paper="arXiv:1906.01787"):
    """x_{l+1} = sum over k <= l of W_k LN(y_k), y_l = PreLN(x_l).  Wang et al. 2019, 1906.01787.

    y_l is the output of layer l, a Pre-LN layer, and y_0 the embedding; every y_k has a norm of its
    own.  W, trained, starts as the mean, 1/(l + 1) each; it is kept as its difference from that.
    x_1 = LN(y_0), and a norm follows x_{N+1}.  Layer l reads l tensors: time and memory grow as
    N^2, and no two layers are the same to a compiler.
    """

    uniform = False
    entry_norm = True
    final_norm = True

    def __init__(self, layer: int, depth: int, parts: Parts) -> None:
        super().__init__(layer, depth, parts)
        self.output_norm = parts.norm()
        self.weights = parameter(depth + 1, role="scheme", start="zero")

    def enter(self, x: Tensor) -> Stream:
        return x, (x,)

    def layer(self, x: Stream, *sublayers: Sublayer) -> Stream:
        now, history = x
        y = super().layer(now, *sublayers)
        history = (*history, self.output_norm(y))
        weights = self.weights[: len(history)] + 1 / len(history)
        return torch.tensordot(weights, torch.stack(history), dims=1), history

    def residual(self, x: Tensor, G: Sublayer, norm: Norm) -> Tensor:
        return x + G(norm(x))

    def leave(self, stream: Stream, norm: Norm | None) -> Tensor:
        return super().leave(stream[0], norm)
