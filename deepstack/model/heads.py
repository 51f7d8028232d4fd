"""The heads: modules that map the last hidden state to logits over the vocabulary."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from deepstack.parameters import parameter
from deepstack.schemes import LayerNorm


class TiedHead(nn.Module):
    """logits = F Eᵀ + b, E the token table.  F: (batch, seq, d_model), E: (vocab, d_model)."""

    def __init__(self, vocab_size: int, d_model: int) -> None:
        super().__init__()
        self.bias = parameter(vocab_size, role="head", start="zero")

    def forward(self, final: Tensor, table: Tensor) -> Tensor:
        return F.linear(final, table, self.bias)


class SeparateHead(nn.Module):
    """logits = F Wᵀ + b with a separate matrix, W ~ N(0, 1/d_model).  W: (vocab, d_model)."""

    def __init__(self, vocab_size: int, d_model: int) -> None:
        super().__init__()
        self.weight = parameter(vocab_size, d_model, role="head", start="table")
        self.bias = parameter(vocab_size, role="head", start="zero")

    def forward(self, final: Tensor, table: Tensor) -> Tensor:
        return F.linear(final, self.weight, self.bias)


class BertHead(nn.Module):
    """logits = LN(gelu(F Wᵀ + c)) Eᵀ + b, E the token table.  Devlin et al. 2018, arXiv:1810.04805.

    BERT's masked-token head: dense, activation, norm, then the tied table with a separate bias
    (`get_masked_lm_output` in google-research/bert run_pretraining.py).  W: (d_model, d_model).
    """

    def __init__(self, vocab_size: int, d_model: int) -> None:
        super().__init__()
        self.dense = parameter(d_model, d_model, role="head", start="matrix")
        self.dense_bias = parameter(d_model, role="head", start="zero")
        self.norm = LayerNorm(d_model, eps=1e-5, gain=True, bias=True, roles=("head", "head"))
        self.bias = parameter(vocab_size, role="head", start="zero")

    def forward(self, final: Tensor, table: Tensor) -> Tensor:
        hidden = self.norm(F.gelu(F.linear(final, self.dense, self.dense_bias)))
        return F.linear(hidden, table, self.bias)


HEADS: dict[str, type[nn.Module]] = {"tied": TiedHead, "separate": SeparateHead, "bert": BertHead}
