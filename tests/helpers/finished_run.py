"""A finished run, for the commands that read one."""

import shutil
from pathlib import Path

import pytest

from helpers import QUICK
from helpers.command_line import TINY, succeed


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, in which the test works."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that no test changes."""
    out = tmp_path_factory.mktemp("trained")
    return Path(succeed("train", QUICK, *TINY, "-q", "--out", out))


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of that run."""
    return Path(shutil.copytree(trained, tmp_path / "quick" / trained.name))
