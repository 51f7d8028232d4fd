"""Trained runs that the tests of records copy."""

from pathlib import Path

import pytest
from helpers.ended_runs import TINY, copied
from helpers.small_runs import interrupted

import deepstack
from deepstack.config import Config, with_overrides
from deepstack.records import RunFolder


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run that is done, one that diverged and one interrupted after four of six steps."""
    out, config = tmp_path_factory.mktemp("runs"), with_overrides(Config(), TINY)
    done = deepstack.train(config, study="done", out=out)
    bound = {"train.max_loss": float(done.steps["loss"][2:].max() - 1e-3)}
    diverged = deepstack.train(with_overrides(config, bound), study="diverged", out=out)
    assert diverged.state == "diverged" and len(diverged.steps) < 6
    stopped = interrupted(config, out, 4, "stopped")
    return {"done": done.path, "diverged": diverged.path, "interrupted": stopped.path}


@pytest.fixture
def folder(trained: dict[str, Path], tmp_path: Path) -> RunFolder:
    """A copy of the run that is done, in the folder of the test."""
    return copied(trained["done"], tmp_path)


@pytest.fixture
def stopped(trained: dict[str, Path], tmp_path: Path) -> RunFolder:
    """A copy of the run that was interrupted, in the folder of the test."""
    return copied(trained["interrupted"], tmp_path)
