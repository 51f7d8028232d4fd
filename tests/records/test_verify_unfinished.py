"""deepstack verify on runs that have not ended, and on those of older versions."""

from pathlib import Path

import numpy as np
import pytest
from helpers.ended_runs import TINY, flip, verify

import deepstack
from deepstack.config import Config, with_overrides
from deepstack.records import Inspection, RunFolder, extent, files, find_runs, problems, write_end


def test_flips_in_an_interrupted_run_are_noticed(stopped: RunFolder) -> None:
    assert stopped.checkpoints() == [3, 4]
    random = np.random.default_rng(0)
    names = {path: f"checkpoint/{path.parent.name}" for path in stopped.checkpoint_dir.glob("*/*")}
    logs = (stopped.steps_path, stopped.evals_path, stopped.path / "attribution.csv")
    names |= {path: path.name for path in logs}
    assert len(names) == 15
    for path, name in names.items():
        whole = path.read_bytes()
        for bit in random.integers(0, 8 * len(whole), 4).tolist():
            flip(path, bit)
            assert name in [line.split(":")[0] for line in problems(stopped)], (path, bit)
            path.write_bytes(whole)
    assert problems(stopped) == []


def test_rows_behind_the_last_checkpoint_are_no_damage_but_lost_ones_are(
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


def test_a_run_killed_amid_its_first_look_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = files.replace

    def killed(path: Path, data: bytes) -> None:
        if path.name == "steps.npy":
            raise KeyboardInterrupt  # the end of the process, as far as a run can tell
        replace(path, data)

    monkeypatch.setattr(files, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        deepstack.train(with_overrides(Config(), TINY), out=tmp_path)
    (run,) = find_runs(tmp_path)
    assert list(run.folder.layers_dir.glob("*.npy")) and problems(run.folder) == []


def test_a_damaged_newest_checkpoint_leaves_the_logs_to_the_one_before(stopped: RunFolder) -> None:
    flip(stopped.checkpoint_path(4) / "state.json", 3)
    flip(stopped.steps_path, 8 * (extent(stopped.steps_path, 2).size - 3))
    found = problems(stopped)
    assert [line.split(":")[0] for line in found] == ["checkpoint/4", "steps.csv"]
    assert "up to step 3" in found[1]


def test_a_run_at_work_is_told_as_far_as_it_is(stopped: RunFolder) -> None:
    stopped.write_status("running", 4)
    with stopped.lock():
        before = {path: path.stat().st_mtime_ns for path in stopped.path.rglob("*")}
        found = Inspection(stopped)
        assert (found.state, found.verdict) == ("running", "so far") and found.files > 10
        assert before == {path: path.stat().st_mtime_ns for path in stopped.path.rglob("*")}
        flip(stopped.checkpoint_path(3) / "probe.safetensors", 1000)
        assert problems(stopped)[0].startswith("checkpoint/3: probe.safetensors is not")


def test_sums_of_a_run_killed_before_its_status_are_of_no_use(stopped: RunFolder) -> None:
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
