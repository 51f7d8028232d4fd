"""Sweeps on this machine: their plan, their server of runs, and their interruptions."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from helpers.cluster_results import steps_made, until
from helpers.command_line import TINY, typed
from helpers.sampling import some
from helpers.small_runs import small

import deepstack
from deepstack import config as conf
from deepstack.base.errors import ConfigError, ResourceError
from deepstack.cli import sweep_output
from deepstack.config import Config, parse_config, parse_study, to_yaml, with_overrides
from deepstack.model import build_model
from deepstack.records import RunFolder, find_runs
from deepstack.schemes import SCHEMES, Scheme
from deepstack.sweeps import (
    Cell,
    CellProgress,
    Local,
    expand,
    is_wanted,
    plan,
    seconds_per_run,
    timing,
)
from deepstack.sweeps.plan import CellCache
from deepstack.training import run_name

BASE = parse_config("", overrides=TINY)


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ({"model.depth": []}, "at least one"),
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


@pytest.mark.slow(turn=18)
@pytest.mark.usefixtures("warm_server")
def test_the_library_sweeps_and_reads_back(tmp_path: Path) -> None:
    """A run that could not begin is an error, after the others."""
    one, two = (
        conf.memory_estimate(with_overrides(BASE, {"model.depth": n})) for n in (1000, 2000)
    )
    depth = 2000 * conf.machine_memory() // (two - one)  # twice the memory of the machine
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_fork_server_reports_ends_of_runs_and_is_replaced_if_it_dies(
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


def test_a_plan_ends_with_the_memory_and_time_of_all_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of the largest runs that go together, and the time with all workers busy."""
    monkeypatch.setattr("deepstack.cli.sweep_output.seconds_per_run", lambda cells: [60, 120, 180])
    study = conf.Study(small(), {"seed": [0, 1, 2]})
    cells = plan(study, study="study", out=tmp_path)
    sizes = zip(cells, (3e8, 5e8, 4e8), strict=True)
    sized = [replace(cell, memory=int(size)) for cell, size in sizes]
    *_, last = sweep_output.plan_rows(study, sized, workers=2)
    assert (last["memory_mb"], last["minutes"], last["steps"]) == (900, 3.0, 36)


# --- the table of `sweep --dry-run`, and the few stacks that are built and timed for it -----------


PLAN = sys.modules["deepstack.sweeps.plan"]  # `deepstack.sweeps.plan` is the function
STUDY = """
model: {d_model: 8}
task: {seq_len: 8}
train: {steps: 3, batch_size: 4, eval_batches: 1}
log: {probe_sequences: 1}
sweep:
  grid: {model.scheme: [post_ln, deepnorm]}
  zip: {model.depth: [1, 2], train.lr: [1e-3, 1e-4]}
  exclude: [{model.scheme: post_ln, model.depth: 2}]
  overrides: [{where: {model.depth: 2}, set: {train.batch_size: 2}}]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "study.yaml"
    path.write_text(STUDY)
    return path


def dry_run(file: Path, *words: str) -> Any:
    result = typed("sweep", file, "--dry-run", "--out", file.parent / "out", *words)
    assert result.exit_code == 0, result.stderr
    assert not (file.parent / "out").exists()
    return result


@pytest.mark.slow(turn=37)
def test_the_plan_shows_what_varies_and_what_overrides_set(file: Path) -> None:
    rows = json.loads(dry_run(file, "--json", "--workers", "2").stdout)
    keys = ["model.scheme", "model.depth", "train.lr", "train.batch_size", "state", "steps"]
    assert [[row[key] for key in keys] for row in rows] == [
        ["deepnorm", 2, 1e-4, "2*", "new", 3],
        ["post_ln", 1, 1e-3, 4, "new", 3],
        ["deepnorm", 1, 1e-3, 4, "new", 3],
    ]
    assert all(row["memory_mb"] > 300 and row["minutes"] is not None for row in rows)
    rows = json.loads(dry_run(file, "runtime.device=cuda", "--json").stdout)
    assert {row["minutes"] for row in rows} == {None}  # there is no GPU
    shown = dry_run(file, "--workers", "2")
    (whole,) = (line for line in shown.stdout.splitlines() if "at a time" in line)
    assert whole.split()[:10] == "3 to run, 2 at a time, 1 left out".split() and " 9 " in whole
    assert "train.batch_size" in shown.stdout and "2*" in shown.stdout


def test_the_table_of_a_sweep_over_rates_has_a_column_for_each(tmp_path: Path) -> None:
    study = (
        STUDY.split("  grid")[0]
        + """
  grid: {model.scheme: [post_ln, deepnorm], seed: [1, 0], train.lr: [1e-3, 1e-4]}
  zip: {model.depth: [1, 2], train.batch_size: [4, 2]}
