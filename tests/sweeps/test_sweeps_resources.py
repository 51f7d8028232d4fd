"""Resources: memory is divided among runs, and small runs share a GPU."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from deepstack.config import Config, with_overrides
from deepstack.errors import ConfigError, ResourceError
from deepstack.records import RunFolder
from deepstack.sweeps import Cell, Local, default_workers, local, memory_budget
from deepstack.sweeps.local import CONTEXT_BYTES, Gpu, Reservation, Resources

GB = 10**9


def cell(memory: int, device: str = "auto", threads: int | str = "auto") -> Cell:
    config = with_overrides(Config(), {"runtime.device": device, "runtime.threads": threads})
    return Cell(config, RunFolder("nowhere"), "new", parameters=1000, memory=memory)


def filled(machine: Resources, cells: list[Cell]) -> list[Reservation]:
    """Return the reservations of the cells in order, until one does not fit."""
    taken: list[Reservation] = []
    for one in cells:
        reservation = machine.reserve(one, taken)
        if reservation is None:
            break
        taken.append(reservation)
    return taken


def test_runs_share_the_memory_and_never_hold_more_than_there_is() -> None:
    four = Resources(4, 12 * GB)
    small = filled(four, [cell(GB)] * 9)
    shared = [reservation.memory for reservation in small]
    assert shared == [3 * GB] * 4  # an equal share, above 1.5 GB
    large = filled(four, [cell(4 * GB)] * 9)
    assert [reservation.memory for reservation in large] == [6 * GB] * 2  # 1.5 times the estimate
    mixed = filled(four, [cell(GB), cell(5 * GB), cell(GB)])
    assert [reservation.memory for reservation in mixed] == [3 * GB, int(7.5 * GB)]
    for taken in (small, large, mixed):
        assert sum(reservation.memory for reservation in taken) <= 12 * GB


def test_a_run_that_may_not_fit_runs_alone_under_the_whole_budget() -> None:
    four = Resources(4, 12 * GB)
    assert four.reserve(cell(50 * GB), []) == Reservation(12 * GB)
    assert four.reserve(cell(50 * GB), [Reservation(3 * GB)]) is None
    assert four.reserve(cell(GB), [Reservation(12 * GB)]) is None


def test_small_runs_share_a_gpu_and_large_ones_have_one_each() -> None:
    two = Resources(8, 100 * GB, [Gpu("0", 10 * GB), Gpu("1", 6 * GB)])
    small = filled(two, [cell(2 * GB)] * 9)  # 3 GB and CUDA's own for each
    assert [reservation.gpu for reservation in small] == ["0", "0", "1"]
    for gpu in two.gpus:
        held = [reservation.gpu_memory for reservation in small if reservation.gpu == gpu.name]
        assert sum(held) <= gpu.free
    assert small[0].gpu_memory == 3 * GB + CONTEXT_BYTES
    large = filled(two, [cell(50 * GB)] * 9)
    assert [reservation.gpu for reservation in large] == ["0", "1"]  # each finds out for itself
    assert filled(Resources(8, 100 * GB, [Gpu("MIG-x"), Gpu("MIG-y")]), [cell(GB)] * 9) == [
        replace(small[0], gpu=name, gpu_memory=1_500_000_000 + CONTEXT_BYTES)
        for name in ("MIG-x", "MIG-y")
    ]


def test_the_host_memory_of_runs_on_gpus_counts() -> None:
    one = Resources(16, 20 * GB, [Gpu("0", 1000 * GB)])
    taken = filled(one, [cell(GB)] * 16)
    assert len(taken) == 4 and all(reservation.memory > 4 * GB for reservation in taken)
    assert one.reserve(cell(GB, device="cpu"), []) == Reservation(int(1.5 * GB))


@pytest.mark.parametrize(
    ("text", "bytes_"),
    [("8GB", 8 * GB), ("512MiB", 2**29), ("1.5 kb", 1500), ("300B", 300), ("0.5", 50), ("1", 100)],
)
def test_a_budget_is_a_size_or_a_share(
    text: str, bytes_: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local.conf, "available_memory", lambda: 100)
    assert memory_budget(text) == bytes_
    assert memory_budget(None) == 90


@pytest.mark.parametrize("text", ["", "much", "-1GB", "0", "1.5", "8XB"])
def test_what_is_no_budget(text: str) -> None:
    with pytest.raises(ConfigError, match=f"--memory: found '{text}'; allowed a size with its"):
        memory_budget(text)


def test_available_memory_is_not_more_than_the_machines() -> None:
    assert 0 < local.conf.available_memory() <= local.conf.machine_memory()


SMI = "0, GPU-aa, 1000\n1, GPU-bb, 2000\n2, GPU-cc, [N/A]\n"


def test_gpus_are_those_that_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "query_gpus", lambda: SMI)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    free = [1000 * 2**20, 2000 * 2**20, 0]
    names = ["GPU-aa", "GPU-bb", "GPU-cc"]
    assert local.visible_gpus() == [Gpu(n, f) for n, f in zip(names, free, strict=True)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1, GPU-aa,MIG-z")
    assert local.visible_gpus() == [Gpu("1", free[1]), Gpu("GPU-aa", free[0]), Gpu("MIG-z")]
    monkeypatch.setattr(local, "query_gpus", lambda: "")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert local.visible_gpus() == [Gpu("0"), Gpu("1")]


def test_a_gpu_that_is_not_there_is_missed_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ResourceError, match="no GPU"):
        Local([cell(GB, device="cuda")], "s", tmp_path, 1)


def test_workers_times_threads_are_no_more_than_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = [cell(GB), cell(GB, threads=3)]
    monkeypatch.setattr(sys.modules["deepstack.sweeps.local"], "cores", lambda: 8)
    assert default_workers(cells) == 2
    assert default_workers([cell(GB)]) == 8


LIMITED = """
import torch
from deepstack.sweeps.fork_server import limit_memory
for limit in (6, 24):
    limit_memory(limit * 2**26)
    for make in (lambda: torch.ones(2**24), lambda: bytearray(2**26)):
        try:
            made = [make() for _ in range(6)]
            print(len(made))
        except (MemoryError, RuntimeError) as error:
            print(type(error).__name__)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits are Linux's")
def test_memory_beyond_the_limit_raises_and_below_it_does_not() -> None:
    ended = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True)
    assert ended.stdout.split() == ["RuntimeError", "MemoryError", "6", "6"], ended.stderr
