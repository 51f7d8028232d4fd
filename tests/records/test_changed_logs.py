"""A log that changes while its run works: exit 6, nothing sealed, and a fresh start."""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from helpers.ended_runs import flip
from helpers.extensions import has, known
from helpers.sampling import some
from helpers.small_runs import data_of, interrupted, small, stop_at

import deepstack
from deepstack.base.errors import ChangedLogError, DifferenceError, Interrupted
from deepstack.config import Config
from deepstack.records import Inspection, Run, RunFolder, write_end
from deepstack.training import Observer, checkpoint, outcome
from deepstack.training.observer import Started

LOGS = ["steps.csv", "evals.csv", "timing.csv"]
LOGS += ["attribution.csv"] if has("attribution") else []
SMALL = small()
CONFIG = small(
    model__depth=1, model__d_model=8, train__steps=8, log__layers_every=0,
    **known({"log__attribution_every": 4}),
)  # fmt: skip


def digit(path: Path) -> None:
    """Change the last digit."""
    flip(path, 8 * (path.stat().st_size - 2))


def replace(path: Path) -> None:
    """Put a copy of the file in its place."""
    shutil.copy(path, path.with_suffix(".copy"))
    os.replace(path.with_suffix(".copy"), path)


def truncate(path: Path) -> None:
    """Cut the file off within its second line."""
    os.truncate(path, path.read_bytes().index(b"\n") + 4)


def add(path: Path) -> None:
    """Add a row that the run has not written."""
    with open(path, "ab") as file:
        file.write(b"11,1.0\n")


@dataclass
class Change(Observer):
    """Changes a file of the run once, after a step, and keeps the notices of the run."""

    change: Callable[[Path], None] | None = None
    name: str = "steps.csv"
    at: int = 6
    lines: list[str] = field(default_factory=list)

    def started(self, run: Started) -> None:
        self.path = run.folder.path

    def stepped(self, step: int, row: object) -> None:
        if self.change is not None and step == self.at:
            self.change(self.path / self.name)

    def notify(self, line: str) -> None:
        self.lines.append(line)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return deepstack.train(CONFIG, out=tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize(
    ("change", "name"),
    some(
        [(digit, name) for name in LOGS]
        + [(change, "steps.csv") for change in (replace, truncate, add, Path.unlink)],
        3,
    ),
)
def test_a_changed_log_is_not_sealed_and_the_run_starts_again(
    change: Callable[[Path], None], name: str, whole: Run, tmp_path: Path
) -> None:
    changing = Change(change, name)
    with pytest.raises(
        DifferenceError, match=f"{name}: was changed, replaced or removed"
    ) as caught:
        deepstack.train(CONFIG, out=tmp_path, observer=changing)
    assert caught.value.exit_code == 6
    folder = RunFolder(changing.path)
    status = folder.read_status()
    assert status["state"] == "failed" and name in status["error"]
    assert not (folder.path / "checksums.json").exists() and not folder.checkpoints()
    assert Inspection(folder).verdict != "whole"
    there, aside = folder.path / name, folder.path / "aside" / f"1-{name}"
    damaged = there.read_bytes() if there.exists() else None
    again = deepstack.train(CONFIG, out=tmp_path)
    assert again.path == folder.path
    assert data_of(again) == data_of(whole) and Inspection(folder).verdict == "whole"
    assert (aside.read_bytes() if aside.exists() else None) == damaged


def test_the_next_checkpoint_notices_it_and_earlier_ones_are_not_used(tmp_path: Path) -> None:
    config, changing, listener = small(runtime__checkpoint_seconds=0.0), Change(digit), Change()
    with pytest.raises(ChangedLogError):
        deepstack.train(config, out=tmp_path, observer=changing)
    folder = RunFolder(changing.path)
    assert folder.checkpoints() == [4, 5] and folder.read_status()["step"] == 6
    deepstack.train(config, out=tmp_path, observer=listener)
    assert "starting again from step 0" in " ".join(listener.lines)


def test_a_log_that_changes_as_the_run_is_sealed_is_found_by_verify(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def changed_first(folder: RunFolder, *words: Any, **more: Any) -> None:
        digit(folder.steps_path)
        write_end(folder, *words, **more)

    monkeypatch.setattr(outcome, "write_end", changed_first)
    run = deepstack.train(CONFIG, out=tmp_path)
    assert "steps.csv" in str(Inspection(run.folder).problems)


def lost(out: Path, at: int, config: Config = SMALL) -> Path:
    """Stop a run after four steps, resume it, and lose it after the rows of step `at`."""
    steps = interrupted(config, out, 4).steps_path
    end = Mock(side_effect=KeyboardInterrupt)  # the end of the process, as far as its run can tell
    with pytest.raises(KeyboardInterrupt):
        deepstack.train(config, out=out, observer=Change(end, at=at))
    return steps


def test_a_log_that_changes_as_its_run_resumes_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the comparison with the checkpoint and the opening of the log."""
    steps = interrupted(SMALL, tmp_path, 4).steps_path
    newest_usable = checkpoint.newest_usable

    def changed_after(*words: Any) -> checkpoint.Checkpoint | None:
        newest = newest_usable(*words)
        digit(steps)
        return newest

    monkeypatch.setattr(checkpoint, "newest_usable", changed_after)
    with pytest.raises(ChangedLogError, match=r"steps\.csv: changed while its run resumed"):
        deepstack.train(SMALL, out=tmp_path)
    monkeypatch.undo()
    assert deepstack.train(SMALL, out=tmp_path).state == "done"


def test_a_row_changed_after_the_checkpoint_is_shown_beside_the_recomputed_row(
    tmp_path: Path,
) -> None:
    steps = lost(tmp_path, at=7)
    changed = steps.read_bytes().replace(b"\n6,", b"\n6,9", 1)
    steps.write_bytes(changed)
    with pytest.raises(DifferenceError, match=r"on disk: 6,9\S+\n +now: +6,") as caught:
        deepstack.train(SMALL, out=tmp_path)
    assert caught.value.exit_code == 6 and steps.read_bytes() == changed


def test_without_determinism_a_slightly_different_row_is_reported_and_marked(
    tmp_path: Path,
) -> None:
    config = small(runtime__deterministic=False)
    steps = lost(tmp_path, at=7, config=config)
    head, row = steps.read_text().split("\n6,")
    loss, rest = row.split(",", 1)
    changed = f"{head}\n6,{float(loss) * 1.001:.6g},{rest}"
    steps.write_text(changed)
    observer = Change()
    with pytest.raises(Interrupted):
        deepstack.train(config, out=tmp_path, observer=observer, stop=stop_at(4))
    run = deepstack.train(config, out=tmp_path, observer=observer)
    notice = "rows computed again differ within 1%: 1 of steps.csv"
    assert [text for text in observer.lines if "differ" in text] == [notice]
    assert run.meta["differing_logs"] == ["steps.csv"] and steps.read_text().startswith(changed)


def test_rows_behind_the_last_step_are_not_sealed(tmp_path: Path) -> None:
    """They lie there when the run resumes, and no row is written in their place."""
    with open(lost(tmp_path, at=12), "ab") as file:
        file.write(b"13,1.0,1.0,1.0,1.0,1.0,1.0,1.0\n")
    with pytest.raises(ChangedLogError, match=r"steps\.csv: was changed"):
        deepstack.train(SMALL, out=tmp_path)
