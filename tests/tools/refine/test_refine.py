"""`sweep --refine`: the grid grows until the best value lies inside, then halves."""

import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
from helpers import QUICK, small_runs
from helpers.command_line import TINY, refusal, typed
from helpers.extensions import needs

import deepstack
from deepstack.base.errors import ConfigError
from deepstack.config import Override, Study
from deepstack.records import Run, find_runs
from deepstack.sweeps import Cell, Launcher
from deepstack.tools.refine.search import (
    FEWEST,
    MOST,
    Search,
    count_runs,
    failure,
    mean_loss,
    refine,
    settings_of,
    start_of,
)

MATRICES = ("q", "k", "v", "o", "w1", "w2")
# Learning rates and updates need neither evaluations nor records of layers.
small = partial(small_runs.small, train__eval_every=0, log__layers_every=0)


class Actor:
    """A process that has ended, or that waits for a signal."""

    def __init__(self, code: int | None) -> None:
        self.code = code

    def poll(self) -> int | None:
        return self.code

    def send_signal(self, number: int) -> None:
        self.code = 128 + number

    def stderr_text(self) -> str:
        return ""


class Here(Launcher):
    """Trains in this process.  hangs: whether runs at the study's rate only wait."""

    hangs = False
    budgets: ClassVar[list[int | None]] = []

    def __init__(
        self, cells: Sequence[Cell], name: str, out: Path, workers: int, *, budget: int | None
    ) -> None:
        self.name, self.out = name, out
        self.budgets.append(budget)

    def start(self, cell: Cell) -> Actor:
        if self.hangs and cell.config.train.lr == 2e-3:
            return Actor(None)
        deepstack.train(cell.config, study=self.name, out=self.out)
        return Actor(0)

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepstack.tools.refine.search.sweep", small_runs.sweep_here)
    monkeypatch.setattr("deepstack.sweeps.Local", Here)
    monkeypatch.setattr("deepstack.sweeps.pool.POLL_SECONDS", 0.001)


def search_for(loss: Callable[[float], float], limit: int = MOST) -> Search:
    """Return a search that has ended.  loss: of a value."""
    search = Search(1.0, 1.26, limit)
    while wanted := search.wanted():
        search.losses |= {i: loss(search.value(i)) for i in wanted}
        search.failures |= {i: (0.0, search.losses[i]) for i in wanted}
    return search


@pytest.mark.parametrize("best", [0.01, 0.3, 1.0, 1.7, 30.0])
def test_the_best_value_lies_inside_and_within_the_tolerance(best: float) -> None:
    optimum = search_for(lambda value: math.log(value / best) ** 2).optimum({})
    assert optimum.settled
    assert optimum.value == pytest.approx(best, rel=0.13)  # half of the final ratio
    assert optimum.loss == min(optimum.losses.values())


def test_a_search_leaves_values_that_diverge_and_ends_at_its_limit() -> None:
    optimum = search_for(lambda value: -value if value < 0.02 else math.inf).optimum({})
    assert optimum.settled
    assert optimum.value == pytest.approx(0.02, rel=0.26)
    search = search_for(lambda value: -value, limit=9)
    assert len(search.failures) == 9 and not search.optimum({}).settled
    assert search_for(lambda value: math.inf).optimum({}).value is None


@pytest.mark.parametrize("losses", [[3.0, 2.0], [2.0, 3.0], [3.0, 2.0, 4.0]])
def test_a_best_value_lies_inside_with_both_neighbours_only(losses: list[float]) -> None:
    search = Search(1.0, 1.26, MOST)
    search.losses |= dict(enumerate(losses))
    search.failures |= {i: (0.0, loss) for i, loss in search.losses.items()}
    assert search.optimum({}).settled is (len(losses) == 3)


@pytest.mark.parametrize(
    ("grid", "zips", "starts"),
    [
        ({}, (), [0.01, 0.01]),
        ({"train.lr": [3e-3, 1e-3, 0.5]}, (), [3e-3, 3e-3]),
        ({"train.lr": [0.1]}, (), [0.1, 0.1]),
        ({}, ({"model.depth": [1, 2], "train.lr": [1e-1, 5e-2]},), [1e-1, 5e-2]),
    ],
)
def test_a_search_begins_at_the_middle_of_the_given_values(
    grid: dict[str, list[Any]], zips: Any, starts: list[float]
) -> None:
    base = small_runs.small(train__lr=1e-2)
    depths = {} if zips else {"model.depth": [1, 2]}
    study = Study(base, depths | grid, zips)
    settings = settings_of(study, "train.lr")
    assert settings == [{"model.depth": 1}, {"model.depth": 2}]
    assert [start_of(study, "train.lr", one) for one in settings] == starts


@pytest.mark.slow
def test_rates_are_found_for_each_depth_and_reported_by_other_seeds(tmp_path: Path) -> None:
    quick = small_runs.small(train__lr=1e-2, train__steps=4, log__layers_every=0)
    study = Study(quick, {"model.depth": [1, 2], "seed": [7, 8]})
    optima = refine(study, "train.lr", max_runs=20, select_seeds=[0], name="r", out=tmp_path)
    assert [one.setting for one in optima] == [{"model.depth": 1}, {"model.depth": 2}]
    chosen = find_runs(tmp_path / "r")
    assert len(chosen) == sum(len(one.losses) for one in optima)
    assert {run.get("seed") for run in chosen} == {0}
    reported = find_runs(tmp_path / "r_reported")
    assert {(run.get("model.depth"), run.get("train.lr"), run.get("seed")) for run in reported} == {
        (depth, one.value, seed)
        for depth, one in zip((1, 2), optima, strict=True)
        for seed in (7, 8)
    }
    for one in optima:
        here = [run for run in reported if run.get("model.depth") == one.setting["model.depth"]]
        assert one.reported == pytest.approx(mean_loss(here)) and one.reported != one.loss
    again = refine(study, "train.lr", max_runs=20, select_seeds=[0], name="r", out=tmp_path)
    assert again == optima


