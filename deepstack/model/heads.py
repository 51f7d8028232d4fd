"""The heads: modules that map the last hidden state to logits over the vocabulary."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from deepstack.parameters import parameter
from deepstack.schemes import LayerNorm


class TiedHead(nn.Module):
    """logits = c F Eᵀ + b, E the token table.  F: (batch, seq, d_model), E: (vocab, d_model).

    c, `factor`, is 1 but for schemes with a rule for width (`Scheme.head_factor`).
    """

    factor = 1.0

    def __init__(self, vocab_size: int, d_model: int) -> None:
        super().__init__()
        self.bias = parameter(vocab_size, role="head", start="zero")

    def forward(self, final: Tensor, table: nn.Parameter) -> Tensor:
        final = final if self.factor == 1 else final * self.factor
        return F.linear(final, *self.first_map(table))

    def first_map(self, table: nn.Parameter) -> tuple[nn.Parameter, nn.Parameter]:
        """Return the matrix that F enters, and its bias."""
        return table, self.bias


class SeparateHead(TiedHead):
    """logits = c F Wᵀ + b with a separate matrix, W ~ N(0, 1/d_model).  W: (vocab, d_model)."""

    def __init__(self, vocab_size: int, d_model: int) -> None:
        nn.Module.__init__(self)
        self.weight = parameter(vocab_size, d_model, role="head", start="table")
        self.bias = parameter(vocab_size, role="head", start="zero")

    def first_map(self, table: nn.Parameter) -> tuple[nn.Parameter, nn.Parameter]:
        return self.weight, self.bias


class BertHead(TiedHead):
    """logits = LN(gelu(F Wᵀ + c)) Eᵀ + b, E the token table.  Devlin et al. 2018, arXiv:1810.04805.

    BERT's masked-token head: dense, activation, norm, then the tied table with a separate bias
    (`get_masked_lm_output` in google-research/bert run_pretraining.py).  W: (d_model, d_model).
    """

    def __init__(self, vocab_size: int, d_model: int) -> None:
        nn.Module.__init__(self)
        self.dense = parameter(d_model, d_model, role="head", start="matrix")
        self.dense_bias = parameter(d_model, role="head", start="zero")
        self.norm = LayerNorm(d_model, eps=1e-5, gain=True, bias=True, roles=("head", "head"))
        self.bias = parameter(vocab_size, role="head", start="zero")

    def first_map(self, table: nn.Parameter) -> tuple[nn.Parameter, nn.Parameter]:
        return self.dense, self.dense_bias

    def forward(self, final: Tensor, table: nn.Parameter) -> Tensor:
        hidden = self.norm(F.gelu(super().forward(final, table)))
        return F.linear(hidden, table, self.bias)


HEADS: dict[str, type[TiedHead]] = {"tied": TiedHead, "separate": SeparateHead, "bert": BertHead}
