"""Every analysis against a slow literal version, and on stacks whose answer is known."""

import math
import statistics
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.family_models import VOCAB, perturbed, tokens_for
from helpers.sampling import some
from torch import Tensor

from deepstack.records import Analysis
from deepstack.schemes import SCHEMES
from deepstack.tasks import IGNORE
from deepstack.tools.depth_use.analyses import COLUMNS, MEASURES, Request, measure_all
from deepstack.tools.depth_use.analyses.jacobian import distance_from_identity
from deepstack.tools.depth_use.effective_depth import effective_depth
from deepstack.tools.depth_use.layered import Sample, StackLayers

DEPTH = 4


def stack(**changes: Any) -> StackLayers:
    built = perturbed(**{"model__depth": DEPTH, "model__scheme": "pre_ln"} | changes)
    model = built.model.double()
    return StackLayers(model, list(model.stacks)[-1])


def sample(model: StackLayers, seed: int = 0) -> Sample:
    tokens = tokens_for(model.model, seed)
    shape = (len(tokens), tokens.shape[1] - model.model.source_len)
    targets = torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(seed))
    targets[:, ::3] = IGNORE
    return Sample(tokens, targets)


def measured(name: str, model: StackLayers, **settings: Any) -> Analysis:
    batch = sample(model)
    request = Request(model, batch, batch, sample(model, 1), **settings)
    result = measure_all([name], request)[name]
    assert result.columns.keys() <= COLUMNS[name].keys()
    return result


def literal_states(model: StackLayers, batch: Sample) -> list[Tensor]:
    *source, x = model.model.inputs(batch.inputs)
    memory = model.model.encoder(source[0]) if source else None
    start = model.stack.enter(x)
    return list(accumulate(model.stack.layers, lambda x, l: l(x, memory), initial=start))


def logits_of(model: StackLayers, x: Tensor) -> Tensor:
    return model.model.head(model.stack.leave(x), model.model.embedding)


def loss_of(logits: Tensor, batch: Sample) -> float:
    assert batch.targets is not None
    targets = batch.targets.flatten()
    return F.cross_entropy(logits.flatten(0, 1), targets, ignore_index=IGNORE).item()


def loss_through(model: StackLayers, order: list[Any]) -> float:
    """The loss of the layers (or functions) of `order` in place of 0, 1, …."""
    batch = sample(model)
    (x,) = model.model.inputs(batch.inputs)
    x = model.stack.enter(x)
    for layer in order:
        x = layer(x) if callable(layer) else model.stack.layers[layer](x)
    return loss_of(logits_of(model, x), batch)


@pytest.mark.parametrize("family", ["encoder", "decoder", "encoder_decoder"])
@torch.no_grad()
def test_the_lens_equals_a_literal_lens(family: str) -> None:
    model = stack(model__family=family, task__name="copy" if family != "encoder" else "markov")
    result, batch = measured("lens", model), sample(model)
    states = literal_states(model, batch)
    assert batch.targets is not None
    counted = batch.targets != IGNORE
    final = logits_of(model, states[-1])[counted].log_softmax(-1)
    for index, x in enumerate(states):
        logits = logits_of(model, x)
        log_p = logits[counted].log_softmax(-1)
        kl = F.kl_div(final, log_p, reduction="batchmean", log_target=True).item()
        tops = zip(log_p.topk(5).indices.tolist(), final.topk(5).indices.tolist(), strict=True)
        shared = sum(len(set(own) & set(last)) for own, last in tops) / 5 / len(final)
        same = (log_p.argmax(-1) == final.argmax(-1)).double().mean().item()
        # the analysis takes softmax in float32
        assert result.arrays["loss"][index] == pytest.approx(loss_of(logits, batch), rel=1e-5)
        assert result.arrays["kl"][index] == pytest.approx(kl, abs=1e-5)
        assert result.arrays["overlap"][index] == pytest.approx(shared)
        assert result.arrays["agreement"][index] == pytest.approx(same)
    assert result.arrays["kl"][-1] == 0.0 and result.arrays["agreement"][-1] == 1.0
    assert result.scalars["final_loss"] == result.arrays["loss"][-1]
    assert result.scalars["effective_depth"] == effective_depth(result.arrays["kl"])


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        ([4.0, 3.0, 2.0, 1.9, 0.0], 3),
        ([1.0, 2.0, 4.0, 3.0, 0.0], 0),  # the first, although later ones are larger
        ([0.0, 0.0], 0),
        ([float("nan"), 2.0, 0.5, 0.0], 2),
    ],
)
def test_effective_depth_is_the_first_below_half(kl: list[float], expected: int) -> None:
    assert effective_depth(kl) == expected


