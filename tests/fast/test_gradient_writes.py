"""Sums written where a step adds them to zero are the sums."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.replayed_config import config
from torch import Tensor

import deepstack
from deepstack.fast import Measured, replaying
from deepstack.fast.gradient_writes import adds_nothing, written_at_once
from deepstack.fast.recording import Call, TensorRef

aten = torch.ops.aten
Added = Callable[[Tensor, Tensor, Tensor], Tensor]


@pytest.fixture
def lists(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[Call], list[Call]]]:
    """The calls of every step that is replayed, as they were recorded and as they are made."""
    found: list[tuple[list[Call], list[Call]]] = []

    def seen(calls: list[Call], *more: Any) -> list[Call]:
        found.append((calls, written_at_once(calls, *more)))
        return found[-1][1]

    monkeypatch.setattr("deepstack.fast.replay.written_at_once", seen)
    return found


def count(calls: list[Call], *operations: Any) -> int:
    return sum(call.operation in operations for call in calls)


@pytest.mark.parametrize("d_model", [24, 32])  # with padding behind every bias, and without
@pytest.mark.parametrize("banks", [True, False])
def test_no_gradient_of_a_layer_is_added_to_zero(
    d_model: int, banks: bool, tmp_path: Path, lists: list[tuple[list[Call], list[Call]]]
) -> None:
    given = config(runtime__replay=True, runtime__banks=banks, train__steps=5,
                   model__d_model=d_model, model__n_heads=2)  # fmt: skip
    run = deepstack.train(given, out=tmp_path)
    [(recorded, made)] = lists
    assert count(recorded, aten.addmm_.default) == 16, "four products in four layers"
    assert count(made, aten.addmm_.default) == 0
    layers, all_of_them = 32, count(recorded, aten.add_.Tensor)
    assert count(made, aten.add_.Tensor) <= all_of_them - layers
    [zeroing] = [call for call in made if call.operation is aten._foreach_zero_.default]
    rest = sum(torch.Size(place.size).numel() for place in zeroing.args[0])
    tables = sum(run.meta["parameters"][role] for role in ("embedding", "position"))
    assert tables <= rest <= tables + 2000, "the tables, and padding"


def once(g: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return g.addmm_(x.t(), y[:, :16])


def twice(g: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return once(g, x, y).addmm_(x.t() * 2, y[:, :16])


def sums_in_rows(g: Tensor, x: Tensor, y: Tensor) -> Tensor:
    for row in range(6):
        g[row, :16].add_((y[:, :16] * row).sum(0))
    return g


def padded(g: Tensor, x: Tensor, y: Tensor) -> Tensor:
    for row in range(6):
        g[row, :12].add_((y[:, :12] * row).sum(0))
    return g


def with_uneven_gaps(g: Tensor, x: Tensor, y: Tensor) -> Tensor:
    for row in (1, 2, 5):
        g[row].add_((y[:, :16] * row).sum(0))
    return g


def read_between(g: Tensor, x: Tensor, y: Tensor) -> Tensor:
    before = g.sum() + 1
    return once(g, x, y) * before


def transposed(g: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return g.t().addmm_(y[:, :16].t(), x)


def times_two(g: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return g.addmm_(x.t(), y[:, :16], alpha=2)


def scaled_before(g: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return g.addmm_(x.t(), y[:, :16], beta=3)


def read_elsewhere(g: Tensor, x: Tensor, y: Tensor) -> Tensor:
    row = y[:, :16].sum(0)
    for index in range(6):
        g[index].add_(row)
    return g * row


def one_for_all(g: Tensor, x: Tensor, y: Tensor) -> Tensor:
    for row in range(6):
        g[row].add_(y[:, row : row + 1].sum(0))
    return g


def part_of_a_sum(g: Tensor, x: Tensor, y: Tensor) -> Tensor:
    for row in range(6):
        g[row].add_((y * row).sum(0)[:16])
    return g


def turned(g: Tensor, x: Tensor, y: Tensor) -> Tensor:
    for row in range(6):
        g[row].view(4, 4).add_((y[:, :16] * row).view(9, 4, 4).sum(0).t())
    return g


def overlapping(g: Tensor, x: Tensor, y: Tensor) -> Tensor:
    g[:4].addmm_(x.t()[:4], y[:, :16])
    return g[2:].addmm_(x.t()[2:], y[:, :16]) + g.sum()


def overlapping_from_below(g: Tensor, x: Tensor, y: Tensor) -> Tensor:
    g[2:].addmm_(x.t()[2:], y[:, :16])
    return g[:4].addmm_(x.t()[:4], y[:, :16]) + g.sum()


def of_itself(g: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return g.addmm_(g @ g.t() + 1, g + 1)


def products(g: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """What is added is no sum: it may be -0."""
    return g.add_((x[:6, :1] * 0) * y[:6, :16])


@pytest.mark.parametrize(
    ("add", "written"),
    [(once, True), (twice, True), (sums_in_rows, True), (padded, True), (overlapping, True),
     (overlapping_from_below, True), (with_uneven_gaps, False), (read_between, False),
     (transposed, False), (times_two, False), (scaled_before, False), (read_elsewhere, False),
     (of_itself, False), (products, False), (one_for_all, False), (part_of_a_sum, False),
     (turned, False)],
)  # fmt: skip
def test_only_what_is_added_to_zero_is_written(
    add: Added, written: bool, lists: list[tuple[list[Call], list[Call]]]
) -> None:
    g = torch.empty(6, 16)

    def update(x: Tensor, y: Tensor) -> Measured:
        torch._foreach_zero_([g])
        found = add(g, x, y).clone()
        found = torch.cat([found.reshape(-1), g.reshape(-1)])
        g.fill_(7.0)  # what is there before it is set to zero again
        return Measured(found, found.sum(), torch.ones(()), {})

    def bits(step: Callable[[Tensor, Tensor], Measured]) -> list[Any]:
        torch.manual_seed(0)
        return [
            step(torch.randn(9, 6), torch.randn(9, 20)).loss.view(torch.int32).tolist()
            for _ in range(6)
        ]

    assert bits(replaying(update, None, print)) == bits(update)
    [(recorded, made)] = lists
    assert (made != recorded) is written


def test_what_may_give_minus_zero_is_found() -> None:
    shape = TensorRef(0, 0, (4, 4), (4, 1), torch.float32)
    assert adds_nothing(aten.mm.default, [shape, shape])
    assert adds_nothing(aten.sum.dim_IntList, [shape, [0]])
    assert not adds_nothing(aten.mul.Tensor, [shape, shape])
    assert not adds_nothing(aten.mm.default, [shape._replace(dtype=torch.bfloat16)] * 2)
    assert not adds_nothing(aten.mm.default, [shape, shape._replace(size=(4, 2**20))])
