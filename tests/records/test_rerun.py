"""deepstack rerun: a run comes out of its record again, or the first difference is named."""

import os
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from helpers.command_line import PLUGIN, typed
from helpers.ended_runs import TINY, flip
from helpers.extensions import needs
from helpers.record_runs import contents
from helpers.registries import restored_names
from helpers.small_runs import reseal, stop_at

import deepstack
from deepstack.base import plugins
from deepstack.base.errors import ConfigError, DifferenceError, Interrupted
from deepstack.config import Config, with_overrides
from deepstack.records import Run, RunFolder, extent
from deepstack.training.rerun import check, later_difference

rerun = partial(typed, "rerun")


def change_cell(path: Path, step: int, column: str) -> tuple[str, str]:
    """Change the last digit of one cell of a CSV file; return the cell before and after."""
    text = path.read_text()
    at = text.split("\n")[0].split(",").index(column)
    row = re.search(rf"^{step},.*$", text, re.M)[0]
    cells = row.split(",")
    before = cells[at]
    cells[at] = re.sub(r"\d(?=\D*$)", lambda d: str((int(d[0]) + 1) % 10), before)
    path.write_text(text.replace(row, ",".join(cells)))
    return before, cells[at]


# --- identical ---------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["done", "diverged", "interrupted"])
def test_a_run_comes_out_again(
    state: str, trained: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = contents(trained[state])
    result = rerun(trained[state], "--check", "-q")
    assert (result.exit_code, result.stderr) == (0, "")
    extent = " up to step 4" if state == "interrupted" else ""
    assert result.stdout.startswith(f"identical{extent}: ")
    assert "steps.csv" in result.stdout and "evals.csv" in result.stdout
    assert ("checkpoint" in result.stdout) == (state != "diverged")
    assert contents(trained[state]) == before and not list(tmp_path.iterdir())


def test_a_killed_run_is_compared_as_far_as_its_rows_go(folder: RunFolder) -> None:
    folder.write_status("running", 0)
    shutil.rmtree(folder.checkpoint_dir)
    rows = folder.steps_path.read_bytes().splitlines(keepends=True)
    folder.steps_path.write_bytes(b"".join(rows[:5]) + b"5,3.")
    for path in (folder.evals_path, *folder.path.glob("attribution.csv")):
        kept = [r for r in path.read_text().splitlines(keepends=True) if r[0] not in "456"]
        path.write_text("".join(kept))
    for name in (*folder.layer_names(), "steps"):
        values = np.load(folder.layers_dir / f"{name}.npy")
        np.save(folder.layers_dir / f"{name}.npy", values[:1])
    assert check(folder.path).startswith("identical up to step 4: steps.csv, ")
    change_cell(folder.steps_path, 4, "loss")
    with pytest.raises(DifferenceError, match=r"steps\.csv: a row written again differs"):
        check(folder.path)


def test_without_check_the_new_run_is_kept(trained: dict[str, Path], tmp_path: Path) -> None:
    result = rerun(trained["done"], "--out", tmp_path, "-q")
    assert result.exit_code == 0, result.stderr
    made, record = Run(result.stdout.strip()), Run(trained["done"])
    assert made.path == tmp_path / "done-rerun" / record.name
    assert made.folder.steps_path.read_bytes() == record.folder.steps_path.read_bytes()
    assert made.meta["command"].startswith("deepstack")


# --- differences -------------------------------------------------------------------------------


Change = Callable[[RunFolder], object]


def flip_layer(folder: RunFolder) -> None:
    path = folder.layers_dir / "stream_norm.npy"
    values = np.load(path)
    values[1, 1] += 1
    np.save(path, values)


def lose_record(folder: RunFolder) -> None:
    """Cut the last snapshot off all files of layers."""
    for path in folder.layers_dir.glob("*.npy"):
        np.save(path, np.load(path)[:-1])


def change_weight(folder: RunFolder) -> None:
    """Change one number and its checksum with it: only training again can tell."""
    path = folder.checkpoint_path(6) / "weights.safetensors"
    flip(path, 8 * (path.stat().st_size - 1))
    reseal(path.parent)


CHANGES: list[tuple[Change, str]] = [
    (flip_layer, r"layers/stream_norm\.npy at step 3, layer 2: was "),
    (lose_record, r"layers/\w+\.npy had \d records, has \d now"),
    (
        lambda f: np.save(f.layers_dir / "steps.npy", np.load(f.layers_dir / "steps.npy") + 1),
        r"layers/steps\.npy: a record was of step 1, is of step 0",
    ),
    (lambda f: (f.layers_dir / "grad_norm.npy").unlink(), r"layers/grad_norm\.npy: only one"),
    (
        lambda f: (f.layers_dir / "grad_norm.npy").write_bytes(b""),
        r"grad_norm\.npy: is not an array",
    ),
    (lambda f: shutil.rmtree(f.checkpoint_dir), "checkpoint/6 is not in the record"),
    (lambda f: f.write_status("diverged", 6), "its state was diverged at step 6, is done at"),
    (lambda f: os.truncate(f.evals_path, extent(f.evals_path, 0).size), "evals.csv has more rows"),
    (lambda f: (f.checkpoint_path(6) / "weights.safetensors").write_bytes(b"x"), "checkpoint 6: "),
]


@pytest.mark.parametrize(("change", "problem"), CHANGES)
def test_a_difference_behind_equal_rows_is_named(
    change: Change, problem: str, trained: dict[str, Path], folder: RunFolder
) -> None:
    change(folder)
    difference = later_difference(folder, RunFolder(trained["done"]), ended=True)
    assert re.search(problem, str(difference))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (change_weight, "checkpoint 6: .* in weights.safetensors differs"),
        pytest.param(
            lambda f: change_cell(f.path / "attribution.csv", 3, "q"),
            r"attribution\.csv: a row .* at step 3 in column q",
            marks=needs("attribution"),
        ),
        (
            lambda f: f.steps_path.write_text(f.steps_path.read_text() + "7,1,1,1,1,1,1,1\n"),
            r"steps\.csv: was changed, .*worked\n`deepstack",
        ),
    ],
)
def test_a_difference_is_named(change: Change, problem: str, folder: RunFolder) -> None:
    change(folder)
    with pytest.raises(DifferenceError, match=f"is not reproduced: .*{problem}"):
        check(folder.path)


