"""Names and texts from outside: none leads elsewhere, none is begun that cannot be trained on."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from helpers.command_line import typed
from helpers.small_runs import interrupted, small

import deepstack
from deepstack.config import Config, study_name, to_yaml

BAD_NAMES = {
    "above": "../x", "far above": "../../x", "absolute": "/tmp/x", "nothing": "", "here": ".",
    "up": "..", "hidden": ".x", "below": "a/b", "a backslash": "a\\b", "an option": "-x",
    "a line end": "a\n", "spaces": " ", "long": "x" * 300, "no ASCII": "é", "a home": "~",
    "a pattern": "*", "a control character": "a\x1b[31m",
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_NAMES)
@pytest.mark.parametrize("command", ["train", "sweep"])
def test_a_study_cannot_leave_the_results(command: str, name: str, tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("model: {depth: 2}\n")
    study = f"--study={BAD_NAMES[name]}"
    result = typed(command, config, "--out", tmp_path / "in" / "out", "-q", study)
    (line,) = result.stderr.splitlines()
    assert result.exit_code == 2 and line.startswith("deepstack: --study: found ")
    assert line.isprintable()
    assert [path.name for path in tmp_path.rglob("*")] == ["c.yaml"]


@pytest.mark.parametrize("name", [n for n in BAD_NAMES.values() if n and n.isprintable()])
def test_a_name_in_a_config_cannot_leave_the_results(name: str, tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(f"name: {json.dumps(name)}\n")
    result = typed("train", config, "--out", tmp_path / "out")
    assert result.exit_code == 2 and "c.yaml:1:7: name: found" in result.stderr
    assert [path.name for path in tmp_path.rglob("*")] == ["c.yaml"]


def test_a_file_name_cannot_leave_the_results(tmp_path: Path) -> None:
    for stem in ("..", "...", "é", ".hidden", "-x", "a b", "x" * 200, "\udcff"):
        name = study_name(Config(), tmp_path / f"{stem}.yaml")
        assert name and (tmp_path / name).parent == tmp_path and name[0] not in ".-"
        assert len(name) <= 64


@pytest.mark.parametrize("task", ["text", "tokens"])
def test_unfit_data_are_refused_before_anything_is_made(task: str, tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"abc")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("/dev/zero")
    (tmp_path / "c.yaml").write_text(f"task: {{name: {task}}}\n")
    for name in ("short", "fifo", "folder", "link", "missing"):
        path = tmp_path / name
        words = ["train", tmp_path / "c.yaml", f"task.path={path}", "--out", tmp_path / "out"]
        result = typed(*words)
        assert (result.exit_code, result.stdout) == (2, ""), path
        (line,) = result.stderr.splitlines()
        assert str(path) in line or "part is too short" in line
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["text", "tokens"])
def test_data_that_changed_since_the_checkpoint_are_refused(name: str, tmp_path: Path) -> None:
    text, out = tmp_path / "data.bin", tmp_path / "out"
    first, other = b"the first text " * 200, b"another text " * 200
    if name == "tokens":
        first, other = (np.arange(start, 2000, dtype="<u2").tobytes() for start in (0, 1))
    text.write_bytes(first)
    more = {"task__vocab_size": 65536} if name == "tokens" else {}
    config = small(train__steps=6, task__path=str(text), task__name=name, **more)
    (tmp_path / "c.yaml").write_text(to_yaml(config))
    interrupted(config, out, 1, "c")
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.name != ".lock"}
    text.write_bytes(other)
    result = typed("train", tmp_path / "c.yaml", "--out", out)
    assert result.exit_code == 2
    assert text.name in result.stderr and "has changed" in result.stderr
    assert before == {p: p.stat().st_mtime_ns for p in out.rglob("*") if p.name != ".lock"}
    text.write_bytes(first)
    assert deepstack.train(config, study="c", out=out).state == "done"
