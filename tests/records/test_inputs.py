"""Names and texts from outside: none leads elsewhere, none is begun that cannot be trained on."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from helpers.command_line import TINY, typed

import deepstack as package
from deepstack.config import load_config, parse_config, to_yaml
from deepstack.errors import Interrupted

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
    words = [command, str(config), "--out", str(tmp_path / "in" / "out"), "-q"]
    result = typed(*words, f"--study={BAD_NAMES[name]}")
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("deepstack: --study: found ")
    assert result.stderr.removesuffix("\n").isprintable()
    assert [path.name for path in tmp_path.rglob("*")] == ["c.yaml"]


@pytest.mark.parametrize("name", [n for n in BAD_NAMES.values() if n and n.isprintable()])
def test_a_name_in_a_config_cannot_leave_the_results(name: str, tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(f"name: {json.dumps(name)}\n")
    result = typed("train", config, "--out", tmp_path / "out")
    assert result.exit_code == 2 and "c.yaml:1:7: name: found" in result.stderr
    assert [path.name for path in tmp_path.rglob("*")] == ["c.yaml"]


def test_a_file_name_cannot_leave_the_results(tmp_path: Path) -> None:
    from deepstack.config import Config, study_name

    for stem in ("..", "...", "é", ".hidden", "-x", "a b", "x" * 200, "\udcff"):
        name = study_name(Config(), tmp_path / f"{stem}.yaml")
        assert name and (tmp_path / name).parent == tmp_path and name[0] not in ".-"
        assert len(name) <= 64


def corpora(folder: Path, task: str) -> dict[str, Path]:
    """Files that none can be trained on."""
    contents = {"empty": b"", "short": b"too short", "binary": b"\xff\xfe" * 5000}
    if task == "tokens":
        header = np.array([20240520, 2, 999, *[0] * 253], dtype="<i4").tobytes()
        contents = {"empty.bin": b"", "odd.bin": b"abc", "version.bin": header, "a.pkl": b"\x80"}
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    os.mkfifo(folder / "fifo")
    (folder / "folder").mkdir()
    (folder / "link").symlink_to("/dev/zero")
    names = [*contents, "fifo", "folder", "link", "missing"]
    return {name: folder / name for name in names} | {"device": Path("/dev/zero")}


@pytest.mark.parametrize("task", ["text", "tokens"])
def test_unfit_data_are_refused_before_anything_is_made(task: str, tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "c.yaml").write_text("")
    for name, path in corpora(tmp_path / "texts", task).items():
        words = ["train", tmp_path / "c.yaml", f"task.path={path}", f"task.name={task}"]
        words += ["--out", tmp_path / "out"]
        result = typed(*words)
        assert result.exit_code == 2, name
        assert len(result.stderr.splitlines()) == 1, result.stderr
        assert str(path) in result.stderr or "part is too short" in result.stderr
        assert "Traceback" not in result.stderr and result.stdout == ""
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["text", "tokens"])
def test_data_that_changed_since_the_checkpoint_are_refused(name: str, tmp_path: Path) -> None:
    text, out = tmp_path / {"text": "data.txt", "tokens": "data.bin"}[name], tmp_path / "out"
    text.write_text("the first text " * 200)
    settings = [*TINY, "train.steps=6", f"task.path={text}", f"task.name={name}"]
    if name == "tokens":
        settings.append("task.vocab_size=65536")
    (tmp_path / "c.yaml").write_text(to_yaml(parse_config("", overrides=settings)))
    config = load_config(tmp_path / "c.yaml")
    with pytest.raises(Interrupted):
        package.train(config, study="c", out=out, stop=lambda: 15)
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.name != ".lock"}
    text.write_text("another text " * 200)
    result = typed("train", tmp_path / "c.yaml", "--out", out)
    assert result.exit_code == 2
    assert text.name in result.stderr and "has changed" in result.stderr
    assert before == {p: p.stat().st_mtime_ns for p in out.rglob("*") if p.name != ".lock"}
    text.write_text("the first text " * 200)
    assert package.train(config, study="c", out=out).state == "done"
