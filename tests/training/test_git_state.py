"""The recorded commit is the commit of deepstack's source, or none."""

import os
import subprocess
from pathlib import Path

import pytest

from deepstack.training.environment import git_state


def repository(folder: Path, text: str) -> str:
    """Make a repository with one file and return its commit."""
    folder.mkdir()
    (folder / "file").write_text(text)
    names = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", text]):
        subprocess.run(["git", *names, *words], cwd=folder, check=True)
    shown = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=folder, check=True, capture_output=True
    )
    return shown.stdout.decode().strip()


def test_variables_of_a_hook_do_not_replace_the_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, other, none = tmp_path / "own", tmp_path / "other", tmp_path / "none"
    commit = repository(own, "own")
    assert repository(other, "other") != commit
    none.mkdir()
    clean = {"commit": commit, "dirty": False}
    for variables in (
        {},
        {"GIT_DIR": other / ".git"},
        {"GIT_DIR": other / ".git", "GIT_WORK_TREE": own, "GIT_INDEX_FILE": other / ".git/index"},
        {"GIT_DIR": ".git", "GIT_PREFIX": "x/"},
    ):
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))
        assert git_state(own) == clean
        assert git_state(none) == {}
    (own / "file").write_text("changed")
    assert git_state(own) == clean | {"dirty": True}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a folder away")
def test_a_checkout_of_another_owner_has_its_commit(tmp_path: Path) -> None:
    commit = repository(tmp_path / "own", "own")
    for path in [tmp_path / "own", *(tmp_path / "own").rglob("*")]:
        os.chown(path, 12345, 12345)
    assert git_state(tmp_path / "own") == {"commit": commit, "dirty": False}
