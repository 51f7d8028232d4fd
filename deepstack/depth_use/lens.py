"""The logit lens: the prediction that the head reads from the stream after every layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepstack.analysis.effective_depth import effective_depth
from deepstack.depth_use.measure import Request, measure, numbers
from deepstack.records import Analysis, Column

AXIS = "l = 0..N"
COLUMNS = {
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


@measure("lens", COLUMNS)
def lens(request: Request, result: Analysis) -> None:
    """Read the prediction after every layer: loss, KL to the final one, overlap of top tokens.

    The head, with the final norm, reads logits from x_l.  KL(p_l ‖ p_N) has the direction of
    Csordás et al. 2025, arXiv:2505.13898.  Two forward passes and N + 1 of the head.
    """
    model, sample = request.model, request.held_out
    final = torch.log_softmax(sample.chosen(model.run(sample)).float(), dim=-1)
    k = min(request.top, final.shape[-1])
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

    model.run(sample, take=take)
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