@torch.no_grad()
def test_effects_equal_literal_removals() -> None:
    model = stack()
    result, batch = measured("effects", model), sample(model)
    states = literal_states(model, batch)
    for s in range(DEPTH):
        x, changed = states[0], [states[0]]
        for index, layer in enumerate(model.stack.layers):
            x = x if index == s else layer(x)
            changed.append(x)
        logits, before = logits_of(model, x), logits_of(model, states[-1])
        assert result.arrays["loss_without"][s] == pytest.approx(loss_of(logits, batch), rel=1e-5)
        rows = batch.chosen(before).softmax(-1) - batch.chosen(logits).softmax(-1)
        change = rows.norm(dim=-1).max().item()
        assert result.arrays["output_change"][s] == pytest.approx(change, abs=1e-5)
        for later in range(s + 1, DEPTH):
            c = (states[later + 1] - states[later]).flatten(0, 1)
            other = (changed[later + 1] - changed[later]).flatten(0, 1)
            moved, whole = (c - other).norm(dim=-1), c.norm(dim=-1)
            largest, mean = (moved / whole).max().item(), (moved.sum() / whole.sum()).item()
            assert result.arrays["effect_max"][s, later] == pytest.approx(largest, rel=1e-5)
            assert result.arrays["effect_mean"][s, later] == pytest.approx(mean, rel=1e-5)
        assert not any(result.arrays["effect_max"][s, : s + 1] >= 0)  # NaN: not a later layer
    for index, layer in enumerate(model.stack.layers):
        x, scheme = states[index], layer.scheme
        (one,), (two,) = scheme.per_sublayer("norms")
        A = layer.attention(one(x))
        C = layer.feed_forward(two(x + A))
        pairs = {"attention": (A, x), "feed_forward": (C, x + A), "layer": (A + C, x)}
        for name, (G, stream) in pairs.items():
            expected = F.cosine_similarity(G, stream, dim=-1).mean().item()
            assert result.arrays[f"cosine_{name}"][index] == pytest.approx(expected, abs=1e-6)


@torch.no_grad()
def test_swaps_are_literal_ones() -> None:
    model = stack(model__family="decoder", task__name="copy")
    result = measured("swap", model)
    repeated = [loss_through(model, [*range(i + 1), *range(i, DEPTH)]) for i in range(DEPTH)]
    orders = [[*range(i), i + 1, i, *range(i + 2, DEPTH)] for i in range(DEPTH - 1)]
    swapped = [*(loss_through(model, order) for order in orders), math.nan]  # no layer after it
    assert result.arrays["loss_repeated"] == pytest.approx(repeated, rel=1e-5)
    assert result.arrays["loss_swapped"] == pytest.approx(swapped, rel=1e-5, nan_ok=True)


@torch.no_grad()
def test_linear_maps_are_least_squares_of_training_tokens() -> None:
    model = stack()
    result = measured("linear", model, ridge=1e-12)
    fitted, held_out = (literal_states(model, sample(model, seed)) for seed in (1, 0))
    for i in range(DEPTH):
        X, Y = (x.flatten(0, 1) for x in fitted[i : i + 2])
        # 16 tokens and 17 unknowns: the shortest solution of many, as for a vanishing ridge
        mean, y_mean = X.mean(dim=0), Y.mean(dim=0)
        W = torch.linalg.lstsq(X - mean, Y - y_mean, driver="gelsd").solution

        def affine(x: Tensor, W: Tensor = W, mean: Tensor = mean, y: Tensor = y_mean) -> Tensor:
            return (x - mean) @ W + y

        expected = loss_through(model, [*range(i), affine, *range(i + 1, DEPTH)])
        assert result.arrays["loss_linear"][i] == pytest.approx(expected, rel=1e-3)
        y, rest = held_out[i + 1], held_out[i + 1] - affine(held_out[i])
        share = rest.square().sum() / (y - y.mean(dim=(0, 1))).square().sum()
        assert result.arrays["unexplained"][i] == pytest.approx(share.item(), rel=1e-3)