"""
    )
    cells = plan(parse_study(study), study="s", out=tmp_path)
    progress = [
        CellProgress(cell, f"s{cell.config.seed} lr {cell.config.train.lr}") for cell in cells
    ]
    rows = sweep_output.result_rows(progress, nested=False)
    label = ", batch_size "  # it follows depth in this study, and so is not compared
    assert [(row["validation loss"], row["N"]) for row in rows] == [
        (scheme, depth) for scheme in ("Post-LN", "DeepNorm") for depth in (1, 2)
    ]
    assert label not in str(rows)
    assert set(rows[0]) == {"validation loss", "N", "lr 0.001", "lr 0.0001"}
    assert rows[1]["lr 0.0001"] == ["1 s1 lr 0.0001 at 0", "1 s0 lr 0.0001 at 0"]


def test_rates_that_are_equal_in_four_digits_have_columns_of_their_own(tmp_path: Path) -> None:
    base = parse_study(STUDY).base
    cells = plan(base, {"train.lr": [1e-3, 1.00004e-3, 2e-3]}, study="s", out=tmp_path)
    rows = sweep_output.result_rows([CellProgress(cell, "new") for cell in cells], nested=False)
    (row,) = rows
    assert list(row)[1:] == ["lr 0.001", "lr 0.00100004", "lr 0.002"]
    assert [len(row[name]) for name in list(row)[1:]] == [1, 1, 1]


def test_a_damaged_run_is_shown_and_left_alone(tmp_path: Path) -> None:
    base = parse_study(STUDY).base
    cells = plan(base, {"model.depth": [1, 2, 3]}, study="s", out=tmp_path)
    for cell in cells[:2]:
        cell.folder.write_config(to_yaml(cell.config))
        cell.folder.write_status("done", 3)
    cells[1].folder.status_path.write_text("{")
    cells = plan(base, {"model.depth": [1, 2, 3]}, study="s", out=tmp_path)
    assert [cell.state for cell in cells] == ["damaged", "damaged", "new"]
    assert [is_wanted(cell) for cell in cells] == [False, False, True]
    first, second, _ = deepstack.sweeps.Pool(cells, Local(cells, "s", tmp_path, 1)).progress
    assert "steps.csv: goes to step 0, but status.json says done at step 3" in first.message
    assert "status.json: is not JSON" in second.message
    with pytest.raises(ResourceError, match="to train it anew, first: deepstack rm"):
        deepstack.train(cells[0].config, study="s", out=tmp_path)


@pytest.mark.slow(turn=8)
def test_a_plan_builds_and_times_each_shape_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = {
        "build_model": Mock(side_effect=PLAN.build_model),
        "task_of": Mock(side_effect=PLAN.task_of),
        "step_seconds": Mock(side_effect=lambda config, depth: 1.0 * depth),
    }
    for name, function in counted.items():
        monkeypatch.setattr(timing if name == "step_seconds" else PLAN, name, function)
    seeds, rates = list(range(20)), [i * 1e-4 for i in range(1, 11)]
    grid = {"model.scheme": ["post_ln", "deepnorm"], "seed": seeds, "train.lr": rates}
    base = with_overrides(parse_study(STUDY).base, {"task.mask_split": [1, 0, 0]})
    cells = plan(base, grid, study="s", out=tmp_path)
    assert seconds_per_run(cells, patience=-1.0) == [None] * 400
    assert seconds_per_run(cells) == [3.0 * 6] * 400
    # three shallow stacks and two depths for each scheme
    assert [function.call_count for function in counted.values()] == [6, 1, 4]


def test_long_runs_which_may_replay_are_timed_apart_from_short_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        timing, "step_seconds", lambda config, depth: 1.0 if config.train.steps < 50 else 0.5
    )
    cells = plan(parse_study(STUDY).base, {"train.steps": [49, 50, 100]}, study="s", out=tmp_path)
    assert seconds_per_run(cells) == [49.0, 25.0, 50.0]


@pytest.mark.parametrize(
    ("steps", "replay", "expected"), [(1000, "auto", 6.5), (1000, False, 1.5), (7, True, 5.5)]
)
def test_timed_steps_equal_the_runs(
    steps: int, replay: bool | str, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a step is recorded, where the run would replay it: steps 5 to 8, else 0 to 3."""
    asked = []

    def timed(config: Config) -> Iterator[float]:
        asked.append(config)
        yield from map(float, range(config.train.steps))

    monkeypatch.setattr(timing, "timed_steps", timed)
    settings = {"train.steps": steps, "runtime.replay": replay, "runtime.device": "cpu"}
    assert timing.step_seconds(with_overrides(Config(), settings), 3) == expected
    (given,) = asked
    assert given.model.depth == 3 and given.train.steps <= 50


