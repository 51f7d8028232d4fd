"""deepstack verify: names each file of a run that has changed."""

import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.ended_runs import TINY, copied, flip, verify
from helpers.record_runs import end, make_run
from helpers.small_runs import small

import deepstack
from deepstack.base.errors import ResourceError
from deepstack.config import Config, with_overrides
from deepstack.records import Inspection, Run, RunFolder, damage, files, problems, write_end


def small_run(path: Path) -> RunFolder:
    """Every kind of file that a finished run has, each of a few bytes."""
    folder = make_run(path)
    folder.write_meta({"seed": 0})
    folder.write_columns({"columns": {}})
    with folder.log("evals", deepstack.records.EVALS_COLUMNS) as log:
        log.write({"step": 3, "loss": 2.0})
    with folder.log("timing", ("step", "step_ms", "peak_memory_mb")) as log:
        log.write({"step": 1, "step_ms": 2.0, "peak_memory_mb": 3.0})
    folder.write_layers({"grad_norm": np.ones((1, 2))}, [3])
    weights = folder.checkpoint_path(3) / "weights.safetensors"
    weights.parent.mkdir(parents=True)
    weights.write_bytes(b"weights")
    folder.log_path.write_text("step 3\n")
    return end(folder)


# --- whole runs --------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["done", "diverged", "interrupted"])
def test_an_untouched_run_is_whole(state: str, trained: dict[str, Path]) -> None:
    before = {path: path.stat().st_mtime_ns for path in trained[state].rglob("*")}
    result = verify(trained[state], "--json")
    assert result.exit_code == 0 and result.stderr == ""
    assert before == {path: path.stat().st_mtime_ns for path in trained[state].rglob("*")}
    (row,) = json.loads(result.stdout)
    assert row["state"] == state and row["problems"] == []
    assert row["verdict"] == ("so far" if state == "interrupted" else "whole")
    if state == "done":
        paths = (path for path in trained[state].rglob("*") if path.is_file())
        names = {path.relative_to(trained[state]).as_posix() for path in paths}
        sums = json.loads((trained[state] / "checksums.json").read_text())
        assert sums.keys() == names - {"log.txt", ".lock", "checksums.json"}
        assert row["files"] == len(sums) - 1  # without status.json


def test_other_peoples_files_are_not_damage(folder: RunFolder) -> None:
    folder.log_path.write_text("something else")
    (folder.path / "notes.md").write_text("mine")
    (folder.path / ".DS_Store").write_text("a system's")
    (folder.layers_dir / ".new.npy").write_text("half written")
    with folder.lock():
        pass
    moved = folder.path.rename(folder.path.with_name("renamed"))
    assert problems(RunFolder(moved)) == []


# --- changes -------------------------------------------------------------------------------


@pytest.mark.parametrize("each", [30, pytest.param(None, marks=pytest.mark.slow)])
def test_a_flipped_bit_of_a_finished_run_is_noticed(each: int | None, tmp_path: Path) -> None:
    """Of `each` bits of every file, or of all bits."""
    folder, random = small_run(tmp_path / "s" / "r"), np.random.default_rng(0)
    for path in sorted(folder.path.rglob("*")):
        if not path.is_file() or path == folder.log_path:
            continue
        name, whole = path.relative_to(folder.path).as_posix(), path.read_bytes()
        size = 8 * len(whole)
        for bit in range(size) if each is None else random.integers(0, size, each).tolist():
            flip(path, bit)
            found = [line.split(":")[0] for line in problems(folder)]
            # of two files that do not fit, status.json and another, the other may be named
            assert name in found or (name == "status.json" and found), (name, bit)
            path.write_bytes(whole)
    assert problems(folder) == []


CHANGES: list[tuple[Callable[[RunFolder], object], str]] = [
    (lambda f: f.evals_path.unlink(), "evals.csv: missing"),
    (lambda f: f.config_path.unlink(), "config.yaml: missing"),
    (lambda f: shutil.rmtree(f.checkpoint_dir), "safetensors: missing"),
    (lambda f: f.status_path.unlink(), "status.json: missing"),
    (lambda f: (f.path / "checksums.json").unlink(), "checksums.json: missing"),
    (lambda f: (f.layers_dir / "x.npy").touch(), "layers/x.npy: not listed in checksums.json"),
    (
        lambda f: shutil.copytree(f.checkpoint_dir, f.checkpoint_path(9)),
        "checkpoint/9/6: not listed in checksums.json",
    ),
    (
        lambda f: (f.timing_path.unlink(), os.mkfifo(f.timing_path)),
        "timing.csv: unreadable (not a file)",
    ),
    (
        lambda f: f.write_status("diverged", 6, checksums=f.read_status()["checksums"]),
        "status.json: changed (sha256 differs)",
    ),
    (
        lambda f: f.status_path.write_text('{"state": "fine", "step": 6, "error": null}'),
        "status.json: found state 'fine'",
    ),
    (lambda f: f.write_status("done", 6), "status.json: has no sha256 of checksums.json"),
    (
        lambda f: flip((f.path / "checksums.json"), 8 * 100),
        "checksums.json: changed (its sha256 is not the one in status.json)",
    ),
    (
        lambda f: f.write_json((f.path / "checksums.json"), {"../../x": "", "/etc/passwd": ""}),
        "/etc/passwd: missing",
    ),
]