@torch.no_grad()
def test_similarities_are_literal_ones() -> None:
    model, other = stack(), stack(model__depth=2, seed=3)
    result = measured("similarity", model, other=other)
    states = literal_states(model, sample(model))
    others = literal_states(other, sample(model))

    def cka(x: Tensor, y: Tensor) -> float:
        """By the Gram matrices of the tokens."""
        X, Y = (z.flatten(0, 1) - z.flatten(0, 1).mean(dim=0) for z in (x, y))
        K, L = X @ X.T, Y @ Y.T
        return ((K * L).sum() / (K.norm() * L.norm())).item()

    cosines = [[F.cosine_similarity(x, y, dim=-1).mean().item() for y in states] for x in states]
    assert result.arrays["cosine"] == pytest.approx(np.array(cosines), abs=1e-6)
    for name, columns in (("cka", states), ("cka_with", others)):
        wanted = np.array([[cka(x, y) for y in columns] for x in states])
        assert result.arrays[name] == pytest.approx(wanted, rel=1e-5)
    assert result.arrays["layers_with"].tolist() == [0, 1, 2]


def test_jacobians_are_measured_of_batch_norms_whose_averages_are_known() -> None:
    model = stack(model__scheme="post_ln", model__norm__kind="batch")
    for norm in model.transformer.batch_norms:
        norm.batches.add_(1)
        norm.running_var.add_(1)
    assert measured("jacobian", model).scalars["mean_from_identity"]


@pytest.mark.slow(turn=23)
def test_jacobian_norms_equal_the_whole_matrices() -> None:
    model = stack(model__family="decoder", task__name="copy")
    result = measured("jacobian", model, probes=16, iterations=150)
    with model.ready():
        states = literal_states(model, sample(model))
    for i, layer in enumerate(model.stack.layers):
        squares, norms = [], []
        for x in states[i]:
            J = torch.autograd.functional.jacobian(lambda x, l=layer: l(x[None])[0], x)
            J = J.reshape(x.numel(), x.numel())
            squares.append((J - torch.eye(len(J), dtype=J.dtype)).square().sum() / len(J))
            norms.append(torch.linalg.matrix_norm(J, ord=2).item())
        exact = torch.stack(squares).mean().sqrt().item()
        error = result.arrays["from_identity_error"][i]
        assert 0 < error < 0.3 * exact
        assert abs(result.arrays["from_identity"][i] - exact) < 4 * error
        assert result.arrays["spectral_norm"][i] == pytest.approx(sum(norms) / 2, rel=1e-2)
        assert result.arrays["spectral_norm_max"][i] == pytest.approx(max(norms), rel=1e-2)


@pytest.mark.slow(turn=35)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, of forward mode
def test_the_error_of_a_jacobians_distance_is_its_spread_over_probes() -> None:
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(8, 8, generator=generator, dtype=torch.float64)
    x = torch.zeros(1, 1, 8, dtype=torch.float64)
    drawn = [distance_from_identity(lambda x: x @ matrix, x, 32, generator) for _ in range(200)]
    estimates, errors = zip(*drawn, strict=True)
    assert statistics.stdev(estimates) == pytest.approx(statistics.mean(errors), rel=0.2)


def test_every_so_many_layers_are_changed() -> None:
    model = stack(model__depth=7)
    effects = measured("effects", model, every=3)
    assert effects.arrays["removed"].tolist() == [1, 4, 7]
    assert effects.arrays["effect_max"].shape == (3, 7)
    assert "only layers 1, 4, 7, … of 7" in effects.notes[0]
    whole = measured("effects", model)
    assert effects.arrays["loss_without"] == pytest.approx(whole.arrays["loss_without"][::3])
    assert measured("similarity", model, every=3).arrays["layers"].tolist() == [0, 1, 4, 7]


@pytest.mark.parametrize("scheme", some(sorted(SCHEMES), 12))
def test_every_scheme_is_measured(scheme: str) -> None:
    model = stack(model__scheme=scheme)
    final = model.loss(sample(model))
    for name in sorted(MEASURES):
        result = measured(name, model, probes=2, iterations=3)
        assert all(math.isfinite(value) for value in result.scalars.values()), name
        if "final_loss" in result.scalars or "loss" in result.scalars:
            loss = result.scalars.get("final_loss", result.scalars.get("loss"))
            assert loss == pytest.approx(final, rel=1e-5), name


@pytest.mark.slow(turn=62)
def test_both_sides_of_an_encoder_decoder_are_measured() -> None:
    model = stack(model__family="encoder_decoder", task__name="copy", model__scheme="deepnorm")
    batch = sample(model)
    loss = loss_of(model.model(batch.inputs), batch)
    for side in (model, StackLayers(model.model, "encoder")):
        request = Request(side, batch, batch, batch, probes=2, iterations=3)
        results = measure_all(list(MEASURES), request)
        assert results["lens"].scalars["final_loss"] == pytest.approx(loss)
        assert ("cosine_cross_attention" in results["effects"].arrays) == (side is model)
    assert results["effects"].arrays["loss_without"].std() > 0
