"""A captured step and a failed capture, shown with stand-ins for the graphs of a GPU."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
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


@pytest.mark.parametrize("where", ["gradients", "probe", "nowhere"])
def test_a_step_that_cannot_be_captured_runs_kernel_by_kernel(
    where: str, graphs: list[Graph]
) -> None:
    """Nothing that the failed capture held stays in memory."""
    found = torch.zeros(())
    failed: list[weakref.ref[Held]] = []
    calls: list[str] = []

    def call(now: str) -> None:
        calls.append(now)
        if now == where and graphs and not failed:  # the first that is captured
            held = Held()
            failed.append(weakref.ref(held))
            raise torch.OutOfMemoryError("out of memory")

    def probe() -> dict[str, Tensor]:
        call("probe")
        return {}

    lines: list[str] = []
    update = Update(
        [Shard(lambda inputs, targets: call("gradients"), [], [])],
        lambda: (found, found),
        lambda value, norm: Measured(value, norm, {}),
    )
    step = CapturedStep(update, probe, lines.append)
    gc.collect()
    gc.disable()
    try:
        for _ in range(4):
            step(found, found)
        assert not any(reference() for reference in failed)
    finally:
        gc.enable()
    calls.clear()
    step(found, found)
    if where == "nowhere":
        assert lines[0].startswith("captured a step as CUDA graphs in ") and not calls
    else:
        assert lines == [
            "kernels are launched one by one; a step cannot be captured: out of memory"
        ]
        assert failed and calls == ["gradients", "probe"]


@pytest.mark.parametrize("where", ["gradients", "probe"])
def test_a_capture_that_failed_holds_nothing_while_the_next_is_made(
    where: str, graphs: list[Graph]
) -> None:
    found = torch.zeros(())
    failed: list[weakref.ref[Held]] = []

    def fails(now: str) -> None:
        if now == where and graphs and not failed:  # the first that is captured
            held = Held()
            failed.append(weakref.ref(held))
            raise torch.OutOfMemoryError("out of memory")
        if graphs and failed:
            assert failed[0]() is None
            assert not any(graph.held for graph in graphs[: 1 if where == "gradients" else 3])

    def gradients(inputs: Tensor, targets: Tensor) -> None:
        fails("gradients")

    def probe() -> dict[str, Tensor]:
        fails("probe")
        return {}

    lines: list[str] = []
    update = Update(
        [Shard(gradients, [], [])],
        lambda: (found, found),
        lambda value, norm: Measured(value, norm, {}),
    )
    made = CapturedStep(update, probe, lines.append, parts=lambda every, between: nullcontext())
    for _ in range(4):
        made(found, found)
    assert failed and len(graphs) == (4 if where == "gradients" else 6)
    assert lines[0].startswith("captured a step as CUDA graphs of")
    assert all(graph.held for graph in graphs[-3:])
