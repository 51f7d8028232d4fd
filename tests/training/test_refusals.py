"""A run that is refused, or that there is nothing left to do for, leaves everything as it was."""

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import QUICK
from helpers.command_line import TINY, typed
from helpers.small_runs import only_run

from deepstack.cli import main
from deepstack.records import RunFolder, problems


def train(out: Path, *words: str) -> Any:
    return typed("train", QUICK, *TINY, "-q", "--out", out, *words)


@pytest.mark.parametrize("cause", [errno.EROFS, errno.EACCES])
def test_a_run_that_is_done_is_said_to_be_where_nothing_can_be_written(
    cause: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train(tmp_path).exit_code == 0
    opened = os.open

    def read_only(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and str(tmp_path) in str(path):
            raise OSError(cause, os.strerror(cause), str(path))
        return opened(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", read_only)
    again = train(tmp_path)
    assert again.exit_code == 0 and Path(again.stdout.strip()).is_dir(), again.stderr
    other = train(tmp_path, "seed=1")
    assert other.exit_code == 5
    assert other.stderr.rstrip().endswith("give another folder with --out")


def deepstack(*words: object, **environment: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "deepstack", *map(str, words)]
    return subprocess.run(command, capture_output=True, env=dict(os.environ, **environment))


def test_letters_that_a_terminal_or_a_path_lacks_stop_nothing(tmp_path: Path) -> None:
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    out = tmp_path / "\u00fcbung \u0394"
    trained = deepstack("train", QUICK, *TINY, "--out", out, **plain)
    assert trained.returncode == 0, trained.stderr.decode()
    run = only_run(out / "quick")
    assert run.meta["command"].startswith("deepstack train") and problems(run.folder) == []
    listed = deepstack("list", "diagnostics", PYTHONIOENCODING="latin-1:strict")
    assert listed.returncode == 0 and rb"\u2016x_l\u2016" in listed.stdout


@pytest.mark.parametrize(
    ("words", "name", "expected", "code"),
    [
        ("train", b"\xff\xfe", "not UTF-8", 2),
        pytest.param("sweep seed=0,1", b"\xff\xfe", "not UTF-8", 3, marks=pytest.mark.slow),
        ("train", b"x" * 300, "File name too long", 2),
        ("sweep seed=0,1", b"x" * 300, "File name too long", 2),
    ],
    ids=["train bytes", "sweep bytes", "train long", "sweep long"],
)
def test_a_path_that_cannot_be_is_refused_before_anything_is_trained(
    words: str,
    name: bytes,
    expected: str,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    out = os.fsdecode(os.fsencode(tmp_path) + b"/" + name)
    command, *settings = words.split()
    argv = ["deepstack", command, QUICK, *TINY, *settings, "-q", "--out", out]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit) as ended:
        main()
    said = capfd.readouterr().err
    assert ended.value.code == code and expected in said and "Traceback" not in said, said
    assert not [*tmp_path.glob("*/*/*/steps.csv")]


def test_weights_are_not_exported_as_those_of_another_model(tmp_path: Path) -> None:
    run = Path(train(tmp_path).stdout.strip())
    path = run / "config.yaml"
    for text in (path.read_text().replace("scheme: deepnorm", "scheme: post_ln"), ""):
        path.write_text(text)
        exported = typed("export", run, "--to", tmp_path / "x")
        assert exported.exit_code == 7 and "is another run's" in exported.stderr
        assert not (tmp_path / "x").exists()


def test_a_refusal_after_a_notice_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder(Path(train(tmp_path).stdout.strip()))
    meta = run.read_meta()
    meta["environment"]["threads"] = 7
    run.write_meta(meta)
    monkeypatch.setattr("deepstack.training.preflight.memory_limit", lambda _: 10**6)
    refused = typed("rerun", run.path, "--out", tmp_path / "new")
    assert refused.exit_code == 2 and "threads was 7" in refused.stderr
    assert not (tmp_path / "new").exists()
