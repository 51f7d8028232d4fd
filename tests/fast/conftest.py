"""Shared by the tests of kernels for a GPU."""

from importlib import import_module
from typing import Any

import pytest
import torch
from helpers.kernels import DEVICES


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Any:
    """The device on which kernels run."""
    return request.param


@pytest.fixture
def kernels(request: pytest.FixtureRequest) -> Any:
    """The module that a test file names `KERNELS`: compiled on a GPU, interpreted on a CPU."""
    pytest.importorskip("triton")
    return import_module(f"deepstack.fast.gpu.{request.module.KERNELS}")


@pytest.fixture(autouse=True)
def seed() -> None:
    """Draw the same numbers in every test."""
    torch.manual_seed(0)
