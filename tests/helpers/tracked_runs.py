"""Two runs whose logs trackers get, and what their readers must find."""

from itertools import islice
from typing import Any

import numpy as np
import pytest

import deepstack
from deepstack.config import parse_config
from deepstack.plots.tracked import heat_map_images
from deepstack.records import Run
from deepstack.runs.tracked import scalars
from helpers.command_line import TINY
from helpers.extensions import known_words


def settings(*more: str) -> Any:
    usual = ["model.depth=3", "train.steps=12", "train.eval_every=4"]
    usual += known_words(["log.attribution_every=6"])
    return parse_config("", overrides=[*TINY, *usual, *more])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """A run that is done, and one that diverged."""
    out = tmp_path_factory.mktemp("runs")
    done = deepstack.train(settings(), study="study", out=out)
    diverged = deepstack.train(settings("train.max_loss=1e-3", "seed=1"), study="study", out=out)
    assert diverged.state == "diverged"
    return {"done": done, "diverged": diverged}


def pictured(run: Run) -> set[str]:
    """The keys of the pictures that a run gets: its diagnostics with a value."""
    names = run.layer_names()
    return {f"layers/{name}" for name in names if np.isfinite(run.layers(name)[1]).any()}


def first_pictures(run: Run) -> dict[str, bytes]:
    """The first two pictures by key: drawing all of them takes seconds."""
    return {key: png for key, _, png in islice(heat_map_images(run), 2)}


def assert_logged(read: dict[int, dict[str, Any]], run: Run) -> None:
    """The rows by step have every value of the run."""
    for step, values in scalars(run):
        found = {key: float(read[step][key]) for key in values}
        assert found == pytest.approx(values, rel=1e-6, nan_ok=True)


def by_key(run: Run) -> dict[str, dict[int, float]]:
    """The values of a run: key -> step -> value."""
    logged: dict[str, dict[int, float]] = {}
    for step, values in scalars(run):
        for key, value in values.items():
            logged.setdefault(key, {})[step] = value
    return logged
