"""Signals: the first is remembered, a second one ends the process, whatever it interrupts."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from signal import (
    SIG_IGN,
    SIGCONT,
    SIGHUP,
    SIGINT,
    SIGTERM,
    SIGTSTP,
    getsignal,
    raise_signal,
    signal,
)

import pytest
from helpers.command_line import TINY

from deepstack.cli.signals import paused_by_ctrl_z, stop_on_signal


def lost(number: int) -> None:
    """Go on after any error, as some libraries do."""
    with pytest.raises(SystemExit):
        raise_signal(number)


def turned(number: int) -> None:
    """Raise one error in place of any other, as some libraries do."""
    try:
        raise_signal(number)
    except SystemExit:
        raise ValueError("could not determine the shape") from None


def test_one_signal_is_remembered_and_the_same_until_the_process_ends() -> None:
    with stop_on_signal() as stop:
        assert stop() is None
        raise_signal(SIGTERM)
        raise_signal(SIGTERM)  # so soon it is the same request
        assert stop() == SIGTERM
    raise_signal(SIGTERM)  # while it says how to go on: the same request still
    assert stop() == SIGTERM  # by nobody who would act on it
    with pytest.raises(SystemExit, match="130"):
        raise_signal(SIGINT)


@pytest.mark.parametrize("second", [raise_signal, lost, turned])
def test_a_second_ctrl_c_ends_the_process_whatever_it_interrupts(
    second: Callable[[int], None],
) -> None:
    with pytest.raises(SystemExit) as ended, stop_on_signal() as stop:
        raise_signal(SIGINT)
        second(SIGINT)
        stop()
        raise AssertionError("it went on")
    assert ended.value.code == 130


def test_an_error_that_no_signal_made_stays_what_it_is() -> None:
    with pytest.raises(ValueError, match="mine"), stop_on_signal():
        raise_signal(SIGINT)
        raise ValueError("mine")


def test_a_hangup_asks_for_an_end_unless_it_was_ignored_at_the_start() -> None:
    with stop_on_signal() as stop:
        raise_signal(SIGHUP)
        assert stop() == SIGHUP
    signal(SIGHUP, SIG_IGN)
    with stop_on_signal() as stop:
        raise_signal(SIGHUP)
        assert stop() is None


def test_ctrl_z_is_a_request_in_the_block_alone() -> None:
    before = getsignal(SIGTSTP)
    with paused_by_ctrl_z() as pause:
        assert not pause()
        raise_signal(SIGTSTP)
        raise_signal(SIGTSTP)
        assert pause() and not pause()
    assert getsignal(SIGTSTP) is before


def state_of(pid: int) -> str:
    """The state of a process as the kernel has it: T for a stopped one, '' for none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ctrl_z_stops_the_runs_of_a_sweep_and_fg_continues_them(tmp_path: Path) -> None:
    words = ["sweep", "quick", *TINY, "train.steps=1000", "seed=0,1", "runtime.replay=false"]
    words += ["--out", str(tmp_path), "--study", "s", "--workers", "2", "--run-timeout", "200"]
    sweep = subprocess.Popen([sys.executable, "-m", "deepstack", *words], stderr=subprocess.PIPE)

    def steps() -> list[int]:
        return [path.stat().st_size for path in sorted(tmp_path.glob("s/*/steps.csv"))]

    try:
        wait_for(lambda: len(steps()) == 2 and min(steps()) > 300)
        runs = [json.loads(path.read_text())["pid"] for path in tmp_path.glob("s/*/.lock")]
        os.kill(sweep.pid, SIGTSTP)
        wait_for(lambda: [state_of(pid) for pid in (sweep.pid, *runs)] == ["T"] * 3)
        before = steps()
        time.sleep(0.5)
        assert steps() == before
        os.kill(sweep.pid, SIGCONT)
        wait_for(lambda: min(a - b for a, b in zip(steps(), before, strict=True)) > 0)
        _, errors = sweep.communicate(timeout=240)
        assert sweep.returncode == 0, errors
    finally:
        if sweep.poll() is None:
            os.kill(sweep.pid, SIGCONT)
            sweep.kill()
            sweep.communicate()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_stopped_sweep_that_is_killed_leaves_no_stopped_run(tmp_path: Path) -> None:
    words = ["sweep", "quick", *TINY, "train.steps=100000", "--out", str(tmp_path), "--study", "s"]
    sweep = subprocess.Popen([sys.executable, "-m", "deepstack", *words], stderr=subprocess.PIPE)
    wait_for(lambda: any(path.stat().st_size > 300 for path in tmp_path.glob("s/*/steps.csv")))
    (run,) = (json.loads(path.read_text())["pid"] for path in tmp_path.glob("s/*/.lock"))
    os.kill(sweep.pid, SIGTSTP)
    wait_for(lambda: state_of(run) == "T" and state_of(sweep.pid) == "T")
    sweep.kill()
    sweep.communicate()
    wait_for(lambda: state_of(run) in ("", "Z"), 20)
    (status,) = tmp_path.glob("s/*/status.json")
    assert json.loads(status.read_text())["state"] == "interrupted"