def test_both_rows_are_shown_and_training_stops_there(folder: RunFolder) -> None:
    true, changed = change_cell(folder.steps_path, 2, "model_update")
    calls: list[int] = []
    with pytest.raises(DifferenceError):
        check(folder.path, stop=lambda: calls.append(1))
    assert len(calls) == 1  # once a step
    result = rerun(folder.path, "--check", "-q")
    assert result.exit_code == 6 and result.stdout == ""
    rows = rf"(?m)^  on disk: .*,{changed},.*\n  now: .*,{true},"
    assert re.search(rows, result.stderr), result.stderr


# --- refusals ------------------------------------------------------------------------------


def test_another_environment_is_refused_by_name(
    trained: dict[str, Path], tmp_path: Path, folder: RunFolder
) -> None:
    meta = folder.read_meta()
    meta["environment"] |= {"torch": "1.0", "threads": 7}
    folder.write_meta(meta)
    for words in ([], ["--check"]):
        result = rerun(folder.path, *words, "--out", tmp_path / "new")
        assert result.exit_code == 2 and not (tmp_path / "new").exists()
        for text in ("torch was '1.0', is ", "threads was 7, is 1", "--allow-env-change"):
            assert text in result.stderr
    result = rerun(folder.path, "--check", "--allow-env-change")
    assert result.exit_code == 0 and "environment: torch was '1.0', is " in result.stderr
    change_cell(folder.steps_path, 1, "loss")
    result = rerun(folder.path, "--check", "--allow-env-change")
    assert result.exit_code == 6 and "environment: threads was 7, is 1" in result.stderr


def test_other_data_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(32, 120)) * 300)
    config = with_overrides(Config(), TINY | {"task.path": str(text)})
    run = deepstack.train(config, out=tmp_path)
    assert rerun(run.path, "--check").exit_code == 0
    text.write_bytes(bytes(range(33, 121)) * 300)
    result = rerun(run.path, "--check")
    assert result.exit_code == 2
    assert run.meta["data"]["sha256"] in result.stderr and "other data" in result.stderr


def test_a_missing_plugin_is_refused_and_a_given_one_is_used(tmp_path: Path) -> None:
    plugin = tmp_path / "mine.py"
    plugin.write_text(PLUGIN)
    config = with_overrides(Config(), TINY | {"model.scheme": "own"})
    with restored_names():
        plugins.load_plugins([plugin])
        run = deepstack.train(config, out=tmp_path)
    result = rerun(run.path, "--check")
    assert result.exit_code == 2 and "mine.py" in result.stderr and "sha256" in result.stderr
    result = rerun(run.path, "--check", "--plugin", plugin)
    assert result.exit_code == 0, result.stderr


def test_a_rerun_of_a_folder_without_rows_is_refused(
    trained: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: RunFolder
) -> None:
    assert rerun(tmp_path, "--check").exit_code == 2
    folder.write_status("running", 0)
    folder.steps_path.unlink()
    folder.evals_path.unlink()
    result = rerun(folder.path, "--check")
    assert result.exit_code == 7 and "no row" in result.stderr
    folder.meta_path.unlink()
    assert rerun(folder.path).exit_code == 7
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="several processes"):
        check(trained["done"])


def test_a_signal_ends_it_and_nothing_is_kept(
    trained: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for state in ("done", "interrupted"):
        with pytest.raises(Interrupted, match="at step 2, identical so far"):
            check(trained[state], stop=stop_at(2))
        assert not list(tmp_path.iterdir())
