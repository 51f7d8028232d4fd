"""How a pool ends runs and reports those that ended badly, with processes that only act."""

import os
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.command_line import typed

from deepstack.base.errors import ConfigError
from deepstack.cli.sweep_training import of_other_sweeps
from deepstack.config import Config, to_yaml, with_overrides
from deepstack.records import Run
from deepstack.sweeps import RUN_AGAIN, Cell, Launcher, Pool, is_wanted, plan, pool, retry_states
from deepstack.sweeps.pool import CellProgress, error_line

BASE = with_overrides(Config(), {"model.depth": 1, "model.d_model": 8})

TRACE = "Traceback (most recent call last):\n  File 'a.py', line 3, in residual\n    x = 1 / 0\n"


class Actor:
    """A process that ends by a script, signal (0: of itself) -> exit code; it ignores others.

    writes: the state that its folder has; nothing is written if it is empty.
    """

    def __init__(self, cell: Cell, script: dict[int, int], writes: str) -> None:
        self.script, self.code, self.signals = script, script.get(0), list[int]()
        if writes:
            cell.folder.write_config(to_yaml(cell.config))
            cell.folder.write_status(writes, 0)

    def poll(self) -> int | None:
        return self.code

    def send_signal(self, number: int) -> None:
        self.signals.append(number)
        self.code = self.script.get(number, self.code)

    def stderr_text(self) -> str:
        return TRACE + "RuntimeError: broken"


class Stage(Launcher):
    """Starts actors, `workers` at a time."""

    def __init__(self, script: dict[int, int], writes: str = "running", workers: int = 1) -> None:
        self.script, self.writes, self.workers = script, writes, workers
        self.actors: list[Actor] = []

    def start(self, cell: Cell) -> Actor | None:
        if sum(actor.code is None for actor in self.actors) == self.workers:
            return None
        self.actors.append(Actor(cell, self.script, self.writes))
        return self.actors[-1]

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "POLL_SECONDS", 0.005)
    monkeypatch.setattr(pool, "GRACE_SECONDS", 0.05)
    monkeypatch.setattr(pool, "STOP_GRACE_SECONDS", 0.05)


def cells_of(out: Path, seeds: int = 1) -> list[Cell]:
    return plan(BASE, {"seed": list(range(seeds))}, study="s", out=out)


TERM, KILL = int(signal.SIGTERM), int(signal.SIGKILL)


# exit codes by signal, state in the run's folder -> state, error in status.json
ENDS: list[tuple[dict[int, int], str, str, str | None]] = [
    ({0: 0}, "done", "done", None),
    ({0: 0}, "diverged", "diverged", None),
    ({0: 5}, "out_of_memory", "out_of_memory", None),
    ({0: 143}, "interrupted", "interrupted", None),
    ({0: -TERM}, "running", "interrupted", None),  # before it could listen
    ({0: -KILL}, "running", "failed", "killed by SIGKILL"),
    ({0: -int(signal.SIGSEGV)}, "", "failed", "killed by SIGSEGV"),  # before it had a folder
    ({0: 1}, "failed", "failed", None),  # the run itself wrote it
    ({0: 1}, "running", "failed", "RuntimeError: broken"),
    ({0: 0}, "running", "failed", "RuntimeError: broken"),  # it leaves in the midst
    ({0: 5}, "running", "interrupted", None),  # a full disk: the same command goes on
]


@pytest.mark.parametrize(("script", "writes", "state", "error"), ENDS)
def test_the_sweep_and_the_folder_report_the_same_end_of_a_run(
    script: dict[int, int], writes: str, state: str, error: str | None, tmp_path: Path
) -> None:
    (entry,) = Pool(cells_of(tmp_path), Stage(script, writes)).run()
    run = Run(entry.cell.folder.path)
    assert entry.state == run.state == state and run.status["error"] == error
    (again,) = cells_of(tmp_path)
    assert is_wanted(again) == (state == "interrupted")


@pytest.mark.parametrize(
    ("script", "signals"), [({KILL: -KILL}, [TERM, KILL]), ({TERM: 143}, [TERM])]
)
def test_a_run_beyond_its_timeout_is_killed_and_has_failed(
    script: dict[int, int], signals: list[int], tmp_path: Path
) -> None:
    stage = Stage(script)
    (entry,) = Pool(cells_of(tmp_path), stage, run_timeout=0.05).run()
    assert stage.actors[0].signals == signals
    status = Run(entry.cell.folder.path).status
    assert entry.state == status["state"] == "failed"
    assert status["error"] == entry.message == "took longer than --run-timeout, 0.05 s"