def test_a_run_that_failed_after_an_evaluation_has_no_loss(tmp_path: Path) -> None:
    run = deepstack.train(small(), out=tmp_path)
    assert math.isfinite(failure([run])[1])
    for state in ("failed", "diverged"):
        run.folder.write_status(state, int(run.steps["step"].iloc[-1]))
        assert failure([Run(run.path)])[1] == math.inf
        assert failure([run, Run(run.path)])[1] == math.inf, "one seed of two"
    assert failure([])[1] == math.inf


@pytest.mark.slow(turn=52)
def test_the_losses_are_those_of_the_runs_and_no_rule_sets_the_value(tmp_path: Path) -> None:
    """Losses are not counted from the unigram, and an override of the key is left out."""
    rule = Override({"model.depth": [2]}, {"train.lr": 1e-2, "train.clip": 0.5})
    quick = small_runs.small(train__steps=4, log__layers_every=0)
    study = Study(quick, {"model.depth": [1, 2], "seed": [0]}, overrides=(rule,))
    for one in refine(study, "lr", max_runs=20, name="r", out=tmp_path):
        depth = one.setting["model.depth"]
        runs = [run for run in find_runs(tmp_path / "r") if run.get("model.depth") == depth]
        assert {run.get("train.clip") for run in runs} == {0.5 if depth == 2 else quick.train.clip}
        ends = {run.get("train.lr"): float(run.evals["loss_masked"].iloc[-1]) for run in runs}
        assert one.losses == pytest.approx(ends) and len(ends) == len(one.losses) >= FEWEST
        assert one.loss == min(ends.values())


def test_the_number_of_runs_is_known_before() -> None:
    study = Study(small(), {"model.depth": [2, 3], "train.lr": [1e-3]})
    assert count_runs(study, "train.lr", [0, 1], None) == (FEWEST * 4, MOST * 4)
    assert count_runs(study, "train.lr", [0], 20) == (FEWEST * 2, 20)
    with pytest.raises(ConfigError, match=f"--max-runs: found 3; allowed {FEWEST * 2} or more"):
        count_runs(study, "train.lr", [0], 3)


def test_the_command_prints_the_best_rate_of_each_depth(tmp_path: Path) -> None:
    words = ["sweep", QUICK, *TINY, "--depths", "1,2", "--refine", "train.lr", "--json"]
    result = typed(*words, "--max-runs", "14", "--out", tmp_path, "--quiet")
    assert result.exit_code == 0, result.stderr
    rows = json.loads(result.stdout)
    assert [row["model.depth"] for row in rows] == [1, 2]
    assert all(row["tried"] == FEWEST and row["train.lr"] > 0 for row in rows)


def test_the_command_counts_before_it_runs(tmp_path: Path) -> None:
    words = ["sweep", QUICK, "--depths", "1,2", "--refine", "train.lr", "--out", tmp_path]
    result = typed(*words, "--dry-run", "--json")
    counts = json.loads(result.stdout)[0]
    assert counts == {"least number of runs": 2 * FEWEST, "largest number of runs": 2 * MOST}
    assert not list(tmp_path.iterdir())
    for word in ("train.lrr", "lrr"):
        assert "did you mean 'train.lr'" in typed(*words[:-3], word, "--dry-run").stderr


@pytest.mark.parametrize("key", ["model.scheme", "model.bias", "train.weight_decay"])
def test_only_a_positive_number_can_be_refined(key: str) -> None:
    with pytest.raises(
        ConfigError, match="allowed a setting that is a positive number with decimals"
    ):
        refine(small(), key)


def searched(out: Path, *words: object) -> tuple[int, dict[str, Any] | None, str]:
    """Return the exit code of a search at one depth, its row, and its stderr."""
    whole = ["sweep", QUICK, *TINY, "--refine", "train.lr", "--max-runs", FEWEST, "--json"]
    done = typed(*whole, "--out", out, *words)
    return done.exit_code, json.loads(done.stdout)[0] if done.stdout else None, done.stderr


@pytest.mark.slow
def test_a_run_over_its_time_has_no_loss_and_retry_runs_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Here, "hangs", True)
    for words in (["--run-timeout", 0.01], []):
        code, row, text = searched(tmp_path, *words)
        assert code == 3 and row is not None and row["train.lr"] not in (None, 2e-3)
        assert ("took longer than --run-timeout, 0.01 s" in text) is bool(words)
    assert text.rstrip().endswith("to run them again: --retry failed")
    monkeypatch.setattr(Here, "hangs", False)
    assert searched(tmp_path, "--retry", "failed")[0] == 0
    assert {run.state for run in find_runs(tmp_path)} == {"done"}


@pytest.mark.slow
def test_a_search_keeps_to_its_memory_and_hours_and_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Here, "budgets", [])
    code, row, text = searched(tmp_path, "--max-hours", 0)
    assert (code, row) == (3, None) and "--max-hours are over" in text
    assert not list(tmp_path.glob("*/*/status.json"))
    code, row, text = searched(tmp_path, "--memory", "3GB")
    assert code == 0 and row is not None and row["tried"] == FEWEST
    assert set(Here.budgets[1:]) == {3 * 10**9}


@needs("answer")
def test_a_search_trains_alone() -> None:
    words = ["sweep", QUICK, "--refine", "train.lr", "--seeds", "0,1"]
    assert "found --refine and --until" in refusal(2, *words, "--until", "decided")
    assert "--tolerance: found without --refine" in refusal(2, "sweep", QUICK, "--tolerance", "2")
