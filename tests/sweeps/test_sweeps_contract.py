"""A run that ends badly leaves the others of its sweep alone; a killed sweep loses nothing."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import QUICK
from helpers.cluster_results import results, steps_made, until
from helpers.command_line import TINY, typed
from helpers.small_runs import data_of

import deepstack
from deepstack.config import load_config
from deepstack.records import Run, find_runs

MEMORY, KILLED, CRASHED, HUNG = 90, 91, 92, 93
# state and error of the runs that end badly, by their seed
ENDS = {
    MEMORY: ("out_of_memory", ""), KILLED: ("failed", "killed by SIGKILL"),
    CRASHED: ("failed", "killed by SIGSEGV"), HUNG: ("failed", "took longer than --run-timeout"),
}  # fmt: skip

# Each of them has trained a step or two before.  A file beside the plugin heals them all.
PLUGIN = '''
import os, pathlib, signal, time
from dataclasses import replace
from deepstack.tasks import TASKS, task, build_task

HEALED = pathlib.Path(__file__).with_name("healed")

@task("unruly")
def unruly(*, seq_len, seed):
    """Copying, but that the runs of some seeds end badly in their third batch."""
    copy = build_task("copy", {}, seq_len=seq_len, seed=seed)
    drawn = 0

    def draw(random, batch_size, held_out):
        nonlocal drawn
        drawn += not held_out
        if drawn == 3 and not HEALED.exists():
            end_badly(seed)
        return copy.draw(random, batch_size, held_out)

    return replace(copy, name="unruly", draw=draw)

def end_badly(seed):
    if seed == 90:
        held = []
        while len(held) < 100:  # 6.4 GB: without a limit it ends well
            held.append(bytearray(64_000_000))
    if seed in (91, 92):
        os.kill(os.getpid(), signal.SIGKILL if seed == 91 else signal.SIGSEGV)
    while seed == 93:
        time.sleep(1)
'''


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    file = tmp_path / "unruly.py"
    file.write_text(PLUGIN)
    return file


def words_of(plugin: Path, out: Path, seeds: list[int], *more: str, steps: int = 4) -> list[str]:
    """The arguments of a sweep over seeds."""
    given = [*TINY, "task.name=unruly", f"train.steps={steps}"]
    given += ["--seeds", ",".join(map(str, seeds)), "--depths", "2", "--schemes", "post_ln"]
    given += ["--study", "s", "--workers", "2", "-q", "--plugin", str(plugin)]
    return ["sweep", QUICK, *given, "--out", str(out), *more]


def by_seed(out: Path) -> dict[int, Run]:
    """The runs by their seed."""
    return {int(run.get("seed")): run for run in find_runs(out)}


def processes_with(text: str) -> list[int]:
    """Ids of the processes whose command line or open files name a folder."""
    ids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                names = (entry / "cmdline").read_bytes().decode(errors="replace")
                names += "".join(os.readlink(link) for link in (entry / "fd").iterdir())
            except OSError:
                continue
            if text in names:
                ids.append(int(entry.name))
    return ids


def check_states(out: Path, good: list[int], bad: list[int]) -> None:
    runs = by_seed(out)
    assert sorted(runs) == sorted(good + bad)
    assert {runs[seed].state for seed in good} == {"done"}
    for seed in bad:  # their steps are kept, with the reason of their end
        run, (state, error) = runs[seed], ENDS[seed]
        assert run.state == state and error in (run.status["error"] or "")
        assert run.status["step"] == len(run.steps) == 2
    status = runs[MEMORY].status
    assert status["phase"] == "the training step" and status["limit_mb"] < 2000


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ([0, 1], [MEMORY, KILLED, CRASHED]),
        pytest.param(list(range(6)), [*ENDS], marks=pytest.mark.slow),  # one hangs
    ],
)
@pytest.mark.usefixtures("warm_server")
def test_runs_that_end_badly_leave_the_others_alone(
    good: list[int], bad: list[int], plugin: Path, tmp_path: Path
) -> None:
    out = tmp_path / "all"
    words = words_of(plugin, out, [*good, *bad], "--memory", "2GB", "--run-timeout", "25")
    first = typed(*words)
    assert first.exit_code == 3, first.stderr
    assert re.search(
        r"out_of_memory: .*out of memory in the training step .*: an alloc", first.stderr
    )
    assert processes_with(str(out)) == []
    check_states(out, good, bad)
    check_results(out, tmp_path / "alone", good)
    assert typed(*words).exit_code == 3  # failures are left alone, and are no success
    (tmp_path / "healed").touch()
    kept = changed_at(out)
    assert typed(*words, "--retry", "failed").exit_code == 3
    failed = [seed for seed in bad if seed != MEMORY]
    assert {seed for seed, at in changed_at(out).items() if at != kept[seed]} == set(failed)
    check_states(out, [*good, *failed], [MEMORY])
    assert typed(*words, "--retry", "out_of_memory").exit_code == 0
    check_results(out, tmp_path / "alone", bad)


def changed_at(out: Path) -> dict[int, int]:
    """When the status of each run changed last, by its seed."""
    runs = by_seed(out).items()
    return {seed: run.folder.status_path.stat().st_mtime_ns for seed, run in runs}


def check_results(out: Path, alone: Path, seeds: list[int]) -> None:
    """The runs of these seeds must equal those trained alone in this process."""
    for seed in seeds:
        run = by_seed(out)[seed]
        single = deepstack.train(load_config(run.path / "config.yaml"), study="s", out=alone)
        assert data_of(single) == data_of(run)


@pytest.mark.slow
def test_a_sweep_that_is_interrupted_and_killed_ten_times_loses_nothing(
    plugin: Path, tmp_path: Path
) -> None:
    kills, seeds, steps, dice = 10, list(range(6)), 400, random.Random(10)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    more = ["runtime.checkpoint_seconds=0.2", "train.eval_every=50"]
    assert typed(*words_of(plugin, whole, seeds, *more, steps=steps)).exit_code == 0
    words = words_of(plugin, killed, seeds, *more, steps=steps)
    for number in range(kills):
        goal = int(len(seeds) * steps * (number + dice.random()) / (kills + 1))
        process = subprocess.Popen([sys.executable, "-m", "deepstack", *words])
        try:
            while sum(steps_made(killed)) < goal and process.poll() is None:
                time.sleep(0.02)
            time.sleep(dice.random())
            if number == 0:  # Ctrl-C, before it is killed again and again
                process.send_signal(signal.SIGINT)
                assert process.wait(timeout=60) == 130
                states = [run.state for run in find_runs(killed)]
                assert set(states) <= {"interrupted", "done"}
                assert states.count("done") < len(seeds)
        finally:
            process.kill()
            process.wait()
    # a run that is still saving holds its folder: the sweep then says so, and is given again
    until(lambda: typed(*words).exit_code == 0, seconds=300)
    assert results(killed, len(seeds)) == results(whole, len(seeds))
    for run in find_runs(killed):
        assert list(run.steps["step"]) == list(range(1, steps + 1))
    until(lambda: not processes_with(str(killed)), seconds=300)


@pytest.mark.slow
def test_a_run_that_hangs_does_not_outlive_its_killed_sweep(plugin: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "deepstack", *words_of(plugin, out, [HUNG, 0])]
    process = subprocess.Popen(command)
    try:
        # the run that hangs has made 2 of its steps, the other one all 4
        until(lambda: sum(steps_made(out)) == 2 + 4, seconds=300)
    finally:
        process.kill()
        process.wait()
    assert processes_with(str(out))
    until(lambda: not processes_with(str(out)), seconds=300)
    assert by_seed(out)[HUNG].state == "interrupted"
