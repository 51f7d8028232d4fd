"""Analyses of schemes whose stream is more than one tensor."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.family_models import VOCAB, perturbed, tokens_for
from torch import Tensor
from torch.utils._pytree import tree_flatten

from deepstack.diagnostics.skipped_layers import losses_without
from deepstack.records import Analysis
from deepstack.tools.depth_use.analyses import Request, measure_all
from deepstack.tools.depth_use.layered import Sample, StackLayers

DEPTH, STREAMS = 3, 4


def stack(scheme: str, **changes: Any) -> StackLayers:
    built = perturbed(model__depth=DEPTH, model__scheme=scheme, **changes)
    model = built.model.double()
    return StackLayers(model, list(model.stacks)[-1])


def sample(model: StackLayers, seed: int = 0) -> Sample:
    tokens = tokens_for(model.model, seed)
    targets = torch.randint(0, VOCAB, tokens.shape, generator=torch.Generator().manual_seed(seed))
    return Sample(tokens, targets)


# --- hyper-connections, written out --------------------------------------------------------------


def literal_layer(layer: Any, H: Tensor) -> Tensor:
    """A layer of hyper-connections in equation (2) of arXiv:2409.19606; H: (n, batch, seq, d)."""
    for name in ("attention", "feed_forward"):
        G, c = getattr(layer, name), getattr(layer.scheme, f"{name}_connections")
        norm = getattr(layer.scheme, f"{name}_norms")[0]
        C = (c.begin + c.static).expand(*H.shape[:3], STREAMS + 2).clone()
        moved = torch.tanh(c.norm(H) @ c.map.T)
        C[..., :-1] += c.scale_a * moved[..., :-1]
        C[..., -1:] += c.scale_b * moved[..., -1:]
        A_m, A_r, B = C[..., 0], C[..., 1:-1], C[..., -1]
        h = torch.einsum("nbs,nbsd->bsd", A_m, H)
        H = torch.einsum("nbsm,nbsd->mbsd", A_r, H) + B[..., None] * G(norm(h))
    return H


Step = Callable[[Tensor], Tensor]


class Literal:
    """A stack of hyper-connections as a list of functions of H."""

    def __init__(self) -> None:
        self.layers = stack("hyper_connections")
        self.model = self.layers.model
        self.steps: list[Step] = [
            partial(literal_layer, layer) for layer in self.layers.stack.layers
        ]

    def states(self, batch: Sample, steps: list[Step]) -> list[Tensor]:
        (x,) = self.model.inputs(batch.inputs)
        states = [torch.stack([x] * STREAMS)]
        for step in steps:
            states.append(step(states[-1]))
        return states

    def loss(self, batch: Sample, H: Tensor) -> float:
        final = self.layers.stack.final_norm(H.sum(dim=0))
        logits = self.model.head(final, self.model.embedding)
        return F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten()).item()

    def measured(self, name: str, **settings: Any) -> Analysis:
        batch, training = sample(self.layers), sample(self.layers, 1)
        request = Request(self.layers, batch, batch, training, **settings)
        return measure_all([name], request)[name]


def tokens(H: Tensor) -> Tensor:
    """All streams of a token, one after the other: (tokens, n d)."""
    return H.permute(1, 2, 0, 3).reshape(-1, STREAMS * H.shape[-1])


@torch.no_grad()
def test_the_lens_of_hyper_connections_reads_the_sum_of_the_streams() -> None:
    literal = Literal()
    batch = sample(literal.layers)
    losses = [literal.loss(batch, H) for H in literal.states(batch, literal.steps)]
    assert literal.measured("lens").arrays["loss"] == pytest.approx(losses, rel=1e-5)


@torch.no_grad()
def test_effects_of_hyper_connections_are_changes_of_all_streams() -> None:
    literal = Literal()
    batch, result = sample(literal.layers), literal.measured("effects")
    states = literal.states(batch, literal.steps)
    for s in range(DEPTH):
        steps = [*literal.steps]
        steps[s] = lambda H: H
        changed = literal.states(batch, steps)
        loss = literal.loss(batch, changed[-1])
        assert result.arrays["loss_without"][s] == pytest.approx(loss, rel=1e-5)
        for later in range(s + 1, DEPTH):
            c, other = (tokens(z[later + 1] - z[later]) for z in (states, changed))
            mean = (c - other).norm(dim=-1).mean() / c.norm(dim=-1).mean()
            assert result.arrays["effect_mean"][s, later] == pytest.approx(mean.item(), rel=1e-5)
    sizes = [
        (tokens(after - H).norm(dim=-1) / tokens(H).norm(dim=-1)).mean().item()
        for H, after in pairwise(states)
    ]
    assert result.arrays["contribution"] == pytest.approx(sizes, rel=1e-5)


@torch.no_grad()
def test_exchanges_and_linear_maps_of_hyper_connections_are_literal_ones() -> None:
    literal = Literal()
    batch = sample(literal.layers)
    swapped, linear = literal.measured("swap"), literal.measured("linear", ridge=1e-12)
    fitted = literal.states(sample(literal.layers, 1), literal.steps)
    held_out = literal.states(batch, literal.steps)
    for i, step in enumerate(literal.steps):
        before, after = literal.steps[:i], literal.steps[i + 1 :]
        repeated = literal.states(batch, [*before, step, step, *after])[-1]
        assert swapped.arrays["loss_repeated"][i] == pytest.approx(
            literal.loss(batch, repeated), rel=1e-5
        )
        if after:
            exchanged = literal.states(batch, [*before, after[0], step, *after[1:]])[-1]
            assert swapped.arrays["loss_swapped"][i] == pytest.approx(
                literal.loss(batch, exchanged), rel=1e-5
            )
        X, Y = tokens(fitted[i]), tokens(fitted[i + 1])
        mean, y_mean = X.mean(dim=0), Y.mean(dim=0)
        W = torch.linalg.lstsq(X - mean, Y - y_mean, driver="gelsd").solution

        def affine(H: Tensor, W: Tensor = W, mean: Tensor = mean, y: Tensor = y_mean) -> Tensor:
            z = (tokens(H) - mean) @ W + y
            return z.reshape(*H.shape[1:3], STREAMS, -1).permute(2, 0, 1, 3)

        replaced = literal.states(batch, [*before, affine, *after])[-1]
        assert linear.arrays["loss_linear"][i] == pytest.approx(
            literal.loss(batch, replaced), rel=1e-3
        )
        y = tokens(held_out[i + 1])
        rest = y - tokens(affine(held_out[i]))
        share = rest.square().sum() / (y - y.mean(dim=0)).square().sum()
        assert linear.arrays["unexplained"][i] == pytest.approx(share.item(), rel=1e-3)


@pytest.mark.slow
def test_the_jacobian_of_hyper_connections_is_of_all_streams() -> None:
    literal = Literal()
    result = literal.measured("jacobian", probes=16, iterations=60, every=DEPTH)
    norms, squares = [], []
    for H in literal.states(sample(literal.layers), [])[0].detach().unbind(dim=1):
        J = torch.autograd.functional.jacobian(lambda H: literal.steps[0](H[:, None])[:, 0], H)
        J = J.reshape(H.numel(), H.numel())
        norms.append(torch.linalg.matrix_norm(J, ord=2).item())
        squares.append((J - torch.eye(len(J), dtype=J.dtype)).square().sum().item() / len(J))
    assert result.arrays["spectral_norm"] == pytest.approx([sum(norms) / len(norms)], rel=2e-2)
    exact = (sum(squares) / len(squares)) ** 0.5
    error = result.arrays["from_identity_error"][0]
    assert abs(result.arrays["from_identity"][0] - exact) < 4 * error < exact


# --- every scheme --------------------------------------------------------------------------------


def assert_equal(one: Any, two: Any) -> None:
    (first, form), (second, other) = tree_flatten(one), tree_flatten(two)
    assert form == other
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b)


SEVERAL = [
    "attn_res", "dense_former", "dlcl", "mhc", "mudd", "residual", "siamese_norm", "x0_lambdas",
]  # fmt: skip
OPTIONS = {
    "attn_res": {"blocks": 2}, "x0_lambdas": {"backout": 0.3}, "dense_former": {"period": 2},
    "mudd": {"norms": True},
}  # fmt: skip


@pytest.mark.parametrize("scheme", SEVERAL)
@pytest.mark.parametrize("with_options", [False, pytest.param(True, marks=pytest.mark.slow)])
@torch.no_grad()
def test_a_stream_is_set_to_its_own_state_and_output(scheme: str, with_options: bool) -> None:
    options = OPTIONS.get(scheme, {}) if with_options else {}
    model = stack(scheme, model__scheme_options=options)
    (x,) = model.model.inputs(sample(model).inputs)
    with model.ready():
        before = model.stack.enter(x)
        for index, layer in enumerate(model.stack.layers):
            after = layer(before)
            assert_equal(model.with_state(index, before, model.state(index, before)), before)
            output = model.output(index, before, after)
            assert_equal(model.with_output(index, before, output), after)
            passed = model.pass_over(index, before)
            assert model.output(index, before, passed).shape == output.shape
            before = after


@pytest.mark.parametrize("scheme", SEVERAL)
@torch.no_grad()
def test_a_removal_is_the_one_of_the_diagnostic_of_skipped_layers(scheme: str) -> None:
    model = stack(scheme, model__scheme_options=OPTIONS.get(scheme, {}))
    batch = sample(model)
    assert batch.targets is not None
    mean_loss = partial(F.cross_entropy, target=batch.targets.flatten())
    (losses,) = losses_without(
        model.model, batch.inputs, lambda x: mean_loss(x.flatten(0, 1)), DEPTH
    ).values()
    (result,) = measure_all(["effects"], Request(model, batch, batch)).values()
    assert result.arrays["loss_without"] == pytest.approx(losses.numpy(), rel=1e-5)


@pytest.mark.parametrize("scheme", ["dense_former", "dlcl", "mudd"])
@torch.no_grad()
def test_a_layer_whose_sublayers_add_nothing_is_passed_over(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = stack(scheme, model__scheme_options=OPTIONS.get(scheme, {}))
    (x,) = model.model.inputs(sample(model).inputs)
    with model.ready():
        before = model.stack.enter(x)
        for index, layer in enumerate(model.stack.layers):
            passed, after = model.pass_over(index, before), layer(before)
            for module in (layer.attention, layer.feed_forward):
                monkeypatch.setattr(module, "forward", lambda x, **_: x * 0)
            assert_equal(layer(before), passed)
            before = after


@torch.no_grad()
def test_a_removed_middle_layer_of_x0_lambdas_leaves_the_stream_that_enters_it_as_x_m() -> None:
    model = stack("x0_lambdas", model__scheme_options={"backout": 0.3})  # m = 2
    batch = sample(model)
    assert batch.targets is not None
    (x,) = model.model.inputs(batch.inputs)
    start = model.stack.enter(x)
    one = model.stack.layers[0](start)[0]
    last = model.stack.layers[2]((one, start[1], one))[0]
    logits = model.model.head(model.stack.final_norm(last - 0.3 * one), model.model.embedding)
    loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten()).item()
    (result,) = measure_all(["effects"], Request(model, batch, batch)).values()
    assert result.arrays["loss_without"][1] == pytest.approx(loss, rel=1e-5)
