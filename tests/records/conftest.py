"""Trained runs that the tests of records copy."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.ended_runs import copied, train_three

from deepstack.records import RunFolder


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One that is done, one that diverged and one that was interrupted, once for all tests."""
    return train_three(tmp_path_factory.mktemp("runs"))


@pytest.fixture
def folder(trained: dict[str, Path], tmp_path: Path) -> RunFolder:
    """A copy of the run that is done, in the folder of the test."""
    return copied(trained["done"], tmp_path)


@pytest.fixture
def stopped(trained: dict[str, Path], tmp_path: Path) -> RunFolder:
    """A copy of the run that was interrupted, in the folder of the test."""
    return copied(trained["interrupted"], tmp_path)
