"""What one run of a sweep does to itself stays its own, and what kills a sweep loses nothing."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from helpers import sweep_contract as contract
from helpers.sweep_contract import (
    CRASHED,
    ENDS,
    HUNG,
    KILLED,
    MEMORY,
    bring_plugin,
    by_seed,
    results_of,
)
from helpers.sweep_contract import words as words_of
from typer.testing import CliRunner

from deepstack.cli import app
from deepstack.records import find_runs

MISBEHAVING = [MEMORY, KILLED, CRASHED, HUNG]


def check_states(out: Path, good: list[int], bad: list[int]) -> None:
    runs = by_seed(out)
    assert sorted(runs) == sorted(good + bad)
    assert {seed: runs[seed].state for seed in good} == dict.fromkeys(good, "done")
    assert {seed: runs[seed].state for seed in bad} == {seed: ENDS[seed] for seed in bad}
    for seed in bad:  # what they had trained is there, and they say why they ended
        assert runs[seed].status["step"] == len(runs[seed].steps) == 2
    said = {seed: runs[seed].status["error"] for seed in bad}
    assert said.get(KILLED, "killed by SIGKILL") == "killed by SIGKILL"
    assert said.get(CRASHED, "killed by SIGSEGV") == "killed by SIGSEGV"
    if HUNG in bad:
        assert "took longer than --run-timeout" in said[HUNG]
    if MEMORY in bad:
        status = runs[MEMORY].status
        assert status["phase"] == "the training step" and status["limit_mb"] < 2000


def test_runs_that_end_badly_leave_the_others_alone(tmp_path: Path) -> None:
    plugin, bad = bring_plugin(tmp_path), [MEMORY, KILLED, CRASHED]
    good, out = [0, 1], tmp_path / "a"
    words = words_of(plugin, out, [*bad, *good], "--memory", "2GB")
    first = CliRunner().invoke(app, words)
    assert first.exit_code == 3, first.stderr
    check_states(out, good, bad)
    alone = words_of(plugin, tmp_path / "b", good)
    assert CliRunner().invoke(app, alone).exit_code == 0
    for seed, run in by_seed(tmp_path / "b").items():
        assert results_of(run) == results_of(by_seed(out)[seed])
    again = CliRunner().invoke(app, words)  # what failed is left alone, and still is no success
    assert again.exit_code == 3
    (tmp_path / "healed").touch()
    assert CliRunner().invoke(app, [*words, "--retry", "failed"]).exit_code == 3
    check_states(out, [*good, KILLED, CRASHED], [MEMORY])


@pytest.mark.slow
def test_twenty_of_twenty_four_runs_are_as_without_the_other_four(tmp_path: Path) -> None:
    plugin, good = bring_plugin(tmp_path), list(range(20))
    out, alone, healed = (tmp_path / name for name in ("all", "alone", "healed_runs"))
    limits = ["--memory", "2GB", "--run-timeout", "60"]
    words = words_of(plugin, out, [*good, *MISBEHAVING], *limits)
    ended = contract.sweep(*words)
    assert ended.returncode == 3, ended.stderr
    assert contract.processes_with(str(out)) == []
    check_states(out, good, MISBEHAVING)
    assert contract.sweep(*words_of(plugin, alone, good)).returncode == 0
    wanted = {seed: results_of(run) for seed, run in by_seed(alone).items()}
    found = {seed: results_of(run) for seed, run in by_seed(out).items()}
    assert len(wanted) == 20 and {seed: found[seed] for seed in good} == wanted

    (tmp_path / "healed").touch()
    kept = {run.path: (run.path / "status.json").stat().st_mtime_ns for run in find_runs(out)}
    assert contract.sweep(*words, "--retry", "failed").returncode == 3
    changed = {run.path for run in find_runs(out)
               if (run.path / "status.json").stat().st_mtime_ns != kept[run.path]}  # fmt: skip
    assert changed == {by_seed(out)[seed].path for seed in (KILLED, CRASHED, HUNG)}
    check_states(out, [*good, KILLED, CRASHED, HUNG], [MEMORY])
    assert contract.sweep(*words, "--retry", "out_of_memory").returncode == 0
    assert contract.sweep(*words_of(plugin, healed, MISBEHAVING)).returncode == 0
    for seed, run in by_seed(healed).items():
        assert results_of(run) == results_of(by_seed(out)[seed])


def kill_until_done(tmp_path: Path, kills: int, seeds: list[int], steps: int) -> None:
    """Kill the sweep's own process again and again; the same command must lose nothing."""
    plugin, dice = bring_plugin(tmp_path), random.Random(kills)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    more = ["runtime.checkpoint_seconds=0.2", "train.eval_every=50"]
    assert contract.sweep(*words_of(plugin, whole, seeds, *more, steps=steps)).returncode == 0
    words = words_of(plugin, killed, seeds, *more, steps=steps)
    every = len(seeds) * steps
    for number in range(kills):
        goal = int(every * (number + dice.random()) / (kills + 1))
        process = contract.start(*words)
        try:
            while rows_in(killed) < goal and process.poll() is None:
                time.sleep(0.02)
            time.sleep(dice.random())
        finally:
            process.kill()
            process.wait()
    deadline = time.monotonic() + 300
    # a run that is still saving holds its folder: the sweep then says so, and is given again
    while contract.sweep(*words).returncode != 0:
        assert time.monotonic() < deadline
    wanted = {seed: results_of(run) for seed, run in by_seed(whole).items()}
    assert {seed: results_of(run) for seed, run in by_seed(killed).items()} == wanted
    for run in find_runs(killed):
        assert list(run.steps["step"]) == list(range(1, steps + 1))
    while contract.processes_with(str(killed)):
        assert time.monotonic() < deadline
        time.sleep(0.2)


def states_of(out: Path) -> dict[int, str]:
    """The states by seed; none before there is a run."""
    return {seed: run.state for seed, run in by_seed(out).items()} if list(out.glob("*/*")) else {}


def rows_in(out: Path) -> int:
    """Rows of all logs of steps, their headers not counted."""
    return sum(log.read_bytes().count(b"\n") - 1 for log in out.glob("*/*/steps.csv"))


@pytest.mark.slow
def test_a_sweep_whose_process_is_killed_ten_times_loses_nothing(tmp_path: Path) -> None:
    kill_until_done(tmp_path, kills=10, seeds=[0, 1, 2, 3, 4, 5], steps=400)


@pytest.mark.slow
def test_a_run_that_hangs_does_not_outlive_its_killed_sweep(tmp_path: Path) -> None:
    plugin, out = bring_plugin(tmp_path), tmp_path / "out"
    process = contract.start(*words_of(plugin, out, [HUNG, 0]))
    deadline = time.monotonic() + 600
    try:
        while states_of(out) != {HUNG: "running", 0: "done"} or rows_in(out) < 2 + 4:
            assert time.monotonic() < deadline
            time.sleep(0.5)
    finally:
        process.kill()
        process.wait()
    assert contract.processes_with(str(out))
    while contract.processes_with(str(out)):
        assert time.monotonic() < deadline
        time.sleep(0.5)
    assert by_seed(out)[HUNG].state == "interrupted"
