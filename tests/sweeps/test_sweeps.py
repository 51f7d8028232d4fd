"""Sweeps on this machine: their plan, their server of runs, and their interruptions."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from helpers.cluster_results import steps_made, until
from helpers.command_line import TINY
from helpers.sampling import some

import deepstack
from deepstack.config import machine_memory, memory_estimate, parse_config, with_overrides
from deepstack.errors import ConfigError
from deepstack.model import build_model
from deepstack.records import RunFolder, find_runs
from deepstack.schemes import SCHEMES, Scheme
from deepstack.sweeps import Local, expand, fork_server, plan
from deepstack.sweeps.plan import CellCache

BASE = parse_config("", overrides=TINY)


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ({"model.depth": []}, "at least one"),
        ({"model.depth": 6}, r"found 6; allowed a list of values, such as \[6\]"),
        ({"model.depht": [1]}, "depth"),
        ({"model.depth": [0]}, "model.depth"),
        ({"seed": list(range(1000)), "model.depth": list(range(1, 1001))}, "1,000,000 runs"),
    ],
)
def test_a_grid_that_cannot_be(grid: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        expand(BASE, grid)


def test_a_plan_is_cheap_first_and_knows_what_is_done(tmp_path: Path) -> None:
    grid = {"model.depth": [30, 2, 1], "seed": [0, 1]}
    deepstack.train(with_overrides(BASE, {"model.depth": 2}), study="s", out=tmp_path)
    cells = plan(BASE, grid, study="s", out=tmp_path)
    assert [c.config.model.depth for c in cells] == [1, 1, 2, 2, 30, 30]
    assert [c.state for c in cells] == ["new", "new", "done", "new", "new", "new"]


@pytest.mark.parametrize(
    ("scheme", "head"), some(product(SCHEMES.names(), ["tied", "separate", "bert"]), 4)
)
def test_parameters_are_counted_exactly(scheme: str, head: str) -> None:
    config = with_overrides(BASE, {"model.scheme": scheme, "model.head": head, "model.depth": 13})
    counted = sum(build_model(config, vocab_size=31).banks.count().values())
    assert CellCache().parameters(config, 31) == counted


@pytest.mark.usefixtures("warm_server")
def test_the_library_sweeps_and_reads_back(tmp_path: Path) -> None:
    """A run that could not begin is an error, after the others."""
    one, two = (memory_estimate(with_overrides(BASE, {"model.depth": n})) for n in (1000, 2000))
    depth = 2000 * machine_memory() // (two - one)  # twice the memory of the machine
    with pytest.raises(ConfigError, match=r"1 of 3 runs could not begin: .* are needed"):
        deepstack.sweep(BASE, {"model.depth": [1, 2, depth]}, study="lib", out=tmp_path, workers=2)
    table = deepstack.load_runs(tmp_path)
    assert list(table["model.depth"]) == [1, 2]
    assert table["model_update"].gt(0).all()


def test_a_scheme_of_this_process_alone_is_refused_before_a_run_begins(tmp_path: Path) -> None:
    class Own(Scheme, name="own", label="Own", paper="none"):
        """x <- LN(x + G(x)).  In this process alone, as in a notebook."""

    config = with_overrides(BASE, {"model.scheme": "own"})
    with pytest.raises(ConfigError, match=r"scheme 'own' is known to this .*load_plugins"):
        deepstack.sweep(config, {"seed": [0, 1]}, study="lib", out=tmp_path, workers=2)
    assert not list(tmp_path.iterdir())


def test_a_run_ends_with_the_sweep_that_started_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "deepstack", "sweep", *TINY, "train.steps=100000", "-q"]
    command += ["--depths", "1,2", "--out", str(tmp_path), "--workers", "2"]
    beside = tmp_path / "temporary"
    beside.mkdir()
    sweep = subprocess.Popen(command, env=os.environ | {"TMPDIR": str(beside)})
    try:
        until(lambda: [rows > 0 for rows in steps_made(tmp_path)] == [True, True])
        assert list(beside.iterdir())
    finally:
        sweep.kill()
        sweep.wait()
    until(lambda: all(run.state == "interrupted" for run in find_runs(tmp_path)))
    until(lambda: not list(beside.iterdir()))


def test_a_server_tells_how_runs_ended_and_another_follows_one_that_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Files of the present folder are not imported.
    (tmp_path / "torch.py").write_text("raise SystemExit('from the present folder')")
    monkeypatch.chdir(tmp_path)
    long = with_overrides(BASE, {"train.steps": 100_000})
    cell, waiting = (
        replace(cell, folder=RunFolder(f"{cell.folder.path}-2"))
        for cell in plan(long, {"seed": [0, 1]}, study="s", out=tmp_path)
    )
    with closing(Local([cell, waiting], "s", tmp_path, 1, budget=2 * 10**9)) as local:
        first = local.start(cell)
        # A run has its folder, with a number in its name, once it starts and no earlier.
        assert first is not None and cell.folder.exists()
        assert local.start(waiting) is None and not waiting.folder.path.exists()
        until(lambda: steps_made(tmp_path) != [] and steps_made(tmp_path)[0] > 0)
        assert local._server is not None
        killed = local._server
        killed._server.kill()
        until(lambda: first.poll() is not None)
        assert first.poll() == 128 + signal.SIGTERM
        until(lambda: find_runs(tmp_path)[0].state == "interrupted")
        rows = steps_made(tmp_path)[0]
        # As in a process of Ray, whose runs get SIGINT all the same.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        second = local.start(cell)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        assert second is not None
        assert not killed.folder.exists()
        until(lambda: steps_made(tmp_path)[0] > rows)
        second.send_signal(signal.SIGINT)
        refused = local._server.start("depth: 1", ["--out", str(tmp_path)])
        until(lambda: None not in (second.poll(), refused.poll()))
        assert (second.poll(), refused.poll()) == (128 + signal.SIGINT, 2)
        assert refused.stderr_text().startswith("deepstack: depth: found the unknown key")


def test_a_run_that_hangs_is_killed_when_its_sweep_has_died(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fork_server, "GRACE_SECONDS", 0.1)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as a run whose step never ends
    hanging = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    hanging.start()
    fork_server.end([hanging])
    assert hanging.exitcode == -signal.SIGKILL
