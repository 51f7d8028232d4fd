"""Live logs: each row reaches one run of the tracker, whatever fails on the way."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from helpers.small_runs import small

import deepstack
from deepstack.base.errors import ConfigError
from deepstack.records import Run, RunFolder
from deepstack.training import LiveLog, Observer, Rows, claim, live_log, preflight

STEPS = 6
RUN: dict[str, Any] = {
    "log__to": ["trackio"], "train__steps": STEPS, "train__eval_every": 2, "log__layers_every": 0,
    "runtime__checkpoint_seconds": 0.0,
}  # fmt: skip


class Lines(LiveLog):
    """Keeps the rows of a tracker, and fails where a test asks for it."""

    name = "lines"
    opened: list[str | None] = []  # noqa: RUF012
    rows: list[tuple[int, dict[str, float]]] = []  # noqa: RUF012
    states: list[str] = []  # noqa: RUF012
    gone: set[str | None] = set()  # noqa: RUF012
    is_down = False

    def open(self, run: Run, known: str | None, settings: Mapping[str, Any]) -> str:
        self.opened.append(known)
        if known in self.gone:
            raise OSError("no such run")
        assert "model.depth" in settings and "state" not in settings
        return known or f"id{len(self.opened)}"

    def send(self, rows: Rows) -> None:
        if self.is_down:
            raise OSError("no answer")
        self.rows.extend(rows)

    def end(self, run: Run, state: str) -> None:
        self.states.append(state)


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Lines]]:
    """A tracker that sends at each step, and finds its package."""
    monkeypatch.setattr(live_log, "FLUSH_SECONDS", 0.0)
    for module in (claim, preflight):  # in the place of trackio
        monkeypatch.setattr(module, "live_logs", lambda names: [Lines])
    monkeypatch.setattr(Lines, "is_down", False)
    for values in (Lines.opened, Lines.rows, Lines.states, Lines.gone):
        values.clear()
    yield Lines


def steps_of(key: str) -> list[int]:
    return [step for step, row in Lines.rows if key in row]


class Failing(Observer):
    """Fails at an event of a step, once."""

    def __init__(self, event: str, at: int) -> None:
        self.event, self.at = event, at

    def stepped(self, step: int, row: Any) -> None:
        self.fail("stepped", step)

    def evaluated(self, step: int, row: Any) -> None:
        self.fail("evaluated", step)

    def fail(self, event: str, step: int) -> None:
        if (event, step) == (self.event, self.at):
            raise RuntimeError("planted")


def noted(run: RunFolder) -> Any:
    return json.loads((run.path / "lines" / "run.json").read_text())


def test_each_row_is_sent_once_and_noted(lines: type[Lines], tmp_path: Path) -> None:
    run = deepstack.train(small(**RUN), out=tmp_path)
    assert steps_of("steps/loss") == steps_of("timing/step_ms") == list(range(1, STEPS + 1))
    assert steps_of("evals/loss") == [0, 2, 4, 6]
    assert lines.opened == [None] and lines.states == ["done"]
    assert noted(run.folder) == {"id": "id1", "steps": 6, "evals": 6, "layers": -1}


@pytest.mark.parametrize(("event", "at"), [("stepped", 4), ("evaluated", 4), ("evaluated", 0)])
def test_a_run_that_fails_anywhere_has_each_row_once_after_its_resume(
    event: str, at: int, lines: type[Lines], tmp_path: Path
) -> None:
    """Also the evaluation of a step whose row was sent before the failure."""
    with pytest.raises(RuntimeError, match="planted"):
        deepstack.train(small(**RUN), out=tmp_path, observer=Failing(event, at))
    deepstack.train(small(**RUN), out=tmp_path)
    assert steps_of("steps/loss") == list(range(1, STEPS + 1))
    assert steps_of("evals/loss") == [0, 2, 4, 6]
    assert lines.opened == [None, "id1"] and lines.states == ["failed", "done"]


def test_a_tracker_that_fails_is_named_once_and_gets_its_rows_later(
    lines: type[Lines], tmp_path: Path
) -> None:
    class Outage(Observer):
        def stepped(self, step: int, row: Any) -> None:
            lines.is_down = step < 4

    run = deepstack.train(small(**RUN), out=tmp_path, observer=Outage())
    assert steps_of("steps/loss") == list(range(1, STEPS + 1))
    text = (run.path / "log.txt").read_text()
    assert text.count("log.to: lines: OSError: no answer; rows wait") == 1


def test_rows_that_cannot_be_noted_are_not_sent_again(
    lines: type[Lines], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk keeps the note from being written, and the tracker has the rows."""
    write, full = live_log.replace, [3, 4, 5]

    def replace(path: Path, *args: Any) -> None:
        if path.parent.name == "lines" and full:
            full.pop()
            raise OSError("no space")
        write(path, *args)

    monkeypatch.setattr(live_log, "replace", replace)
    run = deepstack.train(small(**RUN), out=tmp_path)
    assert not full and run.state == "done"
    steps = [step for step, values in Lines.rows if "steps/loss" in values]
    assert steps == sorted(set(steps)) and len(steps) == STEPS


