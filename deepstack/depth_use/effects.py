"""The effect of a layer: on the stream it joins, on every later layer, and on the output."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from deepstack.depth_use.layered import calling
from deepstack.depth_use.measure import Request, measure, numbers
from deepstack.records import Analysis, Column

LAYERS = "l = 1..N"
REMOVED = "s of `removed`"
PAIRS = f"{REMOVED}, l = 1..N"
COLUMNS = {
    "removed": Column("s", "The layers that are removed, one at a time.", "removals", "layer"),
    "cosine_attention": Column("cos(A, x)", "Cosine of the attention's output with the stream that "
                               "enters it, mean over tokens.", LAYERS),
    "cosine_cross_attention": Column("cos(C, x)", "The same of the cross-attention.", LAYERS),
    "cosine_feed_forward": Column("cos(F, x)", "The same of the feed-forward.", LAYERS),
    "cosine_layer": Column("cos(x_l − x_{l−1}, x_{l−1})", "Cosine of the layer's contribution with "
                           "the stream that enters it, mean over tokens.", LAYERS),
    "contribution": Column("‖x_l − x_{l−1}‖/‖x_{l−1}‖", "Relative size of the contribution, mean "
                           "over tokens.", LAYERS),
    "effect_max": Column("max ‖c_l − c_l^s‖/‖c_l‖", "Relative change of the contribution c_l of a "
                         "later layer l when layer s is removed, the largest of all tokens "
                         "(arXiv:2505.13898).", PAIRS),
    "effect_mean": Column("⟨‖c_l − c_l^s‖⟩/⟨‖c_l‖⟩", "The same as a ratio of means over tokens "
                          "(arXiv:2603.15389).", PAIRS),
    "loss_without": Column("L without s", "Loss without layer s.", REMOVED, "nats"),
    "output_change": Column("max ‖p − p^s‖", "Change of the output probabilities without layer s, "
                            "the largest of all predicted positions.", REMOVED),
    "loss": Column("L", "Loss of the model.", unit="nats"),
    "causal_score": Column("⟨effect_mean⟩", "Mean of effect_mean over all pairs s < l "
                           "(arXiv:2603.15389)."),
}  # fmt: skip
LEAST = 1e-6  # of a norm that divides


@measure("effects", COLUMNS)
def effects(request: Request, result: Analysis) -> None:
    """Measure how each layer joins the stream, and what its removal changes in later layers.

    A removed layer is the identity for all tokens, and the effect is measured at all tokens.
    Csordás et al. 2025, arXiv:2505.13898, also remove it for the tokens before a position alone
    and measure those after it, and leave the first token as it is.  One forward pass a removal.
    """
    request.refuse_no_tensor("effects")
    model, sample = request.model, request.held_out
    states, logits = model.states_and_logits(sample)
    before = contributions(states)
    before_sizes = before.norm(dim=-1).flatten(1)  # (layers, tokens)
    for name, cosine in model.sublayer_cosines(sample).items():
        result.add(f"cosine_{name}", cosine.double().cpu())
    pairs = list(zip(before, states, strict=False))
    cosines = [F.cosine_similarity(c, x, dim=-1).mean() for c, x in pairs]
    result.add("cosine_layer", numbers(cosines))
    sizes = [(c.norm(dim=-1) / x.norm(dim=-1).clamp(min=LEAST)).mean() for c, x in pairs]
    result.add("contribution", numbers(sizes))
    probabilities = sample.chosen(logits).float().softmax(dim=-1)
    loss, removed = sample.loss(logits), request.chosen(result)
    maxima = torch.full((len(removed), model.depth), float("nan"), dtype=torch.float64)
    mean, losses, changes = maxima.clone(), [], []
    for row, index in enumerate(removed):
        changed, logits = model.states_and_logits(sample, {index: calling()})
        if index + 1 < model.depth:
            after = contributions(changed[index + 1 :])
            moved = (before[index + 1 :] - after).norm(dim=-1).flatten(1)
            size = before_sizes[index + 1 :]
            maxima[row, index + 1 :] = (moved / size.clamp(min=LEAST)).amax(dim=1)
            mean[row, index + 1 :] = moved.mean(dim=1) / size.mean(dim=1).clamp(min=LEAST)
        losses.append(sample.loss(logits))
        differences = sample.chosen(logits).float().softmax(dim=-1) - probabilities
        changes.append(differences.norm(dim=-1).max())
    result.add("removed", [index + 1 for index in removed])
    result.add("effect_max", maxima.float())
    result.add("effect_mean", mean.float())
    result.add("output_change", numbers(changes))
    result.add("causal_score", mean.nanmean())
    if sample.targets is not None:
        result.add("loss_without", numbers(losses))
        result.add("loss", loss)


def contributions(states: list[Tensor]) -> Tensor:
    """Return the differences of successive states, (states − 1, batch, seq, d)."""
    return torch.stack([after - x for x, after in pairwise(states)])
