"""Schemes whose values come from the first layer, whose stream is mapped, cut up or split."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.scheme_pieces import TOKENS, D, Pieces, built, perturbed, pieces

One = Callable[[torch.Tensor], torch.Tensor]


def with_values(a: Any, b: Any, reads: Callable[[int, int], bool]) -> Callable[..., Any]:
    """Value residuals in the layers that read v_1: a and b numbers, or given the slot."""

    def layer(p: Pieces, stream: Any) -> Any:
        x, first = stream
        kept = []

        def values(qkv: torch.Tensor) -> Any:
            q, k, v = qkv
            kept.append(v if p.l == 1 else first)
            slot = p.slot("mixed_values")
            of_first, of_own = (n(slot) if callable(n) else n for n in (a, b))
            return q, k, of_first * kept[0] + of_own * v if reads(p.l, p.N) else v

        x = x + p.A(p.a[0](x), qkv=values)
        return x + p.F(p.f[0](x)), kept[0]

    return layer


def after_first(l: int, N: int) -> bool:
    return l > 1


VARIANTS: list[tuple[dict[str, Any], Callable[..., Any]]] = [
    ({"first": 2.0, "own": 1.0}, with_values(2, 1, after_first)),
    (
        {"learnable": True},
        with_values(lambda slot: slot.of_first, lambda slot: slot.of_own, after_first),
    ),
    ({"last": 2, "first": 5.0, "own": 1.0}, with_values(5, 1, lambda l, N: l > N - 2)),
    ({"last": 9}, with_values(0.5, 0.5, after_first)),
    ({"first": 1.0, "own": 0.0}, with_values(1, 0, after_first)),
]


@pytest.mark.parametrize(
    ("options", "literal"), VARIANTS, ids=[str(options) for options, _ in VARIANTS]
)
def test_variants_of_value_residuals_are_their_equations(
    options: dict[str, Any], literal: Callable[..., Any]
) -> None:
    model = perturbed("res_former", 5, model__scheme_options=options)
    x = torch.randn(2, 6, D)
    stream, expected = model.last.enter(x), (x, None)
    for l, layer in enumerate(model.layers, start=1):
        stream, expected = layer(stream), literal(pieces(layer, l, 5), expected)
        for ours, theirs in zip(stream, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_learnable_coefficients_start_at_a_half_and_are_trained() -> None:
    one = built("res_former", 4, model__scheme_options={"learnable": True})
    torch.testing.assert_close(
        one.model.hidden(TOKENS), built("res_former", 4).model.hidden(TOKENS)
    )
    one.model.hidden(TOKENS).square().mean().backward()
    for l, layer in enumerate(one.model.layers, start=1):
        slot = layer.scheme.slots["mixed_values"]
        assert (slot.of_first.item(), slot.of_own.item()) == (0.5, 0.5)
        assert bool(slot.of_first.grad) == bool(slot.of_own.grad) == (l > 1)


def test_value_residuals_drop_attention_weights_as_pre_ln_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rates: list[float] = []
    plain = torch.nn.functional.scaled_dot_product_attention

    def watch(*args: Any, dropout_p: float, **more: Any) -> torch.Tensor:
        rates.append(dropout_p)
        return plain(*args, dropout_p=dropout_p, **more)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watch)
    model = built("res_former", 2, model__dropout=0.25).model
    model.train().hidden(TOKENS)
    model.eval().hidden(TOKENS)
    assert rates == [0.25, 0.25, 0.0, 0.0]


def test_the_low_rank_map_starts_with_orthogonal_columns() -> None:
    scheme = built("laurel", 1, model__scheme_options={"rank": 3}).model.schemes[0]
    A = scheme.begin  # (rank, d): each of the 12 coordinates goes to one of 3
    torch.testing.assert_close(A @ A.T, torch.eye(3) * (D / 3) / (3 * D))
    assert ((A != 0).sum(0) == 1).all() and A[1, 4] == A[1, 7] == 1 / 6


@pytest.mark.parametrize("name", ["frac_connections", "hyper_connections"])
def test_mixed_streams_are_not_rounded_under_autocast(name: str) -> None:
    model = built(name, 6).model
    with torch.no_grad():
        for layer in model.layers:
            layer.attention.o.zero_(), layer.feed_forward.w2.zero_()
    x = model.start(TOKENS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        *_, stream = model.last.stream(x)
    for last in (stream,) if torch.is_tensor(stream) else stream:
        assert last.dtype is torch.float32 and torch.equal(last, x.expand_as(last))


def test_layers_grow_in_one_after_the_other_and_end_as_pre_ln() -> None:
    options = {"ramp_steps": 10}
    slow, pre_ln = built("pro_res", 4, model__scheme_options=options), built("pre_ln", 4)
    *_, last = slow.model.last.stream(slow.model.start(TOKENS))
    assert torch.equal(last, slow.model.start(TOKENS))  # F_0: no branch is there yet
    for step, wanted in ((1, [0.0] * 4), (16, [1.0, 15 / 20, 15 / 30, 15 / 40])):
        slow.at_step(step)  # a = (t - 1) / (l ramp_steps): the first step trains with 0
        assert [s.ramp.item() for s in slow.model.schemes] == pytest.approx(wanted)
    slow.at_step(41)
    torch.testing.assert_close(slow.model.hidden(TOKENS), pre_ln.model.hidden(TOKENS))


@pytest.mark.parametrize("family", ["encoder", "decoder"])
def test_siamese_norm_has_no_parameter_without_use(family: str) -> None:
    """Six norms in each layer, and three at the end of the stack."""
    depth = 5
    one = built("siamese_norm", depth, model__family=family)
    counts = one.banks.count()
    assert counts["norm_gain"] == counts["norm_bias"] == (6 * depth + 2) * D
    assert counts["final_norm"] == 2 * D
    F = one.model.hidden(TOKENS)
    (F * torch.randn_like(F)).sum().backward()
    for bank in one.banks:
        used = bank.gradients().flatten(1).any(dim=1)
        assert used.all() or bank.key.startswith("head"), bank.key
