"""deepstack rerun: a run comes out of its record again, or the first difference is named."""

from __future__ import annotations

import re
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.command_line import typed
from helpers.ended_runs import TINY
from helpers.record_runs import contents
from helpers.registries import restored_names
from helpers.small_runs import reseal

import deepstack
from deepstack import plugins
from deepstack.config import Config, with_overrides
from deepstack.errors import ConfigError, DifferenceError, Interrupted
from deepstack.records import Run, RunFolder
from deepstack.training import Observer
from deepstack.training.rerun import check, later_difference

rerun = partial(typed, "rerun")


def change_cell(path: Path, step: int, column: str) -> tuple[str, str]:
    """Change the last digit of one cell of a CSV file; return the cell before and after."""
    header, *rows = path.read_text().splitlines()
    at = header.split(",").index(column)
    number = next(i for i, row in enumerate(rows) if row.startswith(f"{step},"))
    cells = rows[number].split(",")
    before = cells[at]
    cells[at] = re.sub(r"\d(?=\D*$)", lambda d: str((int(d[0]) + 1) % 10), before)
    rows[number] = ",".join(cells)
    path.write_text("\n".join([header, *rows]) + "\n")
    return before, cells[at]


class Counting(Observer):
    """Remembers the last step that was made."""

    last = 0

    def stepped(self, step: int, row: Any) -> None:
        self.last = step


# --- identical ---------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["done", "diverged", "interrupted"])
def test_a_run_comes_out_again(
    state: str, trained: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = contents(trained[state])
    result = rerun(trained[state], "--check", "-q")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith("identical")
    assert ": evals.csv, steps.csv" in result.stdout or ": steps.csv, evals.csv" in result.stdout
    assert ("up to step 4" in result.stdout) == (state == "interrupted")
    assert ("checkpoint" in result.stdout) == (state != "diverged")
    assert contents(trained[state]) == before and not list(tmp_path.iterdir())


def test_a_killed_run_is_compared_as_far_as_its_rows_go(folder: RunFolder) -> None:
    folder.write_status("running", 0)
    shutil.rmtree(folder.checkpoint_dir)
    rows = folder.steps_path.read_bytes().splitlines(keepends=True)
    folder.steps_path.write_bytes(b"".join(rows[:5]) + b"5,3.")
    for path in (folder.evals_path, folder.csv_path("attribution")):
        kept = [r for r in path.read_text().splitlines(keepends=True) if r[0] not in "456"]
        path.write_text("".join(kept))
    for name in (*folder.layer_names(), "steps"):
        values = np.load(folder.layers_dir / f"{name}.npy")
        np.save(folder.layers_dir / f"{name}.npy", values[:1])
    watch = Counting()
    assert check(folder.path, observer=watch).startswith("identical up to step 4: steps.csv, ")
    assert watch.last == 4
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


def flip_layer(folder: RunFolder) -> object:
    path = folder.layers_dir / "stream_norm.npy"
    values = np.load(path)
    values[1, 1] += 1
    return np.save(path, values)


def flip_weight(folder: RunFolder) -> None:
    """Change one number and its checksum with it: only training again can tell."""
    from safetensors.torch import load_file, save_file

    path = folder.checkpoint_path(6) / "weights.safetensors"
    tensors = load_file(path)
    large = next(name for name in sorted(tensors) if tensors[name].numel() > 100)
    tensors[large].view(-1)[70] += 1e-6
    save_file(tensors, path)
    reseal(path.parent)


Change = Callable[[RunFolder], object]


def cut_rows(folder: RunFolder) -> None:
    """Leave the header and the first row of evals.csv."""
    rows = folder.evals_path.read_text().splitlines(keepends=True)
    folder.evals_path.write_text("".join(rows[:2]))


def add_row(folder: RunFolder) -> None:
    """Add a row to steps.csv after the last step."""
    with open(folder.steps_path, "a") as log:
        log.write("7,1,1,1,1,1,1,1\n")


CHANGES: list[tuple[Change, str]] = [
    (flip_layer, r"layers/stream_norm\.npy at step 3, layer 2: was "),
    (lambda f: (f.layers_dir / "grad_norm.npy").unlink(), r"layers/grad_norm\.npy: only one"),
    (lambda f: (f.layers_dir / "grad_norm.npy").write_bytes(b""), r"grad_norm\.npy: is no array"),
    (lambda f: shutil.rmtree(f.checkpoint_dir), "checkpoint/6 is not in the record"),
    (lambda f: f.write_status("diverged", 6), "its state was diverged at step 6, is done at"),
    (cut_rows, r"evals\.csv has more rows now"),
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
        (flip_weight, "checkpoint 6: .* in weights.safetensors differs"),
        (
            lambda f: change_cell(f.path / "attribution.csv", 3, "q"),
            r"attribution\.csv: a row .* at step 3 in column q",
        ),
        (add_row, r"steps\.csv: was changed, .*worked\n`deepstack"),
    ],
)
def test_a_difference_is_named(change: Change, problem: str, folder: RunFolder) -> None:
    change(folder)
    with pytest.raises(DifferenceError, match=f"is not reproduced: .*{problem}"):
        check(folder.path)


