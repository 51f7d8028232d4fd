"""A run that has ended holds no memory, so that a process can train one after the other."""

import gc
from pathlib import Path

import pytest
import torch
from helpers.small_runs import small

import deepstack


def numbers_in_tensors() -> int:
    """Return the count of numbers in all tensors that Python can reach."""
    tensors = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
    return sum(tensor.numel() for tensor in tensors)


@pytest.mark.slow(turn=9)
def test_a_run_that_ended_holds_no_memory(tmp_path: Path) -> None:
    deepstack.train(small(), out=tmp_path / "first")
    gc.collect()
    before = numbers_in_tensors()
    gc.disable()  # its parameters go without a search for cycles, which may come late
    try:
        deepstack.train(small(), out=tmp_path / "second")
        left = numbers_in_tensors() - before
    finally:
        gc.enable()
    parameters = sum(deepstack.build_model(small(), vocab_size=257).banks.count().values())
    assert left < parameters / 10