def test_rows_that_wait_are_few_and_those_of_the_end_are_named(
    lines: type[Lines], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_log, "MOST_PENDING", 3)
    monkeypatch.setattr(lines, "is_down", True)
    run = deepstack.train(small(**RUN), out=tmp_path)
    assert run.state == "done" and not lines.rows
    assert "3 rows were not sent: deepstack export --logs" in (run.path / "log.txt").read_text()


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"id": 3}', '{"id": "../x", "steps": 1, "evals": 1, "layers": 1}',
     '{"id": "a", "steps": "x", "evals": 1, "layers": 1}', '{"id": "a", "steps": 1e400}',
     '{"id": "a", "steps": true, "evals": 1, "layers": 1}'],
)  # fmt: skip
def test_a_damaged_note_is_no_note(text: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(text)
    assert live_log.read_noted(tmp_path / "run.json") == live_log.read_noted(tmp_path / "none")


def interrupted(out: Path) -> RunFolder:
    with pytest.raises(RuntimeError):
        deepstack.train(small(**RUN), out=out, observer=Failing("stepped", 4))
    return RunFolder(next(out.glob("*/*")))


def test_a_run_of_the_tracker_that_is_gone_begins_again(lines: type[Lines], tmp_path: Path) -> None:
    folder = interrupted(tmp_path)
    lines.rows.clear()
    lines.gone.add("id1")
    deepstack.train(small(**RUN), out=tmp_path)
    assert lines.opened == [None, "id1", None] and noted(folder)["id"] == "id3"
    assert steps_of("steps/loss") == list(range(1, STEPS + 1))
    assert "no such run" in folder.log_path.read_text()


def test_a_resume_goes_on_without_a_tracker_that_cannot_be_opened(
    lines: type[Lines], tmp_path: Path
) -> None:
    interrupted(tmp_path)
    lines.gone |= {"id1", None}
    assert deepstack.train(small(**RUN), out=tmp_path).state == "done"


def test_a_first_start_without_its_tracker_is_refused(lines: type[Lines], tmp_path: Path) -> None:
    lines.gone.add(None)
    with pytest.raises(ConfigError, match=r"log\.to: lines: OSError: no such run"):
        deepstack.train(small(**RUN), out=tmp_path)


@pytest.mark.parametrize("seconds", [0.0, 1e9])
def test_rows_that_the_tracker_may_not_have_written_are_sent_again_after_a_kill(
    seconds: float, lines: type[Lines], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "write_seconds", seconds)
    with monkeypatch.context() as patch:  # as a kill, without an end
        for event in ("close", "finished"):
            patch.setattr(lines, event, lambda *_: None)
        folder = interrupted(tmp_path)
    assert noted(folder)["steps"] == (-1 if seconds else 2)
    deepstack.train(small(**RUN), out=tmp_path)
    again = [1, 2] if seconds else []  # the row of step 3 waited for its evaluation
    assert sorted(steps_of("steps/loss")) == sorted([*again, *range(1, STEPS + 1)])
    assert noted(folder)["steps"] == STEPS
