"""Trackers get the values of a command while it runs, in one run of the tracker over restarts."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from helpers.command_line import refusal, succeed

from deepstack.records import Run, RunFolder, find_runs
from deepstack.runs import Tracker, register_tracker
from deepstack.runs.trackers import known_trackers
from deepstack.tools.own_trainer.live import LiveValues
from deepstack.tools.own_trainer.record import begin, columns_of, end
from deepstack.training import LiveLog, Rows

TRAINER = Path(__file__).with_name("trainer.py")
STUDY = f"""\
command: python -S {TRAINER} MODE 1e-3 {{seed}}
metric: 'step (?P<step>\\d+): .*val loss ([0-9.]+)'
loss: 'iter (?P<step>\\d+): loss ([0-9.]+)'
log: {{to: [TRACKER]}}
sweep: {{grid: {{seed: [1]}}}}
"""
METRICS = {
    "metric": {"pattern": r"step (?P<step>\d+): val loss ([0-9.]+)"},
    "loss": {"pattern": r"iter (?P<step>\d+): loss ([0-9.]+)"},
}


class Lines(LiveLog):
    """Keeps the rows of a tracker."""

    name = "lines"
    opened: list[str | None] = []  # noqa: RUF012
    rows: list[tuple[int, dict[str, float]]] = []  # noqa: RUF012
    states: list[str] = []  # noqa: RUF012

    def open(self, run: Run, known: str | None, settings: Mapping[str, Any]) -> str:
        self.opened.append(known)
        return known or f"id{len(self.opened)}"

    def send(self, rows: Rows) -> None:
        self.rows.extend(rows)

    def end(self, run: Run, state: str) -> None:
        self.states.append(state)


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> type[Lines]:
    """A tracker that sends at each step, and finds its package."""
    monkeypatch.setattr("deepstack.training.live_log.FLUSH_SECONDS", 0.0)
    monkeypatch.setattr("deepstack.tools.own_trainer.live.READ_SECONDS", 0.0)
    monkeypatch.setattr("deepstack.runs.trackers.find_spec", lambda name: True)
    if "lines" not in known_trackers():
        register_tracker("lines", Tracker(lambda runs, to: None, str, Lines))
    for values in (Lines.opened, Lines.rows, Lines.states):
        values.clear()
    return Lines


def start(
    folder: RunFolder, text: str, *, keep: bool, code: int = 0, metrics: object = METRICS
) -> LiveValues:
    """Run a start of a command that prints lines, which are read one by one."""
    meta = {"created": "now", "git": {}, "trainer": metrics}
    files = begin(folder, "seed: 0\n", meta, columns_of("own"), keep=keep)
    live = LiveValues(folder, folder.path / "output.txt", files, ["lines"], "own", keep=keep)
    for line in text.splitlines():
        with open(folder.path / "output.txt", "a") as output:
            output.write(f"{line}\n")
        live.due = 0.0
        live.read()
    end(folder, code)
    live.finish()
    return live


def text_of(steps: range, loss: float = 0.0) -> str:
    return "\n".join(f"iter {i}: loss {i}.5\nstep {i}: val loss {i + loss}" for i in steps)


def rows_of(steps: range, loss: float = 0.0) -> list[tuple[int, dict[str, float]]]:
    return [
        row
        for step in steps
        for row in ((step, {"steps/loss": step + 0.5}), (step, {"evals/loss": step + loss}))
    ]


def test_values_arrive_before_the_command_ends_and_once_over_its_starts(
    tmp_path: Path, lines: type[Lines], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a command that goes on from its files (`resume: true`)."""
    arrived: list[int] = []
    read = LiveValues.read
    monkeypatch.setattr(
        LiveValues, "read", lambda self: (read(self), arrived.append(len(lines.rows)))[0]
    )
    folder = RunFolder(tmp_path / "study" / "run")
    start(folder, text_of(range(1, 3)), keep=True)
    assert arrived[2] == 2  # before the command ends
    start(folder, text_of(range(3, 5)), keep=True)
    assert lines.rows == rows_of(range(1, 5))
    assert lines.opened == [None, "id1"] and lines.states == ["done", "done"]


def test_a_command_that_begins_again_has_its_own_run_of_the_tracker(
    tmp_path: Path, lines: type[Lines]
) -> None:
    """Its values are others: those of its last start are there, whatever came before."""
    folder = RunFolder(tmp_path / "study" / "run")
    start(folder, text_of(range(1, 4), loss=9.0), keep=False, code=3)
    lines.rows.clear()
    start(folder, text_of(range(1, 3), loss=1.0), keep=False)
    assert lines.opened == [None, None] and lines.rows == rows_of(range(1, 3), loss=1.0)


def test_a_metric_without_a_step_is_sent_beside_a_loss_with_large_ones(
    tmp_path: Path, lines: type[Lines]
) -> None:
    metrics = METRICS | {"metric": {"pattern": r"val loss ([0-9.]+)"}}
    folder = RunFolder(tmp_path / "study" / "run")
    text = "iter 100: loss 2.5\nval loss 9\niter 200: loss 1.5\nval loss 8\n"
    start(folder, text, keep=True, metrics=metrics)
    evals = [(step, row) for step, row in lines.rows if "evals/loss" in row]
    assert evals == [(1, {"evals/loss": 9.0}), (2, {"evals/loss": 8.0})]


def test_a_tracker_that_fails_is_left_out_and_the_command_goes_on(
    tmp_path: Path, lines: type[Lines], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("planted")

    monkeypatch.setattr(lines, "evaluated", fail)
    folder = RunFolder(tmp_path / "study" / "run")
    live = start(folder, text_of(range(1, 3)), keep=False)
    assert live.logs == [] and folder.read_state() == "done"
    assert folder.log_path.read_text().count("log: OSError: planted") == 1


def test_an_unknown_tracker_of_a_study_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "study.yaml"
    path.write_text(STUDY.replace("MODE", "good").replace("TRACKER", "wandbx"))
    error = refusal(2, "sweep", path, "--out", tmp_path)
    assert "study.yaml:4:6: log: found {'to': ['wandbx']}; allowed {to: [NAME]} with" in error


@pytest.mark.slow
def test_wandb_gets_the_values_of_a_command(tmp_path: Path) -> None:
    """The process of W&B outlives a command that fails, and has all of its values."""
    pytest.importorskip("wandb")
    from integrations.wandb.test_wandb import wandb_records
    from wandb.proto import wandb_internal_pb2

    for mode, state in (("good", "done"), ("fail", "failed")):
        path, out = tmp_path / "study.yaml", tmp_path / mode
        path.write_text(STUDY.replace("MODE", mode).replace("TRACKER", "wandb"))
        if state == "done":
            succeed("sweep", path, "--out", out)
        else:
            refusal(3, "sweep", path, "--out", out)
        (run,) = find_runs(out)
        assert run.state == state
        (file,) = run.path.glob("wandb/offline-run-*/*.wandb")
        rows: dict[str, list[float]] = {}
        for data in wandb_records(file.read_bytes()):
            record = wandb_internal_pb2.Record.FromString(data)
            for each in record.history.item:
                name = each.key or "/".join(each.nested_key)
                rows.setdefault(name, []).append(json.loads(each.value_json))
        ends = 3 if state == "done" else 2
        assert rows["evals/loss"] == [3.11, 2.61, 2.11][:ends]
        assert rows["steps/loss"] == [3.61, 3.11, 2.61][:ends]
