"""A sweep's plan: what is expanded, counted and ordered before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest

import deepstack
from deepstack.config import Config, with_overrides
from deepstack.errors import ConfigError
from deepstack.model import build_model
from deepstack.schemes import SCHEMES
from deepstack.sweeps import default_workers, expand, plan
from deepstack.sweeps.plan import count_parameters

TINY = {
    "model.d_model": 8, "task.seq_len": 8, "train.batch_size": 2, "train.steps": 3,
    "train.eval_batches": 1, "log.probe_sequences": 1,
}  # fmt: skip
BASE = with_overrides(Config(), TINY)


def test_a_grid_is_every_combination_and_each_once() -> None:
    grid = {"model.depth": [1, 2, 2], "seed": [0, 1]}
    found = [(c.model.depth, c.seed) for c in expand(BASE, grid)]
    assert found == [(1, 0), (1, 1), (2, 0), (2, 1)]


@pytest.mark.parametrize(
    ("grid", "said"),
    [
        ({"model.depth": []}, "at least one"),
        ({"model.depht": [1]}, "depth"),
        ({"model.depth": [0]}, "model.depth"),
        ({"seed": list(range(1000)), "model.depth": list(range(1, 1001))}, "1,000,000 runs"),
    ],
)
def test_a_grid_that_cannot_be(grid: dict[str, list[int]], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        expand(BASE, grid)


def test_a_plan_is_cheap_first_and_knows_what_is_done(tmp_path: Path) -> None:
    grid = {"model.depth": [30, 2, 1], "seed": [0, 1]}
    deepstack.train(with_overrides(BASE, {"model.depth": 2}), study="s", out=tmp_path)
    cells = plan(BASE, grid, study="s", out=tmp_path)
    assert [c.config.model.depth for c in cells] == [1, 1, 2, 2, 30, 30]
    assert [c.state for c in cells] == ["new", "new", "done", "new", "new", "new"]
    assert default_workers(cells) >= 1


@pytest.mark.parametrize("scheme", SCHEMES.names())
@pytest.mark.parametrize("head", ["tied", "separate", "bert"])
def test_parameters_are_counted_exactly(scheme: str, head: str) -> None:
    config = with_overrides(BASE, {"model.scheme": scheme, "model.head": head, "model.depth": 13})
    counted = sum(build_model(config, vocab_size=31).banks.count().values())
    assert count_parameters(config, 31) == counted


def test_the_library_sweeps_and_reads_back(tmp_path: Path) -> None:
    runs = deepstack.sweep(BASE, {"model.depth": [1, 2]}, study="lib", out=tmp_path, workers=2)
    assert [run.state for run in runs] == ["done", "done"]
    table = deepstack.load_runs(tmp_path)
    assert list(table["model.depth"]) == [1, 2]
    assert table["model_update"].gt(0).all()
