"""Trained runs that the tests of records copy."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.ended_runs import train_three


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One that is done, one that diverged and one that was interrupted, once for all tests."""
    return train_three(tmp_path_factory.mktemp("runs"))
