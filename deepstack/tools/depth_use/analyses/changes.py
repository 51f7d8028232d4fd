"""The effect of changed layers: removed, exchanged, repeated, or replaced by linear maps."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deepstack.base import ConfigError
from deepstack.records import Analysis, Column
from deepstack.tools.depth_use.layered import Call, Sample, calling
from deepstack.tools.depth_use.measure import Request, measure, numbers

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


@measure("effects", EFFECTS, uses=["every"])
def effects(request: Request, result: Analysis) -> None:
    """Measure how each layer joins the stream, and how its removal changes later layers.

    A removed layer is the identity for all tokens, and the effect is measured at all tokens.
    Csordás et al. 2025, arXiv:2505.13898, also remove it for the tokens before a position alone
    and measure those after it, and leave the first token as it is.  One forward pass a removal.
    """
    model, sample, removed = request.model, request.held_out, request.chosen(result)
    note_arguments(request, sample, result)
    states, logits = model.states_and_logits(sample)
    x, before = torch.stack(states[:-1]), contributions(states)
    sizes = before.norm(dim=-1).flatten(1)  # (layers, tokens)
    relative_sizes = sizes / x.norm(dim=-1).flatten(1).clamp(min=LEAST)
    cosines = F.cosine_similarity(before, x, dim=-1).flatten(1).mean(dim=1)
    for name, cosine in {**model.sublayer_cosines(sample), "layer": cosines}.items():
        result.add(f"cosine_{name}", cosine.double().cpu())
    result.add("contribution", relative_sizes.mean(dim=1).double().cpu())
    probabilities = sample.chosen(logits).float().softmax(dim=-1)
    maxima = torch.full((len(removed), model.depth), float("nan"), dtype=torch.float64)
    mean, rows = maxima.clone(), []
    for row, index in enumerate(removed):
        changed, logits_without = model.states_and_logits(sample, {index: model.removed(index)})
        after = slice(index + 1, None)
        moved = (before - contributions(changed)).norm(dim=-1).flatten(1)[after]
        maxima[row, after] = (moved / sizes[after].clamp(min=LEAST)).amax(dim=1)
        mean[row, after] = moved.mean(dim=1) / sizes[after].mean(dim=1).clamp(min=LEAST)
        differences = sample.chosen(logits_without).float().softmax(dim=-1) - probabilities
        rows.append(numbers([sample.loss(logits_without), differences.norm(dim=-1).max()]))
    losses, changes = torch.stack(rows, dim=1)
    result.add("removed", [index + 1 for index in removed])
    result.add("effect_max", maxima.float())
    result.add("effect_mean", mean.float())
    result.add("output_change", changes)
    result.add("causal_score", mean.nanmean())
    if sample.targets is not None:
        result.add("loss_without", losses)
        result.add("loss", sample.loss(logits))


def note_arguments(request: Request, sample: Sample, result: Analysis) -> None:
    """Note the arguments of layers that depend on the stream, beside the stream itself."""
    if moving := request.model.arguments_of_the_stream(sample):
        result.notes.append(
            f"layers are also given {', '.join(moving)}, which depends on earlier streams: what a "
            "layer does through that is not part of its stream x_l"
        )


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


@measure("swap", SWAP, targets=True, uses=["every"])
def swap(request: Request, result: Analysis) -> None:
    """Exchange neighbouring layers, and repeat a layer; two forward passes a layer.

    A layer keeps its own coefficients, norms and arguments (a mask, an embedding of positions) at
    its new position.  Muhtar et al. 2026, arXiv:2603.15389, exchange any two layers; here they are
    neighbours.
    """
    model, sample = request.model, request.held_out
    model.refuse_state(sample)
    if moving := model.arguments_of_the_stream(sample):
        raise ConfigError(
            f"swap: layers are given {', '.join(moving)}, which depends on the stream at their "
            "place; allowed arguments that do not"
        )
    places = model.places(sample)
    differing = [name for a, b in pairwise(places) for name in a.differing(b)]
    if differing:
        result.notes.append(
            f"swap: layers differ in {', '.join(dict.fromkeys(differing))}, which they are given "
            "from outside; an exchanged layer keeps its own"
        )
    chosen = request.chosen(result)
    swapped = [
        model.loss(sample, {i: calling(i + 1), i + 1: calling(i)})
        if i + 1 < model.depth
        else float("nan")
        for i in chosen
    ]
    repeated = [model.loss(sample, {i: model.repeated(i)}) for i in chosen]
    loss = model.loss(sample)
    result.add("changed", [i + 1 for i in chosen])
    result.add("loss_swapped", swapped)
    result.add("loss_repeated", repeated)
    result.add("loss", loss)
    result.add("permutation_score", ((numbers(swapped) - loss).abs() / loss).nanmean())


@measure("linear", LINEAR, targets=True, training=True, uses=["every"])
def linear(request: Request, result: Analysis) -> None:
    """Replace a layer by the linear map of a token's stream that fits it best.

    x_l ≈ W x_{l−1} + b, by ridge regression on training batches; loss and error are measured on
    held-out ones.  The map reads one token at a time, so it has no attention.  Muhtar et al. 2026,
    arXiv:2603.15389, fit without a ridge and evaluate on the data that they fit.  One pass over the
    training batches for all maps, and one forward pass a layer.
    """
    model, sample = request.model, request.held_out
    assert request.training is not None
    model.refuse_state(request.training)
    maps: dict[int, Callable[[Tensor], Tensor]] = {}

    def fit(index: int, call: Call, x: Any) -> Any:
        y = call(index, x)
        maps[index] = fit_linear(model.state(index, x), model.output(index, x, y), request.ridge)
        return y

    def replaced(index: int, call: Call, x: Any) -> Any:
        return model.with_output(index, x, maps[index](model.state(index, x)))

    model.run(request.training, {i: partial(fit, i) for i in request.chosen(result)})
    outputs, logits = model.outputs_and_logits(sample, maps)
    rows = []
    for index, (z, output, passed) in outputs.items():
        predicted = maps[index](z)
        loss_linear = model.loss(sample, {index: partial(replaced, index)})
        errors = unexplained(output, predicted), unexplained(output - passed, predicted - passed)
        rows.append(numbers([loss_linear, *errors]))
    losses, errors_y, errors_c = torch.stack(rows, dim=1)
    loss = sample.loss(logits)
    result.add("changed", [index + 1 for index in maps])
    result.add("loss_linear", losses)
    result.add("unexplained", errors_y)
    result.add("unexplained_contribution", errors_c)
    result.add("loss", loss)
    result.add("usefulness", (losses > SIGNIFICANT * loss).double().mean())


def fit_linear(x: Tensor, y: Tensor, ridge: float) -> Callable[[Tensor], Tensor]:
    """Return the function x Wᵀ + b that has the least squared error as a prediction of y.

    It computes in double precision.

    ridge: the penalty on ‖W‖², relative to the mean variance of a coordinate of x.
    """
    X, Y = (z.flatten(0, -2).double() for z in (x, y))
    mean_x, mean_y = X.mean(dim=0), Y.mean(dim=0)
    X, Y = X - mean_x, Y - mean_y
    gram = X.T @ X
    penalty = ridge * gram.diagonal().mean().clamp(min=torch.finfo(gram.dtype).tiny)
    gram = gram + penalty * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    W = torch.linalg.solve(gram, X.T @ Y).T
    b = mean_y - W @ mean_x
    return lambda x: (x.double() @ W.T + b).to(x.dtype)


def unexplained(y: Tensor, predicted: Tensor) -> Tensor:
    """Return the squared error of a prediction over the variance of y; 0/0 is 0."""
    Y, P = (z.flatten(0, -2).double() for z in (y, predicted))
    error = (Y - P).square().sum()
    total = (Y - Y.mean(dim=0)).square().sum()
    return torch.where(error > 0, error / total, 0.0)