@pytest.mark.parametrize(("act", "expected"), CHANGES)
def test_a_change_of_a_finished_run_is_named(
    act: Callable[[RunFolder], object], expected: str, tmp_path: Path, folder: RunFolder
) -> None:
    act(folder)
    result = verify(tmp_path, "--json")
    assert result.exit_code == 6
    (row,) = json.loads(result.stdout)
    assert row["verdict"] == "damaged"
    assert any(expected in problem for problem in row["problems"]), row["problems"]
    assert f"{folder.path}: " in result.stderr and expected in result.stderr
    assert "1 of 1 runs differ from the files that were written" in result.stderr


def test_checkpoints_that_a_kill_left_behind_are_judged_by_themselves(
    trained: dict[str, Path], tmp_path: Path
) -> None:
    folder = copied(trained["diverged"], tmp_path)
    status = {k: v for k, v in folder.read_status().items() if k not in ("error", "checksums")}
    shutil.copytree(trained["interrupted"] / "checkpoint" / "4", folder.checkpoint_path(4))
    write_end(folder, **status, checkpoints=False)
    assert problems(folder) == []
    flip(folder.checkpoint_path(4) / "weights.safetensors", 5000)
    assert "checkpoint/4/weights.safetensors: not listed in checksums.json" in problems(folder)


# --- the command ------------------------------------------------------------------------------


def test_several_folders_each_run_once_and_nothing_matched(
    trained: dict[str, Path], tmp_path: Path
) -> None:
    rows = json.loads(verify(trained["done"], trained["done"].parent, "--json").stdout)
    assert len(rows) == 1
    rows = json.loads(verify(*trained.values(), "--json").stdout)
    assert {row["state"] for row in rows} == set(trained)
    assert verify(tmp_path).exit_code == 7
    assert verify(trained["done"], tmp_path / "none").exit_code == 7
    assert verify().exit_code == 2


def test_damage_of_a_checkpoint(trained: dict[str, Path], tmp_path: Path) -> None:
    path = copied(trained["interrupted"], tmp_path).checkpoint_path(4)
    assert damage(path) is None and damage(path, largest=1000) is not None
    (path / "more.safetensors").touch()
    assert damage(path) == "more.safetensors is not one of its files"
    (path / "more.safetensors").unlink()
    sums = json.loads((path / "checksums.json").read_text())
    for wrong in (sums | {"../4/state.json": sums["state.json"]}, {"x": ""}, [], {"state.json": 1}):
        (path / "checksums.json").write_text(json.dumps(wrong))
        assert damage(path), wrong
    assert "No such file" in str(damage(path / "none"))


# --- runs that have not ended, and runs of older versions -----------------------------------------


def test_flips_in_an_interrupted_run_are_noticed(stopped: RunFolder) -> None:
    assert stopped.checkpoints() == [3, 4]
    random = np.random.default_rng(0)
    names = {path: f"checkpoint/{path.parent.name}" for path in stopped.checkpoint_dir.glob("*/*")}
    logs = [stopped.steps_path, stopped.evals_path, *stopped.path.glob("attribution.csv")]
    names |= {path: path.name for path in logs}
    assert len(names) == 12 + len(logs)
    for path, name in names.items():
        whole = path.read_bytes()
        for bit in random.integers(0, 8 * len(whole), 4).tolist():
            flip(path, bit)
            assert name in [line.split(":")[0] for line in problems(stopped)], (path, bit)
            path.write_bytes(whole)
    assert problems(stopped) == []


def test_missing_rows_are_damage_and_rows_after_the_checkpoint_are_not(
    stopped: RunFolder,
) -> None:
    stopped.write_status("running", 4)  # as a killed process leaves it
    with open(stopped.steps_path, "a") as file:
        file.write("5,1,1,1,1,1,1,1\n6,2.")
    found = Inspection(stopped)
    assert (found.state, found.verdict, found.problems) == ("interrupted", "so far", [])
    (stopped.layers_dir / "steps.npy").unlink()
    assert problems(stopped) == ["layers/steps.npy: missing"]
    lines = stopped.steps_path.read_text().splitlines(keepends=True)
    stopped.steps_path.write_text("".join(lines[:3]))
    assert "steps.csv: changed (sha256 up to step 4 differs)" in problems(stopped)
    stopped.steps_path.unlink()
    assert "steps.csv: missing" in problems(stopped)


