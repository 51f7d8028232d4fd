"""The products and attentions of a forward pass, recorded for tests of diagnostics."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Products(TorchFunctionMode):
    """Records entropy and largest logit of every attention, and the matrix of every product."""

    def __init__(self) -> None:
        super().__init__()
        self.entropies: list[float] = []
        self.largest: list[float] = []
        self.matrices: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        more = kwargs or {}
        result = func(*args, **more)
        if func is F.scaled_dot_product_attention:
            q, k = (h.detach().double() for h in args[:2])
            logits = q @ k.mT / math.sqrt(q.shape[-1])
            if more.get("is_causal"):
                logits = logits + torch.full(logits.shape[-2:], -math.inf).triu(1)
            if (mask := more.get("attn_mask")) is not None:
                logits = logits.masked_fill(~mask, -math.inf)
            self.add(logits, logits.softmax(-1))
        elif func is torch.softmax and result.ndim == 4:
            self.add(args[0].detach().double(), result.detach().double())
        elif func is F.linear:
            self.matrices.append(args[1].detach().double())
        elif func is torch.addmm:  # of the NTK parameterisation
            self.matrices.append(args[2].detach().double().t())
        return result

    def add(self, logits: Tensor, weights: Tensor) -> None:
        self.largest.append(logits.max().item())
        terms = torch.where(weights > 0, weights * weights.log(), 0.0)
        self.entropies.append(-terms.sum(-1).mean().item())
