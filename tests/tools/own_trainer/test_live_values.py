"""Trackers get the values of a command while it runs, in one run of the tracker over restarts."""

import json
from pathlib import Path

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

    def open(self, run: Run, known: str | None) -> str:
        self.opened.append(known)
        return known or "first"

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


def test_values_arrive_before_the_command_ends_and_once_over_restarts(
    tmp_path: Path, lines: type[Lines]
) -> None:
    folder = RunFolder(tmp_path / "study" / "run")
    meta = {"created": "now", "git": {}, "trainer": METRICS}
    for last in (2, 3):
        files = begin(folder, "seed: 0\n", meta, columns_of("own"), keep=False)
        live = LiveValues(folder, folder.path / "output.txt", files, ["lines"], "own")
        for step in range(1, last + 1):
            with open(folder.path / "output.txt", "a") as output:
                output.write(f"iter {step}: loss {step}.5\nstep {step}: val loss {step}\n")
            live.due = 0.0
            live.read()
        # the last step waits until all of its values are known
        assert [step for step, row in lines.rows if "evals/loss" in row][-1] == last - 1
        end(folder, 0)
        live.finish()
    assert lines.rows == [
        row
        for step in (1, 2, 3)
        for row in ((step, {"steps/loss": step + 0.5}), (step, {"evals/loss": float(step)}))
    ]
    assert lines.opened == [None, "first"] and lines.states == ["done", "done"]


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
