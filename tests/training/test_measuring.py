"""Instruments run with plain layers, in evaluation mode and full precision, on every fast path."""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.sampling import some
from helpers.small_runs import logs_of, small
from torch import Tensor, nn

import deepstack
from deepstack.config import with_overrides
from deepstack.diagnostics import Instrument, Row, RunState

STEPS = 6
PATHS: dict[str, dict[str, Any]] = {
    "eager": {"runtime.fused": False, "runtime.replay": False},
    "without banks": {"runtime.fused": False, "runtime.replay": False, "runtime.banks": False},
    "fused": {"runtime.replay": False},
    "fused in bf16": {"runtime.replay": False, "train.precision": "bf16"},
    "fused with dropout": {"runtime.replay": False, "model.dropout": 0.1},
    "fused encoder-decoder": {"runtime.replay": False, "model.family": "encoder_decoder"},
    "recomputed": {"runtime.recompute_every": 2, "runtime.replay": False},
    "replayed by torch": {"runtime.replay": "python"},
    "replayed by C++": {"runtime.replay": True},
    "replayed in micro-batches": {"runtime.replay": "python", "train.micro_batches": 2},
    "replayed in shards": {"runtime.replay": "python", "train.shards": 2, "runtime.threads": 2},
    "compiled": {"runtime.compile": True},
}


def calls_in(state: RunState) -> dict[str, int]:
    """Count the calls of sublayers and norms that hooks see in one pass; check F."""
    counts = {"attention": 0, "feed_forward": 0, "norm": 0}

    def count(kind: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            counts[kind] += 1
            tensor = output if isinstance(output, Tensor) else output[0]
            assert tensor.dtype == torch.float32 and not module.training

        return hook

    with ExitStack() as hooks, torch.no_grad():
        for layer in state.model.layers:
            for name in ("attention", "feed_forward"):
                hooks.callback(getattr(layer, name).register_forward_hook(count(name)).remove)
            for norm in layer.scheme.attention_norms:
                hooks.callback(norm.register_forward_hook(count("norm")).remove)
        F = state.model.hidden(state.inputs)
    torch.testing.assert_close(F, state.update.previous, rtol=2e-2, atol=2e-2)
    return counts


@pytest.mark.filterwarnings("ignore")  # of torch.compile
@pytest.mark.parametrize("name", some(PATHS, 3))  # the compiled one is among the slow
def test_hooks_of_an_instrument_see_every_call(name: str, tmp_path: Path) -> None:
    seen: list[tuple[str, dict[str, int]]] = []

    class Calls(Instrument, name="calls"):
        """Calls that hooks see."""

        columns = {"calls": ("c", "", "Calls of attention that hooks see.")}  # noqa: RUF012
        adds = "calls_by_layer"

        def begin(self, state: RunState) -> None:
            seen.append(("begin", calls_in(state)))

        def measure(self, state: RunState) -> Row:
            seen.append(("measure", calls_in(state)))
            return {"calls": seen[-1][1]["attention"]}

        def of_layers(self, state: RunState) -> Mapping[str, Any]:
            seen.append(("of_layers", calls_in(state)))
            return dict.fromkeys(state.model.stacks)

    config = small(train__steps=STEPS, log__layers_every=3, train__eval_every=0)
    config = with_overrides(config, {"log.instruments.calls": 2, **PATHS[name]})
    run = deepstack.train(config, study="with", out=tmp_path)
    both = 2 if config.model.family == "encoder_decoder" else 1
    wanted = dict.fromkeys(("attention", "feed_forward", "norm"), both * config.model.depth)
    assert {method for method, _ in seen} == {"begin", "measure", "of_layers"}
    assert [counts for _, counts in seen] == [wanted] * len(seen)
    assert run.log("calls")["calls"].tolist() == [both * config.model.depth] * 4
    without = with_overrides(config, {"log.instruments": {}})
    alone = logs_of(deepstack.train(without, study="without", out=tmp_path))
    with_it = logs_of(run)
    with_it.pop("calls.csv")
    assert with_it == alone  # training is the same, bit for bit