@pytest.mark.parametrize(
    ("settings", "grid"),
    [
        ({}, {"task.mask_split": [[1, 0, 0], [1.0, 0.0, 0], [1.0, 0.0, 0.0]]}),
        ({"model.scheme": "hyper_connections"}, {"model.scheme_options.output_gain": [2, 2.0]}),
    ],
)
def test_a_number_is_the_same_with_a_point(
    settings: dict[str, Any], grid: dict[str, list[Any]]
) -> None:
    base = with_overrides(Config(), settings)
    (_,) = expand(base, grid)
    ((key, values),) = grid.items()
    # the one that was always written so
    name = conf.run_name(with_overrides(base, {key: min(values, key=repr)}))
    assert {run_name(with_overrides(base, {key: value})) for value in values} == {name}


def test_runs_of_equal_names_have_separate_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = conf.identity.digest
    monkeypatch.setattr(conf.identity, "digest", lambda config: "0" * 6 + digest(config)[6:])
    base = parse_study(STUDY).base
    rates = [1e-3, 2e-3, 1e-3, 3e-3]
    expected = dict(zip(rates, ("", "-2", "", "-3"), strict=True))
    assert [config.train.lr for config in expand(base, {"train.lr": rates})] == list(expected)

    def cells() -> dict[float, Cell]:
        planned = plan(base, {"train.lr": rates}, study="s", out=tmp_path)
        return {cell.config.train.lr: cell for cell in planned}

    def folders() -> dict[float, str]:
        name = run_name(base)
        return {rate: cell.folder.name.removeprefix(name) for rate, cell in cells().items()}

    assert folders() == expected
    # one that is there already keeps its name, and the others give way
    run = deepstack.train(with_overrides(base, {"train.lr": 2e-3}), study="s", out=tmp_path)
    assert folders() == {1e-3: "-2", 2e-3: "", 3e-3: "-3"}
    # the last is the first to begin
    cell = cells()[3e-3]
    cell.claim()
    last = deepstack.train(cell.config, study="s", out=tmp_path)
    assert last.path == cell.folder.path
    assert folders() == {1e-3: "-2", 2e-3: "", 3e-3: "-3"}
    run.path.rename(tmp_path / "elsewhere")  # its name is free again
    assert deepstack.train(cell.config, study="s", out=tmp_path).path == last.path


@pytest.mark.parametrize(
    ("swept", "settings", "message"),
    [
        ("task: {name: markof}", [], "study.yaml:1:14: unknown"),
        (
            "sweep: {zip: [{task.name: [markov, markof], seed: [0, 1]}]}",
            [],
            "study.yaml:1:27: in the run of task.name=markof, seed=1: unknown",
        ),
        (
            "sweep: {grid: {task.name: [copy]}}",
            ["task.name=markov,markof"],
            "task.name=markov,markof on the command line: in the run of task.name=markof: unknown",
        ),
    ],
)
def test_an_impossible_name_of_a_run_is_refused_with_its_place(
    swept: str, settings: list[str], message: str, file: Path
) -> None:
    file.write_text(swept + "\n")
    result = typed("sweep", file, *settings, "--out", file.parent)
    assert result.exit_code == 2
    assert f"{message} task 'markof'; did you mean 'markov'?" in result.stderr
    assert [path.name for path in file.parent.iterdir()] == [file.name]