def test_both_rows_are_shown_and_training_stops_there(folder: RunFolder) -> None:
    true, changed = change_cell(folder.steps_path, 2, "model_update")
    watch = Counting()
    with pytest.raises(DifferenceError):
        check(folder.path, observer=watch)
    assert watch.last == 1
    result = rerun(folder.path, "--check", "-q")
    assert result.exit_code == 6 and result.stdout == ""
    was, now = (
        line for line in result.stderr.splitlines() if line[:10] in ("  on disk:", "  now:    ")
    )
    assert f",{changed}," in was and f",{true}," in now


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
        assert "torch was '1.0', is " in result.stderr and "threads was 7, is 1" in result.stderr
        assert "--allow-env-change" in result.stderr
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
    plugin.write_text(
        "from deepstack.schemes import Scheme\n"
        "class Twice(Scheme, name='twice', label='Twice', paper='none'):\n"
        "    '''x <- LN(2 x + G(x)).'''\n"
        "    def residual(self, x, G, norm):\n"
        "        return norm(2 * x + G(x))\n"
    )
    config = with_overrides(Config(), TINY | {"model.scheme": "twice"})
    with restored_names():
        plugins.load_plugins([plugin])
        run = deepstack.train(config, out=tmp_path)
    result = rerun(run.path, "--check")
    assert result.exit_code == 2 and "mine.py" in result.stderr and "sha256" in result.stderr
    result = rerun(run.path, "--check", "--plugin", plugin)
    assert result.exit_code == 0, result.stderr


def test_what_is_no_run_or_has_no_row(
    trained: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: RunFolder
) -> None:
    assert rerun(tmp_path, "--check").exit_code == 2
    assert "is no run" in rerun(trained["done"].parent).stderr
    folder.write_status("running", 0)
    folder.steps_path.unlink()
    folder.evals_path.unlink()
    result = rerun(folder.path, "--check")
    assert result.exit_code == 7 and "no row" in result.stderr
    folder.meta_path.unlink()
    assert rerun(folder.path).exit_code == 7
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"):
        monkeypatch.setenv(name, "0")
    with pytest.raises(ConfigError, match="several processes"):
        check(trained["done"])


def test_a_signal_ends_it_and_nothing_is_kept(
    trained: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for state in ("done", "interrupted"):
        calls = iter(range(10))
        with pytest.raises(Interrupted, match="at step 2, identical so far") as caught:
            check(trained[state], stop=lambda n=calls: signal.SIGINT if next(n) == 1 else None)
        assert caught.value.exit_code == 130 and not list(tmp_path.iterdir())
