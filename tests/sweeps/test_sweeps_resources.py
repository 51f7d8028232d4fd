"""Resources: memory is divided among runs, and small runs share a GPU."""

import subprocess
import sys

import pytest
import torch

from deepstack.base.errors import ConfigError
from deepstack.config import Config, with_overrides
from deepstack.records import RunFolder
from deepstack.sweeps import Cell, default_workers, local, memory_budget
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
    for estimates, memory in [
        ([1] * 9, [3] * 4),  # an equal share, above 1.5 GB
        ([4] * 9, [6] * 2),  # 1.5 times the estimate
        ([1, 5, 1], [3, 7.5]),
    ]:
        taken = filled(four, [cell(size * GB) for size in estimates])
        assert [reservation.memory / GB for reservation in taken] == memory


def test_a_run_that_may_not_fit_runs_alone() -> None:
    four = Resources(4, 12 * GB)
    assert four.reserve(cell(50 * GB), []) == Reservation(12 * GB)
    assert four.reserve(cell(50 * GB), [Reservation(3 * GB)]) is None
    assert four.reserve(cell(GB), [Reservation(12 * GB)]) is None


def test_small_runs_share_a_gpu_and_large_ones_have_one_each() -> None:
    def gpus(free: list[int], memory: int) -> list[tuple[str | None, int]]:
        """GPU and memory there of each of nine runs, until one does not fit."""
        machine = Resources(8, 100 * GB, [Gpu(f"{i}", size) for i, size in enumerate(free)])
        return [(taken.gpu, taken.gpu_memory) for taken in filled(machine, [cell(memory)] * 9)]

    small = 3 * GB + CONTEXT_BYTES  # 1.5 times the estimate, and CUDA's own for each
    assert gpus([10 * GB, 6 * GB], 2 * GB) == [("0", small), ("0", small), ("1", small)]
    assert [gpu for gpu, _ in gpus([10 * GB, 6 * GB], 50 * GB)] == ["0", "1"]  # each finds out
    assert [gpu for gpu, _ in gpus([0, 0], GB)] == ["0", "1"]


def test_the_host_memory_of_runs_on_gpus_counts() -> None:
    one = Resources(16, 20 * GB, [Gpu("0", 1000 * GB)])
    taken = filled(one, [cell(GB)] * 16)
    assert len(taken) == 4 and all(reservation.memory > 4 * GB for reservation in taken)
    assert one.reserve(cell(GB, device="cpu"), []) == Reservation(int(1.5 * GB))


def test_a_budget_is_a_size_or_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local.conf, "available_memory", lambda: 100)
    texts = ["8GB", "512MiB", "1.5 kb", "0.5", "1", None]
    assert [memory_budget(text) for text in texts] == [8 * GB, 2**29, 1500, 50, 100, 90]


@pytest.mark.parametrize("text", ["", "much", "-1GB", "0", "1.5", "8XB"])
def test_an_invalid_memory_budget_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=f"--memory: found '{text}'; allowed a size with its"):
        memory_budget(text)


SMI = "0, GPU-aa, 1000\n1, GPU-bb, 2000\n2, GPU-cc, [N/A]\n"


def test_only_visible_gpus_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "query_gpus", lambda: SMI)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    a, b = 1000 * 2**20, 2000 * 2**20
    assert local.visible_gpus() == [Gpu("GPU-aa", a), Gpu("GPU-bb", b), Gpu("GPU-cc", 0)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1, GPU-aa,MIG-z")
    assert local.visible_gpus() == [Gpu("1", b), Gpu("GPU-aa", a), Gpu("MIG-z")]
    monkeypatch.setattr(local, "query_gpus", lambda: "")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert local.visible_gpus() == [Gpu("0"), Gpu("1")]


def test_workers_times_threads_are_no_more_than_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local.conf, "cores", lambda: 8)
    assert default_workers([cell(GB), cell(GB, threads=3)]) == 2
    assert default_workers([cell(GB)]) == 8


def test_small_runs_on_one_gpu_run_at_once_and_a_large_one_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(local.conf, "cores", lambda: 16)
    wide = with_overrides(Config(), {"model.d_model": 512, "train.batch_size": 256})
    small, large = (
        Cell(wide, RunFolder("nowhere"), "new", parameters=10**7, memory=size * GB)
        for size in (5, 60)
    )
    workers = default_workers([small, large])
    assert workers == 8, "a run on a GPU takes two cores, whatever its width"
    machine = Resources(workers, 110 * GB, [Gpu("0", 80 * GB)])
    assert len(filled(machine, [small] * 20)) == 8
    assert filled(machine, [small, large]) == filled(machine, [small])
    assert filled(machine, [large, small]) == filled(machine, [large]) != []


LIMITED = """
import torch
from deepstack.sweeps.worker import limit_memory
for limit in (6, 24):
    limit_memory(limit * 2**26)
    for make in (lambda: torch.ones(2**24), lambda: bytearray(2**26)):
        try:
            made = [make() for _ in range(6)]
            print(len(made))
        except (MemoryError, RuntimeError) as error:
            print(type(error).__name__)
"""


@pytest.mark.slow(turn=3)
@pytest.mark.skipif(sys.platform != "linux", reason="limits are Linux's")
def test_memory_beyond_the_limit_raises_and_below_it_does_not() -> None:
    ended = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True)
    assert ended.stdout.split() == ["RuntimeError", "MemoryError", "6", "6"], ended.stderr


@pytest.mark.parametrize("has_gpu", [True, False])
def test_a_run_on_a_gpu_reserves_the_host_memory_of_its_parameters(has_gpu: bool) -> None:
    config = with_overrides(Config(), {"runtime.device": "auto"})
    cell = Cell(config, RunFolder("x"), "new", parameters=10**9, memory=10**9)
    needed = cell.requirements(has_gpu=has_gpu)
    assert needed.memory == (4 * 2**30 + 6 * 10**9 if has_gpu else 1.5 * 10**9)
