"""What a probe measures in the pass of the next step's batch is what it measures by itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.replayed_config import config
from torch import Tensor

import deepstack
from deepstack.fast import Measured, replaying
from deepstack.fast.probe_fusion import Either, Operation
from deepstack.fast.replay import decided, layout
from deepstack.schemes import SCHEMES

# Streams or layers lie side by side in the first dimension; what the scheme computes changes.
NOT_SHARED = {"hyper_connections", "mhc", "dlcl", "dense_former", "branch_norm", "pro_res",
              "frac_connections"}  # fmt: skip


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Of every joint pass: how many pairs of operations it has, and how many became one."""
    found: list[tuple[int, int]] = []

    def seen(operations: list[Operation | Either]) -> list[Operation]:
        chosen = decided(operations)
        pairs = sum(isinstance(operation, Either) for operation in operations)
        found.append((pairs, pairs - (len(chosen) - len(operations))))
        return chosen

    monkeypatch.setattr("deepstack.fast.replay.decided", seen)
    return found


@pytest.mark.parametrize("name", SCHEMES.names())
def test_a_scheme_is_measured_in_the_pass_of_the_batch(
    name: str, tmp_path: Path, shared: list[tuple[int, int]]
) -> None:
    given = config(model__scheme=name, runtime__replay=True, train__steps=6, train__eval_every=0,
                   log__layers_every=0, log__probe_sequences=2)  # fmt: skip
    deepstack.train(given, out=tmp_path)
    if name in NOT_SHARED:
        assert not shared
    else:
        [(pairs, ones)] = shared
        assert pairs == ones >= 4 * 8, "four layers of ten operations or so"


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_heads_that_are_normed_and_turned_are_measured_there_too(
    kind: str, tmp_path: Path, shared: list[tuple[int, int]]
) -> None:
    given = config(model__positions="rotary", model__qk_norm=True, model__norm__kind=kind,
                   runtime__replay=True, train__eval_every=0, log__layers_every=0)  # fmt: skip
    deepstack.train(given, out=tmp_path)
    [(pairs, ones)] = shared
    assert pairs == ones >= 4 * 16, "an attention alone has ten"


def test_a_row_is_the_same_whether_its_probe_waits_or_not(
    tmp_path: Path, shared: list[tuple[int, int]]
) -> None:
    """A validation after every step leaves nothing to the next one."""
    runs = [
        deepstack.train(config(runtime__replay=replay, train__eval_every=every,
                               log__layers_every=0), out=tmp_path / f"{replay}-{every}")
        for replay, every in ((False, 0), (True, 0), (True, 1))
    ]  # fmt: skip
    assert len(shared) == 1
    assert len({(run.path / "steps.csv").read_bytes() for run in runs}) == 1
    assert all((run.timing["step_ms"] > 0).all() for run in runs)


def test_across_rows_the_two_stay_two(tmp_path: Path, shared: list[tuple[int, int]]) -> None:
    deepstack.train(config(model__norm__kind="batch", runtime__replay=True, train__eval_every=0,
                           log__layers_every=0), out=tmp_path)  # fmt: skip
    [(pairs, ones)] = shared
    assert pairs - ones == 8, "a batch norm a sublayer"


