"""A captured step and a failed capture, shown with stand-ins for the graphs of a GPU."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from deepstack.fast import CapturedStep, Measured, Update
from deepstack.fast.step import Shard


class Stream:
    def __init__(self, *device: int) -> None: ...

    def wait_stream(self, other: Any) -> None: ...


class Graph:
    """A CUDA graph of nothing."""

    def __init__(self) -> None:
        self.held = True

    def reset(self) -> None:
        self.held = False

    def replay(self) -> None: ...


class Held:
    """What a function that fails has in a local variable."""


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """The graphs that are begun."""
    begun: list[Graph] = []

    @contextmanager
    def graph(one: Graph, **how: Any) -> Iterator[None]:
        begun.append(one)
        ended = False
        try:
            yield
            ended = True
        finally:
            if not ended:
                raise RuntimeError("a capture that was ended by an error")

    stand_ins = {
        "CUDAGraph": Graph, "Stream": Stream, "graph": graph, "stream": nullcontext,
        "current_stream": Stream, "graph_pool_handle": object, "synchronize": lambda: None,
        "get_rng_state": lambda: None,
    }  # fmt: skip
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    module = import_module("deepstack.fast.capture")
    monkeypatch.setattr(module, "abandon", lambda pools, random: None)
    return begun


class FailingStep:
    """A step of which the part `where` fails when it is captured first."""

    def __init__(self, where: str, graphs: list[Graph], **options: Any) -> None:
        self.where, self.graphs = where, graphs
        self.failed: list[weakref.ref[Held]] = []
        self.calls: list[str] = []
        self.lines: list[str] = []
        zero = torch.zeros(())
        update = Update(
            [Shard(lambda inputs, targets: self.call("gradients"), [], [])],
            lambda: (zero, zero),
            lambda value, norm: Measured(value, norm, {}),
        )
        captured = CapturedStep(update, lambda: self.call("probe"), self.lines.append, **options)
        self.run = partial(captured, zero, zero)

    def call(self, part: str) -> dict[str, Tensor]:
        self.calls.append(part)
        if part == self.where and self.graphs and not self.failed:
            held = Held()
            self.failed.append(weakref.ref(held))
            raise torch.OutOfMemoryError("out of memory")
        return {}


@pytest.mark.parametrize("where", ["gradients", "probe", "nowhere"])
def test_a_step_that_cannot_be_captured_runs_kernel_by_kernel(
    where: str, graphs: list[Graph]
) -> None:
    """Nothing that the failed capture held stays in memory."""
    step = FailingStep(where, graphs)
    gc.collect()
    gc.disable()
    try:
        for _ in range(4):
            step.run()
        assert not any(reference() for reference in step.failed)
    finally:
        gc.enable()
    step.calls.clear()
    step.run()
    if where == "nowhere":
        assert step.lines[0].startswith("captured a step as CUDA graphs in ") and not step.calls
    else:
        assert step.lines == [
            "kernels are launched one by one; a step cannot be captured: out of memory"
        ]
        assert step.failed and step.calls == ["gradients", "probe"]


@pytest.mark.parametrize(("where", "begun"), [("gradients", 1), ("probe", 3)])
def test_a_capture_that_failed_holds_nothing_while_the_next_is_made(
    where: str, begun: int, graphs: list[Graph]
) -> None:
    class CheckedStep(FailingStep):
        def call(self, part: str) -> dict[str, Tensor]:
            if self.failed:
                assert self.failed[0]() is None
                assert not any(graph.held for graph in graphs[:begun])
            return super().call(part)

    step = CheckedStep(where, graphs, parts=lambda every, between: nullcontext())
    for _ in range(4):
        step.run()
    assert step.failed and len(graphs) == begun + 3
    assert step.lines[0].startswith("captured a step as CUDA graphs of")
    assert all(graph.held for graph in graphs[-3:])
