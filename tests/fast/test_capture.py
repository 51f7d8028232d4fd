"""A captured step and a failed capture, shown with stand-ins for the graphs of a GPU."""

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from helpers.sampling import some
from torch import Tensor

from deepstack.fast import CapturedStep, Measured, Update


class Held:
    """A large object that a failing function holds in a local variable."""


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


@pytest.mark.parametrize("where", ["gradients", "probe", "nowhere"])
@pytest.mark.parametrize("parts", some([lambda every, between: nullcontext(), None], 2))
def test_a_failed_capture_frees_its_memory_and_is_made_in_parts(
    where: str, parts: Any, graphs: list[Mock]
) -> None:
    calls: list[str] = []
    lines: list[str] = []
    failed: list[weakref.ref[Held]] = []
    failed_graphs: list[Mock] = []

    def call(part: str) -> dict[str, Tensor]:
        """Fail in the first capture if the part is `where`; nothing may be left of that later."""
        calls.append(part)
        if failed:
            assert failed[0]() is None
            assert all(graph.reset.called for graph in failed_graphs)
        elif part == where and graphs:
            held = Held()
            failed.append(weakref.ref(held))
            failed_graphs.extend(graphs)
            raise torch.OutOfMemoryError("out of memory")
        return {}

    zero = torch.zeros(())
    update = Update(
        Mock(compute=lambda inputs, targets: call("gradients")),
        lambda: (zero, zero),
        lambda value, norm: Measured(value, norm, {}),
    )
    step = CapturedStep(update, lambda: call("probe"), lines.append, parts=parts)
    gc.collect()
    gc.disable()
    try:
        for _ in range(5):
            calls.clear()
            step(zero, zero)
    finally:
        gc.enable()
    assert bool(failed) == (where != "nowhere")
    if failed and parts is None:
        reason = "kernels are launched one by one; a step cannot be captured: out of memory"
        assert lines == [reason] and calls == ["gradients", "probe"]
    else:
        size = " of 250 layers each" if failed else ""
        assert lines[0].startswith(f"captured a step as CUDA graphs{size} in ")
        are_reset = [graph.reset.called for graph in graphs]
        assert are_reset == [True] * len(failed_graphs) + [False] * 3
        assert not calls