class Toy:
    """A layer that is trained, and its probe: update, probe and what both compute."""

    def __init__(self, f: Callable[[Tensor, Tensor], Tensor], tokens: int = 4) -> None:
        torch.manual_seed(1)
        self.f, self.calls = f, 0
        self.w = (torch.randn(32, 32) / 4).requires_grad_()
        self.w.grad = torch.zeros(32, 32)
        self.tokens, self.count = torch.randn(tokens, 32), torch.zeros(())

    def compute(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.f(F.layer_norm(F.linear(x, self.w), (32,)).relu_() + x, self.w)
        return x

    def update(self, x: Tensor, targets: Tensor) -> Measured:
        self.calls += 1
        assert self.w.grad is not None
        self.w.grad.zero_()
        loss = self.compute(x).square().mean()
        loss.backward()
        with torch.no_grad():
            self.w.sub_(0.1 * self.w.grad)
        return Measured(loss.detach(), self.w.grad.norm(), torch.ones(()), {})

    def probe(self) -> dict[str, Tensor]:
        with torch.no_grad():
            found = self.compute(self.tokens)
            return {"mean": found.mean(), "whole": found}


def rows(toy: Any, replay: bool, settled: Callable[[int], bool] = lambda _: False) -> list[Any]:
    """What every step gives, in bytes; the probe's values as soon as they are there."""
    step = replaying(toy.update, toy.probe, print)
    found: list[Any] = []
    waiting: Measured | None = None
    torch.manual_seed(2)
    for index in range(12):
        x = torch.randn(6 if index == 8 else 16, 32)
        if replay:
            measured = step(x, x)
        else:
            measured = toy.update(x, x)._replace(probe=toy.probe())
        if waiting is not None:
            found.append(numbers(waiting.probe.values()))
        found.append(numbers(measured[:3]))
        if measured.settle is not None and not settled(index) and index < 11:
            waiting = measured
            continue
        if measured.settle is not None:
            measured.settle()
        found.append(numbers(measured.probe.values()))
        waiting = None
    assert not replay or toy.calls == 4, "three steps, and the one of another shape"
    return found


def numbers(values: Any) -> list[list[float]]:
    return [value.reshape(-1).tolist() for value in values]


KINDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "by_rows": lambda x, w: x * 0.5,
    "of_parameters": lambda x, w: x + w.tanh().sum(0),
    "sums_over_rows": lambda x, w: x + x.cumsum(0) / 100,
    "mean_over_rows": lambda x, w: x - x.mean(0),
    "turned": lambda x, w: x.flip(0),
    "transposed": lambda x, w: x.t().contiguous().sigmoid().t().contiguous(),
    "rows_counted": lambda x, w: x / x.shape[0],
    "in_place": lambda x, w: (x * 2).add_(x).mul_(0.4),
    "constant": lambda x, w: x + torch.arange(32.0) / 32,
    "constant_in_place": lambda x, w: x + torch.arange(32.0).add_(1),
    "drawn": lambda x, w: x + torch.rand(32),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("settled", [lambda i: False, lambda i: i % 3 == 0, lambda i: True])
def test_every_kind_of_operation_is_measured_alike(
    kind: str, settled: Callable[[int], bool]
) -> None:
    f = KINDS[kind]
    assert rows(Toy(f), True, settled) == rows(Toy(f), False)


@pytest.mark.parametrize(
    ("kind", "together"),
    [("by_rows", True), ("of_parameters", True), ("in_place", True), ("constant", True),
     ("sums_over_rows", True), ("constant_in_place", False), ("drawn", False)],
)  # fmt: skip
def test_what_is_shared(kind: str, together: bool, shared: list[tuple[int, int]]) -> None:
    rows(Toy(KINDS[kind]), True)
    assert len(shared) == together
    if together:
        [(pairs, ones)] = shared
        assert (pairs == ones) is (kind != "sums_over_rows") and ones >= 9


class Counting(Toy):
    """Its pass in training changes what the probe reads, as a batch norm's averages are."""

    def update(self, x: Tensor, targets: Tensor) -> Measured:
        self.count += 1
        return super().update(x, targets)

    def probe(self) -> dict[str, Tensor]:
        return {**super().probe(), "count": self.count * 2}


class Answering(Toy):
    """The probe changes what training reads."""

    def update(self, x: Tensor, targets: Tensor) -> Measured:
        factor = 1 + self.count
        measured = super().update(x, targets)
        return measured._replace(loss=measured.loss * factor)

    def probe(self) -> dict[str, Tensor]:
        found = super().probe()
        self.count.add_(0.1)
        return found


class Overhearing(Toy):
    """The probe reads what the step has made."""

    def update(self, x: Tensor, targets: Tensor) -> Measured:
        measured = super().update(x, targets)
        self.seen = measured.loss * 3
        return measured

    def probe(self) -> dict[str, Tensor]:
        return {**super().probe(), "seen": self.seen + 1}


@pytest.mark.parametrize("kind", [Counting, Answering, Overhearing])
def test_a_probe_that_is_not_by_itself_does_not_wait(
    kind: type[Toy], shared: list[tuple[int, int]]
) -> None:
    f = KINDS["by_rows"]
    assert rows(kind(f), True) == rows(kind(f), False)
    assert not shared


def test_a_probe_longer_than_the_batch_does_not_wait(shared: list[tuple[int, int]]) -> None:
    """Its rows would take the memory of the batch's as long as those are kept."""
    f = KINDS["by_rows"]
    assert rows(Toy(f, tokens=17), True) == rows(Toy(f, tokens=17), False)
    assert not shared
    rows(Toy(f, tokens=16), True)
    assert shared


def test_what_is_kept_behind_another_keeps_the_memory_of_both() -> None:
    used = [frozenset({0, 1}), frozenset({2}), frozenset({3})]
    within = {1: (0, 128)}
    offsets, total = layout(used, [128, 64, 192, 192], {1}, within)
    assert offsets[1] == offsets[0] + 128
    assert offsets[2] == offsets[3] != offsets[0] and total == 384
    offsets, total = layout(used, [128, 64, 192, 192], set(), within)
    assert offsets[2] == offsets[3] == offsets[0] and total == 192