def test_a_run_killed_during_its_first_snapshot_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_all = files.replace_all

    def killed(
        folder: Path, contents: Iterable[tuple[str, bytes]], *more: Any, **others: Any
    ) -> None:
        contents = list(contents)
        if contents[0][0] == "steps.npy":
            raise KeyboardInterrupt  # the end of the process, as far as a run can tell
        replace_all(folder, contents, *more, **others)

    monkeypatch.setattr(files, "replace_all", killed)
    with pytest.raises(KeyboardInterrupt):
        deepstack.train(with_overrides(Config(), TINY), out=tmp_path)
    (run,) = deepstack.records.find_runs(tmp_path)
    assert list(run.folder.layers_dir.glob("*.npy")) and problems(run.folder) == []


def test_a_damaged_newest_checkpoint_leaves_the_logs_to_the_one_before(stopped: RunFolder) -> None:
    flip(stopped.checkpoint_path(4) / "state.json", 3)
    flip(stopped.steps_path, 8 * (deepstack.records.extent(stopped.steps_path, 2).size - 3))
    found = problems(stopped)
    assert [line.split(":")[0] for line in found] == ["checkpoint/4", "steps.csv"]
    assert "up to step 3" in found[1]


def test_a_running_run_is_inspected_up_to_its_last_checkpoint(stopped: RunFolder) -> None:
    stopped.write_status("running", 4)
    with stopped.lock():
        before = {path: path.stat().st_mtime_ns for path in stopped.path.rglob("*")}
        found = Inspection(stopped)
        assert (found.state, found.verdict) == ("running", "so far") and found.files > 10
        assert before == {path: path.stat().st_mtime_ns for path in stopped.path.rglob("*")}
        flip(stopped.checkpoint_path(3) / "probe.safetensors", 1000)
        assert problems(stopped)[0].startswith("checkpoint/3: probe.safetensors is not")


def test_checksums_written_before_a_kill_are_ignored(stopped: RunFolder) -> None:
    write_end(stopped, "done", 6)
    stopped.write_status("running", 4)
    with open(stopped.steps_path, "a") as file:
        file.write("5,1,1,1,1,1,1,1\n")
    assert problems(stopped) == []


def test_a_run_of_an_earlier_version_is_read_and_counted(tmp_path: Path, folder: RunFolder) -> None:
    (folder.path / "checksums.json").unlink(missing_ok=True)
    folder.write_status("done", 6)
    result = verify(tmp_path)
    assert result.exit_code == 0 and "no checksums" in result.stdout
    assert "1 of 1 runs have no checksums: an earlier version wrote them" in result.stderr
    rows = folder.steps_path.read_text()
    for text, start in (
        (rows[:-1], "steps.csv: does not end at step 6, as status.json says"),
        (rows.replace("\n3,", "\nthree,"), "steps.csv: unreadable ("),
        (rows.replace("\n3,", "\n3,1,"), "steps.csv: unreadable ("),
    ):
        folder.steps_path.write_text(text)
        assert problems(folder)[0].startswith(start), text
    folder.steps_path.write_text(rows)
    (folder.layers_dir / "grad_norm.npy").write_bytes(b"\x93NUMPY nothing")
    folder.meta_path.write_text("{")
    found = problems(folder)
    assert [line.split(":")[0] for line in found] == ["meta.json", "layers/grad_norm.npy"]
    assert not any("deepstack verify" in line for line in found)
    flip(folder.checkpoint_path(6) / "weights.safetensors", 4000)
    assert problems(folder)[-1].startswith("checkpoint/6: weights.safetensors is not what was")


def test_a_config_that_was_changed_after_the_end_labels_no_numbers(tmp_path: Path) -> None:
    run = deepstack.train(small(train__steps=2), out=tmp_path)
    config = run.folder.config_path
    text = config.read_text()
    assert run.damage() is None
    config.write_text(text.replace("  lr: 0.001\n", "  lr: 0.5\n"))
    assert "config.yaml: was changed after the run ended" in (Run(run.path).damage() or "")
    with pytest.raises(ResourceError, match=r"config\.yaml: was changed after the run ended"):
        deepstack.compare(run.path.parent)
    config.write_text(text)
    assert Run(run.path).damage() is None
