"""Shared by all tests: one thread, and names that do not outlive the test that registered them."""

import os
import shutil
import signal
from collections.abc import Generator, Iterator
from itertools import count
from pathlib import Path

import pytest
import torch
from helpers.extensions import imports_missing
from helpers.registries import restored_names
from helpers.sampling import FAST, is_put_off

from deepstack.base.gc_control import gc_paused
from deepstack.cli.signals import SIGNALS

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each process compiles all that it imports
torch.set_num_threads(1)
NUMBERS = count()
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it, in all processes of the tests
os.environ.setdefault("OMP_NUM_THREADS", "1")  # processes that tests start


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs, and let the tests' folders be in memory: thousands of files are synced.

    A test without the mark gpu compares numbers of a CPU with other CPU code, so only
    `pytest -m gpu` shows the GPU.
    """
    if "gpu" not in config.getoption("markexpr").replace("not gpu", ""):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ["TRITON_INTERPRET"] = "1"  # Triton's kernels run on a CPU, slowly
    memory = Path("/dev/shm")
    if os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 2 << 30:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(memory))


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out files of tests that import an addition which was deleted."""
    return (collection_path.suffix == ".py" and imports_missing(collection_path)) or None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect thousands of tests, which stay, without looking for garbage among them."""
    with gc_paused():
        return (yield)


@pytest.hookimpl(tryfirst=True)  # before pytest selects by markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the fast tests and those put off, and skip tests of a GPU that is missing or hidden."""
    folder = Path(__file__).parent
    for item in items:
        if is_put_off(item):
            item.own_markers = [mark for mark in item.own_markers if mark.name != "slow"]
            item.add_marker("full")
        path = item.path.relative_to(folder).as_posix()
        if path.startswith(FAST) and not any(
            map(item.get_closest_marker, ("slow", "full", "others"))
        ):
            item.add_marker("fast")
    if not torch.cuda.is_available():
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
        reason = "GPUs are hidden: pytest -m gpu" if hidden else "no CUDA device"
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Run in one process under --pdb, whose prompt needs the terminal."""
    if config.getoption("usepdb") and hasattr(config.option, "numprocesses"):
        config.option.numprocesses = None


@pytest.fixture(autouse=True)
def state_of_the_user(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keep what commands remember for this user out of the home folder and of other tests."""
    state = tmp_path_factory.getbasetemp() / f"state-{next(NUMBERS)}"
    monkeypatch.setenv("XDG_STATE_HOME", str(state))


@pytest.fixture(autouse=True)
def nothing_stays_registered() -> Iterator[None]:
    """Forget the names and plugins that a test registers."""
    with restored_names():
        yield


@pytest.fixture(autouse=True)
def signals_are_put_back() -> Iterator[None]:
    """A command keeps its handlers until its process ends, which is pytest's where it runs here."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
