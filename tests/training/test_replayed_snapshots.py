"""Records of the layers that are replayed: the eager records' numbers, in tensors of their own."""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from helpers.sampling import some
from helpers.snapshots import ToyModel
from torch import Tensor

from deepstack.diagnostics.snapshot import run_passes
from deepstack.fast import FastPaths, PassRecorder
from deepstack.fast.accelerate import FEW_RECORDS
from deepstack.fast.native import find_kernels
from deepstack.fast.recording import map_nested
from deepstack.schemes import SCHEMES
from deepstack.training.schedule import count_due, is_due

BY_TORCH = FastPaths(fused=False, compiled=False, captured=False, replayed=True)
BY_KERNELS = FastPaths(fused=False, compiled=False, captured=False, replayed=True, executor="C++")


def recorder(toy: ToyModel, paths: FastPaths) -> tuple[Callable[[Tensor], Any], Mock]:
    """The passes of a model's snapshot, replayed, and the function that a recording calls."""
    counted = Mock(wraps=partial(run_passes, toy.model, loss=toy.loss))
    return PassRecorder(paths, 1).snapshot(counted, FEW_RECORDS), counted


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        scale = float(value.nan_to_num(0.0, 0.0, 0.0).abs().max())
        options = {"rtol": 2e-4, "atol": 2e-5 * scale, "equal_nan": True}
        torch.testing.assert_close(found[name], value, msg=lambda m, n=name: f"{n}: {m}", **options)


@pytest.mark.parametrize("scheme", some(SCHEMES.names(), 3, SCHEMES.names().index("mhc") % 3))
def test_records_by_kernels_equal_eager_ones_to_rounding(scheme: str) -> None:
    if isinstance(found := find_kernels(print), str):
        pytest.skip(found)
    toy = ToyModel(model__scheme=scheme, model__depth=6)
    passes, counted = recorder(toy, BY_KERNELS)
    for _ in range(2):
        assert_close(toy.diagnostics(passes(toy.tokens)), toy.diagnostics(None))
        toy.change()
    assert counted.call_count == 1, "the second record was not replayed"


KINDS: list[dict[str, Any]] = [
    {"model__family": "encoder_decoder", "task__name": "copy"},
    {"model__positions": "rotary", "model__qk_norm": True, "model__gated": True},
    {"model__norm__kind": "batch"},
    {"runtime__banks": False, "model__family": "decoder"},
    {"train__trainable": ["q", "v", "bias"]},
]


@pytest.mark.parametrize("kind", some(KINDS, 1), ids=lambda kind: "-".join(map(str, kind.values())))
def test_records_by_torch_have_the_same_bytes(kind: dict[str, Any]) -> None:
    toy = ToyModel(**kind)
    passes, counted = recorder(toy, BY_TORCH)
    for _ in range(2):
        found, expected = toy.diagnostics(passes(toy.tokens)), toy.diagnostics(None)
        for name, value in expected.items():
            assert torch.equal(found[name].nan_to_num(9.0), value.nan_to_num(9.0)), name
        toy.change()
    assert counted.call_count == 1


def test_the_tensors_of_a_record_outlive_the_next_one() -> None:
    toy = ToyModel()
    passes, _ = recorder(toy, BY_TORCH)
    first = passes(toy.tokens)
    copies = map_nested(first, torch.clone)
    toy.change()
    second = passes(toy.tokens)
    assert torch.equal(first["encoder"]["states"], copies["encoder"]["states"])
    assert not torch.equal(first["encoder"]["states"], second["encoder"]["states"])


def test_passes_that_read_a_value_run_eagerly_at_every_record() -> None:
    weight = torch.ones(3)
    passes = PassRecorder(BY_TORCH, 1).snapshot(
        lambda tokens: {"double": weight * (2 if float(weight[0]) < 2 else 3)}, 99
    )
    assert passes(torch.ones(1))["double"].tolist() == [2.0] * 3
    weight.fill_(2.0)
    assert passes(torch.ones(1))["double"].tolist() == [6.0] * 3


def test_few_records_are_not_recorded() -> None:
    for paths, records in ((BY_TORCH, FEW_RECORDS - 1), (FastPaths(False, False, False), 99)):
        assert PassRecorder(paths, 1).snapshot(run_passes, records) is run_passes


@pytest.mark.parametrize("every", ["log", 0, 1, 3, 7, 50])
@pytest.mark.parametrize("last", [0, 1, 6, 21, 22])
def test_the_count_of_records_is_the_number_of_steps_that_are_due(every: Any, last: int) -> None:
    assert count_due(every, last) == sum(is_due(every, t, last) for t in range(last + 1))
