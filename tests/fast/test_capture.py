"""A captured step and a failed capture, shown with stand-ins for the graphs of a GPU."""

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
        try:
            yield
        except RuntimeError:
            raise RuntimeError("a capture that was ended by an error") from None

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
    """A step of which the part `where` fails in its first capture, and must leave nothing then."""

    def __init__(self, where: str, graphs: list[Graph], parts: Any) -> None:
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
            assert not any(graph.held for graph in self.graphs[: self.begun])
        elif part == self.where and self.graphs:
            held, self.begun = Held(), len(self.graphs)
            self.failed = weakref.ref(held)
            raise torch.OutOfMemoryError("out of memory")
        return {}


@pytest.mark.parametrize("where", ["gradients", "probe", "nowhere"])
@pytest.mark.parametrize("parts", [None, lambda every, between: nullcontext()])
def test_a_capture_that_fails_holds_nothing_and_is_made_in_parts_or_not_at_all(
    where: str, parts: Any, graphs: list[Graph]
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
        assert [graph.held for graph in graphs] == [False] * step.begun + [True] * 3
        assert not step.calls
