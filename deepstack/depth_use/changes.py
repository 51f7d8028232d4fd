"""The effect of changed layers: removed, exchanged, repeated, or replaced by linear maps."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from deepstack.depth_use.layered import Change, calling
from deepstack.depth_use.measure import Request, measure, numbers
from deepstack.errors import ConfigError
from deepstack.records import Analysis, Column

LAYERS = "l = 1..N"
REMOVED = "s of `removed`"
PAIRS = f"{REMOVED}, l = 1..N"
EFFECTS = {
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


@measure("effects", EFFECTS)
def effects(request: Request, result: Analysis) -> None:
    """Measure how each layer joins the stream, and what its removal changes in later layers.

    A removed layer is the identity for all tokens, and the effect is measured at all tokens.
    Csordás et al. 2025, arXiv:2505.13898, also remove it for the tokens before a position alone
    and measure those after it, and leave the first token as it is.  One forward pass a removal.
    """
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


CHANGED = "l of `changed`"
SIGNIFICANT = 1.1
SWAP = {
    "changed": Column("l", "The layers that are repeated; each is exchanged with the one after it, "
                      "if there is one.", "changes", "layer"),
    "loss_swapped": Column("L with l ↔ l+1", "Loss with layers l and l + 1 in the other order; NaN "
                           "for the last.", CHANGED, "nats"),
    "loss_repeated": Column("L with l twice", "Loss with layer l applied twice.", CHANGED, "nats"),
    "loss": Column("L", "Loss of the model.", unit="nats"),
    "permutation_score": Column("⟨|L − L_swapped|/L⟩", "Mean relative change of the loss by an "
                                "exchange of neighbours (arXiv:2603.15389)."),
}  # fmt: skip
LINEAR = {
    "changed": Column("l", "The layers that are replaced, one at a time.", "changes", "layer"),
    "loss_linear": Column("L with l linear", "Loss with layer l replaced by its best linear map of "
                          "each token.", CHANGED, "nats"),
    "unexplained": Column("1 − R²", "Share of the variance of x_l that the linear map of x_{l−1} "
                          "does not explain on the held-out sample.", CHANGED),
    "unexplained_contribution": Column("1 − R² of c_l", "The same of the contribution x_l − "
                                       "x_{l−1}.", CHANGED),
    "loss": Column("L", "Loss of the model.", unit="nats"),
    "usefulness": Column("share of L_linear > 1.1 L", "Share of layers whose linear map raises the "
                         "loss by over 10 % (arXiv:2603.15389)."),
}  # fmt: skip


@measure("swap", SWAP, targets=True)
def swap(request: Request, result: Analysis) -> None:
    """Exchange neighbouring layers, and repeat a layer; two forward passes a layer.

    A layer keeps its own coefficients and norms at its new position.  Muhtar et al. 2026,
    arXiv:2603.15389, exchange any two layers; here they are neighbours.
    """
    model, sample = request.model, request.held_out
    chosen = request.chosen(result)
    swapped = [
        model.loss(sample, {i: calling(i + 1), i + 1: calling(i)})
        if i + 1 < model.depth
        else float("nan")
        for i in chosen
    ]
    repeated = [model.loss(sample, {i: calling(i, i)}) for i in chosen]
    loss = model.loss(sample)
    result.add("changed", [i + 1 for i in chosen])
    result.add("loss_swapped", swapped)
    result.add("loss_repeated", repeated)
    result.add("loss", loss)
    result.add("permutation_score", ((numbers(swapped) - loss).abs() / loss).nanmean())


@measure("linear", LINEAR, targets=True)
def linear(request: Request, result: Analysis) -> None:
    """Replace a layer by the linear map of a token's stream that fits it best.

    x_l ≈ W x_{l−1} + b, by ridge regression on training batches; loss and error are those of
    held-out ones.  The map reads one token at a time, so it has no attention.  Muhtar et al. 2026,
    arXiv:2603.15389, fit without a ridge and evaluate on the data that they fit.  One pass over the
    training batches for all maps, and one forward pass a layer.
    """
    if request.training is None:
        raise ConfigError("linear: found no training batches; give training=…")
    model, sample = request.model, request.held_out
    chosen = request.chosen(result)
    maps: dict[int, tuple[Tensor, Tensor]] = {}
    inputs: list[Tensor] = []

    def fit(index: int, x: Tensor) -> None:
        if index and index - 1 in chosen:
            maps[index - 1] = fit_linear(inputs[0], x, request.ridge)
        inputs[:] = [x]

    model.run(request.training, take=fit)
    states, logits = model.states_and_logits(sample)
    losses, errors, rests = [], [], []
    for index in chosen:
        before, after = states[index], states[index + 1]
        predicted = affine(before, *maps[index])
        errors.append(unexplained(after, predicted))
        rests.append(unexplained(after - before, predicted - before))
        losses.append(model.loss(sample, {index: replacing(*maps[index])}))
    loss = sample.loss(logits)
    result.add("changed", [index + 1 for index in chosen])
    result.add("loss_linear", losses)
    result.add("unexplained", numbers(errors))
    result.add("unexplained_contribution", numbers(rests))
    result.add("loss", loss)
    result.add("usefulness", (numbers(losses) > SIGNIFICANT * loss).double().mean())


def fit_linear(x: Tensor, y: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    """Return W (d, d) and b (d,) in double precision: y ≈ x Wᵀ + b with the least squared error.

    ridge: the penalty on ‖W‖², relative to the mean variance of a coordinate of x.
    """
    X, Y = (z.flatten(0, -2).double() for z in (x, y))
    mean_x, mean_y = X.mean(dim=0), Y.mean(dim=0)
    X, Y = X - mean_x, Y - mean_y
    gram = X.T @ X
    penalty = ridge * gram.diagonal().mean().clamp(min=torch.finfo(gram.dtype).tiny)
    gram = gram + penalty * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    W = torch.linalg.solve(gram, X.T @ Y).T
    return W, mean_y - W @ mean_x


def affine(x: Tensor, W: Tensor, b: Tensor) -> Tensor:
    """Return x Wᵀ + b, computed in double precision."""
    return (x.double() @ W.T + b).to(x.dtype)


def replacing(W: Tensor, b: Tensor) -> Change:
    """Return the change that replaces a layer by x Wᵀ + b."""
    return lambda call, x: affine(x, W, b)


def unexplained(y: Tensor, predicted: Tensor) -> Tensor:
    """Return the squared error of a prediction over the variance of y; 0/0 is 0."""
    Y, P = (z.flatten(0, -2).double() for z in (y, predicted))
    error = (Y - P).square().sum()
    total = (Y - Y.mean(dim=0)).square().sum()
    return torch.where(error > 0, error / total, 0.0)