def test_the_time_of_a_pause_counts_for_no_limit_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here a clock that stands still but for a pause of 100 seconds."""
    now, pauses = [0.0], iter([True])

    def stopped(pid: int, number: int) -> None:
        assert (pid, number) == (os.getpid(), signal.SIGSTOP)
        now[0] += 100

    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: None)
    monkeypatch.setattr(pool, "time", clock)
    monkeypatch.setattr(pool, "os", SimpleNamespace(kill=stopped, getpid=os.getpid))
    looks: list[int] = []
    stage = Stage({}, "done")

    def show(progress: object) -> None:
        looks.append(1)
        if len(looks) == 3:
            stage.actors[0].code = 0

    sweep = Pool(cells_of(tmp_path), stage, run_timeout=50, show=show)
    sweep.pause = lambda: next(pauses, False)
    (entry,) = sweep.run()
    assert entry.state == "done" and now == [100]
    assert stage.actors[0].signals == [signal.SIGSTOP, signal.SIGCONT]


def test_a_run_that_may_be_working_is_left_alone(tmp_path: Path) -> None:
    (cell,) = cells_of(tmp_path)
    with cell.folder.lock():
        (entry,) = Pool([cell], Stage({0: -KILL})).run()
    assert entry.state == "failed" and "in use" in entry.message
    assert Run(cell.folder.path).status["state"] == "running"


@pytest.mark.parametrize("script", [{TERM: 143}, {KILL: -KILL}])
def test_after_max_hours_nothing_starts_and_what_runs_is_interrupted(
    script: dict[int, int], tmp_path: Path
) -> None:
    stage = Stage(script)
    sweep = Pool(cells_of(tmp_path, seeds=3), stage, max_seconds=0.05)
    states = [entry.state for entry in sweep.run()]
    assert states == ["interrupted", "new", "new"] and sweep.out_of_time
    assert stage.actors[0].signals == ([TERM] if TERM in script else [TERM, KILL])
    assert all(map(is_wanted, cells_of(tmp_path, seeds=3)))


def test_a_stop_request_reaches_each_run_once_and_kills_are_not_failures(tmp_path: Path) -> None:
    shown: list[int] = []
    stage = Stage({KILL: -KILL}, workers=2)
    sweep = Pool(cells_of(tmp_path, seeds=3), stage, stop=lambda: signal.SIGINT if shown else None)
    sweep.show = lambda progress: shown.append(1)
    assert [entry.state for entry in sweep.run()] == ["interrupted", "interrupted", "new"]
    assert [actor.signals for actor in stage.actors] == [[signal.SIGINT, KILL]] * 2


def test_retry_names_states(tmp_path: Path) -> None:
    both = {"failed", "out_of_memory"}
    assert retry_states(None) == set() and retry_states("failed") == {"failed"}
    assert retry_states("failed, out_of_memory") == retry_states("all") == both == set(RUN_AGAIN)
    (cell,) = cells_of(tmp_path)
    wanted = [state for state in RUN_AGAIN if is_wanted(replace(cell, state=state), {"failed"})]
    assert wanted == ["failed"]
    with pytest.raises(ConfigError, match="did you mean 'failed'"):
        retry_states("faild")


def test_a_run_that_is_refused_has_no_folder(tmp_path: Path) -> None:
    (refused,) = Pool(cells_of(tmp_path), Stage({0: 2}, "")).run()
    assert refused.state == "failed" and not list(tmp_path.iterdir())


def test_the_error_line_of_a_run_is_its_whole_error() -> None:
    message = "a warning\ndeepstack: was X, is Y\nto go on: --allow-env-change\n"
    assert error_line(message) == "was X, is Y; to go on: --allow-env-change"
    assert error_line("") == ""


LEAVES = '''
import sys
from deepstack.schemes import Scheme

class Leaves(Scheme, name="leaves", label="Leaves", paper="none"):
    """x <- LN(x + G(x))."""

    def residual(self, x, G, norm):
        if x.requires_grad and self.depth == 2:
            sys.exit("cannot go on")
        if x.requires_grad and self.depth == 3:
            raise ValueError("first\\nsecond")
        return norm(x + G(x))
'''


SWEEP = """
model: {scheme: leaves, d_model: 8}
train: {steps: 2, batch_size: 2}
task: {seq_len: 8}
sweep:
  grid: {model.depth: [2, 3, 4]}
  overrides: [{where: {model.depth: 4}, set: {model.dropout: 0.1, runtime.fused: true}}]
"""


@pytest.mark.usefixtures("warm_server")
def test_each_run_that_did_not_end_well_is_listed_with_its_reason(tmp_path: Path) -> None:
    """In the sweep, which is quiet, and in `ls`; no file of the sweep's own is named."""
    file, config = tmp_path / "leaves.py", tmp_path / "s.yaml"
    file.write_text(LEAVES)
    config.write_text(SWEEP)
    swept = typed("sweep", config, "--plugin", file, "--out", tmp_path, "-q", "--workers", 2)
    listed = typed("ls", tmp_path).stderr.splitlines()
    first, second, refused = sorted(swept.stderr.splitlines())
    place = f"{file}:12, in Leaves.residual: ValueError: first; second"
    assert first.endswith(": failed: cannot go on")
    assert f": failed: {place} (the traceback: " in second
    assert [line.partition("failed: ")[2] for line in listed[:2]] == ["cannot go on", place]
    assert ": failed: runtime.fused: found true, which needs" in refused


def test_runs_of_another_sweep_are_no_failures(tmp_path: Path) -> None:
    """One that ended meanwhile has its state; of one that still runs the sentence says so."""
    cells = plan(BASE, {"model.depth": [1, 2]}, study="s", out=tmp_path)
    for cell, state in zip(cells, ("done", "interrupted"), strict=True):
        cell.folder.write_config(to_yaml(cell.config))
        cell.folder.write_status(state, 0)
    refusal = "s/run is in use by process 7 on here"
    progress = [CellProgress(cell, "failed", message=refusal) for cell in cells]
    assert of_other_sweeps(progress) == 1
    assert [(one.state, one.message) for one in progress] == [("done", ""), ("interrupted", "")]
