"""A captured step and a failed capture, shown with stand-ins for the graphs of a GPU."""

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib import import_module
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from deepstack.fast import CapturedStep, Measured, Update
from deepstack.fast.step import Shard


class Held:
    """What a function that fails has in a local variable."""


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Mock]:
    """The graphs that are begun."""
    begun: list[Mock] = []

    @contextmanager
    def graph(one: Mock, **how: Any) -> Iterator[None]:
        begun.append(one)
        try:
            yield
        except RuntimeError:
            raise RuntimeError("a capture that was ended by an error") from None

    stand_ins = {
        "CUDAGraph": lambda: Mock(), "Stream": Mock(), "graph": graph, "stream": nullcontext,
        "current_stream": Mock(), "graph_pool_handle": object, "synchronize": Mock(),
        "get_rng_state": Mock(),
    }  # fmt: skip
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(import_module("deepstack.fast.capture"), "abandon", Mock())
    return begun


class FailingStep:
    """A step of which the part `where` fails in its first capture, and must leave nothing then."""

    def __init__(self, where: str, graphs: list[Mock], parts: Any) -> None:
        self.where, self.graphs, self.begun = where, graphs, 0
        self.failed: weakref.ref[Held] | None = None
        self.calls: list[str] = []
        self.lines: list[str] = []
        zero = torch.zeros(())
        update = Update(
            [Shard(lambda inputs, targets: self.call("gradients"), [], [])],
            lambda: (zero, zero),
            lambda value, norm: Measured(value, norm, {}),
        )
        captured = CapturedStep(update, lambda: self.call("probe"), self.lines.append, parts=parts)
        self.run = partial(captured, zero, zero)

    def call(self, part: str) -> dict[str, Tensor]:
        self.calls.append(part)
        if self.failed:
            assert self.failed() is None
            assert all(graph.reset.called for graph in self.graphs[: self.begun])
        elif part == self.where and self.graphs:
            held, self.begun = Held(), len(self.graphs)
            self.failed = weakref.ref(held)
            raise torch.OutOfMemoryError("out of memory")
        return {}


@pytest.mark.parametrize("where", ["gradients", "probe", "nowhere"])
@pytest.mark.parametrize("parts", [None, lambda every, between: nullcontext()])
def test_a_capture_that_fails_holds_nothing_and_is_made_in_parts_or_not_at_all(
    where: str, parts: Any, graphs: list[Mock]
) -> None:
    step = FailingStep(where, graphs, parts)
    gc.collect()
    gc.disable()
    try:
        for _ in range(5):
            step.calls.clear()
            step.run()
    finally:
        gc.enable()
    assert (step.failed is None) == (where == "nowhere")
    if step.failed and parts is None:
        reason = "kernels are launched one by one; a step cannot be captured: out of memory"
        assert step.lines == [reason] and step.calls == ["gradients", "probe"]
    else:
        size = " of 250 layers each" if step.failed else ""
        assert step.lines[0].startswith(f"captured a step as CUDA graphs{size} in ")
        assert [graph.reset.called for graph in graphs] == [True] * step.begun + [False] * 3
        assert not step.calls
