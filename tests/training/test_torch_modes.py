"""A notebook's settings of torch change no number of a run, and outlive it."""

from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.extensions import needs
from helpers.sampling import some
from helpers.small_runs import small

import deepstack
from deepstack.records import Run


@contextmanager
def float64() -> Any:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "float64": float64,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "meta device": lambda: torch.device("meta"),
}


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return deepstack.train(small(), out=tmp_path_factory.mktemp("usual"))


@pytest.mark.parametrize("mode", some(MODES, 3))
def test_a_run_has_the_same_files_in_any_mode(mode: str, usual: Run, tmp_path: Path) -> None:
    def state() -> tuple[object, ...]:
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.empty(0).dtype

    with MODES[mode]():
        before = state(), torch.get_default_device()
        run = deepstack.train(small(), out=tmp_path)
        assert (state(), torch.get_default_device()) == before
    for name in ("steps.csv", "evals.csv"):
        assert (run.path / name).read_bytes() == (usual.path / name).read_bytes()


@pytest.mark.slow(turn=50)
@needs("depth_use")
def test_an_analysis_computes_in_fp32_with_gradients_in_any_mode(usual: Run) -> None:
    expected = deepstack.analyze(usual.path, ["jacobian"])["jacobian"].arrays
    with float64(), torch.no_grad():
        measured = deepstack.analyze(usual.path, ["jacobian"])["jacobian"].arrays
    assert expected and expected.keys() == measured.keys()
    for name, values in expected.items():
        assert np.array_equal(measured[name], values, equal_nan=True), name
