"""The loss of a model's predictions."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from deepstack.tasks import IGNORE


def mean_loss(
    logits: Tensor,
    targets: Tensor,
    count: float | Tensor | None = None,
    *,
    smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """Return the mean cross-entropy over predicted positions in nats, (batch, seq, vocab) -> 0-d.

    count: divisor of the sum for a part of a batch; by default the number of positions here.
    smoothing: eps of (1 - eps) * -ln p(true) + eps * mean over tokens of -ln p, label smoothing as
        in Szegedy et al. 2015, arXiv:1512.00567, section 7.
    z_loss: lambda of + lambda * (ln Z)^2, Z = sum over tokens of exp(logit), a mean over the same
        positions, as in Chowdhery et al. 2022, arXiv:2204.02311, section 5.
    """
    logits, targets = logits.flatten(0, 1).float(), targets.flatten()
    more: Any = {"ignore_index": IGNORE, "label_smoothing": smoothing}
    if count is None:
        loss = F.cross_entropy(logits, targets, **more)
    else:
        loss = F.cross_entropy(logits, targets, **more, reduction="sum") / count
    if not z_loss:
        return loss
    is_predicted = targets != IGNORE
    squares = (logits.logsumexp(dim=-1).square() * is_predicted).sum()
    return loss + z_loss * squares / (is_predicted.sum() if count is None else count)
