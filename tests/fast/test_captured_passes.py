"""Snapshots and evaluations as captured passes, with stand-ins for the graphs of a GPU."""

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.cuda_graphs import CpuGraph, pretend
from helpers.listeners import Listens
from helpers.sampling import some
from helpers.small_runs import data_of, small
from helpers.snapshots import ToyModel
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import deepstack
from deepstack.diagnostics.snapshot import run_passes
from deepstack.fast import FastPaths, PassRecorder
from deepstack.schemes import SCHEMES
from deepstack.training import plan

CAPTURED = FastPaths(fused=False, compiled=False, captured=True)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[CpuGraph]:
    """The graphs that are begun."""
    return pretend(monkeypatch)


class Operations(TorchDispatchMode):
    """Counts the operations that Python launches."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.counts[str(function)] += 1
        return function(*args, **(kwargs or {}))


OTHERS: list[dict[str, Any]] = [
    {"model__family": "encoder_decoder", "task__name": "copy"},
    {"model__positions": "rotary", "model__qk_norm": True, "model__gated": True},
    {"model__norm__kind": "rms", "model__family": "decoder"},
    {"train__trainable": ["q", "v", "bias"]},
]


SETTINGS = [{"model__scheme": name} for name in SCHEMES.names()] + OTHERS


@pytest.mark.parametrize("settings", some(SETTINGS, 6), ids=str)
def test_every_later_record_launches_its_graph_alone(
    settings: dict[str, Any], graphs: list[CpuGraph]
) -> None:
    toy = ToyModel(**settings)
    lines: list[str] = []
    recorder = PassRecorder(CAPTURED, 1, lines.append)
    passes = recorder.snapshot(partial(run_passes, toy.model, loss=toy.loss), 3)
    for _ in range(3):
        with Operations() as launched:
            found = passes(toy.tokens)
        expected, values = toy.diagnostics(None), toy.diagnostics(found)
        for name, value in expected.items():
            assert torch.equal(values[name].nan_to_num(7.0), value.nan_to_num(7.0)), name
        toy.change()
    assert not lines and len(graphs) == 1 and graphs[0].replays == 3
    assert launched.counts.keys() == {"aten.copy_.default", "aten.clone.default"}
    recorder.release()
    assert not graphs[0].operations


def test_an_evaluation_is_captured_for_each_shape_of_its_batches(graphs: list[CpuGraph]) -> None:
    toy = ToyModel()
    calls: list[torch.Size] = []

    def logits(tokens: Tensor) -> Tensor:
        calls.append(tokens.shape)
        return toy.model(tokens)

    forward = PassRecorder(CAPTURED, 1).forward(logits)
    with torch.no_grad():
        for tokens in (toy.tokens, toy.tokens[:1], toy.tokens.flip(0), toy.tokens[1:2]):
            assert torch.equal(forward(tokens).clone(), toy.model(tokens))
    assert len(graphs) == 2 and calls == [toy.tokens.shape, toy.tokens[:1].shape]


@pytest.mark.parametrize("failures", [1, 2, 99])
def test_a_pass_that_cannot_be_captured_runs_kernel_by_kernel(
    failures: int, graphs: list[CpuGraph]
) -> None:
    weight, lines = torch.ones(3), list[str]()

    def waits(tokens: Tensor) -> Tensor:
        if len(graphs) <= failures:
            weight.sum().item()
        return weight * tokens

    forward = PassRecorder(CAPTURED, 1, lines.append).forward(waits)
    for factor in (1.0, 2.0, 3.0, 4.0):
        weight.fill_(factor)
        assert forward(torch.ones(3)).tolist() == [factor] * 3
    reason = "kernels of a pass are launched one by one; it is not captured: aten._local_scalar"
    assert len(graphs) == 2
    assert [line.startswith(reason) for line in lines] == [True] * (failures >= 2)


@pytest.mark.parametrize("settings", some(SETTINGS, 24, 1), ids=str)
def test_a_captured_run_writes_the_bytes_of_an_eager_one(
    settings: dict[str, Any],
    graphs: list[CpuGraph],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    given = small(
        runtime__fused=False,
        runtime__replay=False,
        log__layers_every=3,
        train__eval_every=4,
        **settings,
    )
    eager = deepstack.train(given, out=tmp_path / "eager")
    assert not graphs
    heard = Listens()
    monkeypatch.setattr(plan, "fast_paths_of", lambda *_, **__: CAPTURED)
    captured = deepstack.train(given, out=tmp_path / "captured", observer=heard)
    assert data_of(captured) == data_of(eager) and len(data_of(eager)) > 20
    assert [line for line in heard.lines if "one by one" in line] == []
    # a record, an evaluation; gradients, update and probe of a step
    assert len(graphs) == 5 and [graph.replays for graph in graphs] == [5, 4, 11, 11, 11]
