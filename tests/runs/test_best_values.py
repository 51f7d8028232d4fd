"""The best value of a chosen setting, by the table of deepstack/runs/best.py, case by case."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.plot_runs import make_chart, make_run, rows

from deepstack.runs.best import bests_of, by_success
from deepstack.runs.outcomes import Result
from deepstack.runs.result_table import result_table

CHANCE = 3.2
LEARNT, AT_CHANCE = 2.6, 3.15
GONE = None  # a run that diverged


def seeds_of(
    rate: float, losses: Sequence[float | None], setting: str = "A", **more: Any
) -> list[Result]:
    return [
        Result(setting, setting, 6, rate, seed, "diverged" if loss is GONE else "done", loss,
               CHANCE)._replace(**more)
        for seed, loss in enumerate(losses)
    ]  # fmt: skip


# The losses of each rate's seeds, the best rate, and its edge.
CASES: dict[str, tuple[Mapping[float, Sequence[float | None]], float, str]] = {
    "the least mean": ({1e-3: [2.7, 2.7], 2e-3: [2.6, 2.7], 4e-3: [2.7, 2.8]}, 2e-3, ""),
    "all seeds learn, though others end lower": (
        {1e-3: [2.9, 2.9, 2.9], 2e-3: [2.3, 2.3, AT_CHANCE]}, 1e-3, "lowest"
    ),
    "a share of seeds and no number": (
        {1e-3: [2.5, 2.5, 2.5, AT_CHANCE], 2e-3: [2.9, 2.9]}, 2e-3, "highest"
    ),
    "a diverged seed is infinite": (
        {1e-3: [2.2, GONE], 2e-3: [2.9, AT_CHANCE]}, 2e-3, "highest"
    ),
    "the lowest of diverged rates": ({1e-3: [GONE], 2e-3: [GONE], 4e-3: [3.19]}, 4e-3, "highest"),
    "none learns": ({1e-3: [3.3, 3.2], 2e-3: [3.15, 3.16], 4e-3: [3.3, 3.4]}, 2e-3, ""),
    "of equal rates the smallest": ({4e-3: [2.6], 2e-3: [2.6], 1e-3: [2.7]}, 2e-3, ""),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_best_value_follows_the_rule(case: str) -> None:
    tried, best, edge = CASES[case]
    (found,) = bests_of(one for rate, losses in tried.items() for one in seeds_of(rate, losses))
    assert (found.value, found.edge) == (best, edge)


def test_losses_are_compared_by_their_distance_from_the_loss_without_context() -> None:
    """Of a task whose seeds are different texts, 3.3 is more below 4.2 than 2.5 below 3.2."""
    results = seeds_of(1e-3, [2.5, 2.5]) + seeds_of(2e-3, [3.3, 3.3], floor=4.2)
    assert bests_of(results)[0].value == 2e-3


def test_of_two_runs_of_one_seed_the_last_counts() -> None:
    first, last = seeds_of(1e-3, [2.3, 2.3]), seeds_of(1e-3, [2.9, 2.9])
    other = seeds_of(2e-3, [2.6, 2.6])
    assert bests_of(first + other + last)[0].value == 2e-3
    assert bests_of(last + other + first)[0].value == 1e-3


def test_a_run_that_goes_on_counts_neither_for_nor_against_its_value() -> None:
    goes_on = seeds_of(1e-3, [None, None, AT_CHANCE], state="running")
    results = [*goes_on, *seeds_of(1e-3, [2.5, 2.6]), *seeds_of(2e-3, [2.7, 2.7, 2.7])]
    assert bests_of(results)[0].value == 1e-3


def test_settings_are_ordered_by_their_losses_and_lost_seeds_come_last() -> None:
    """As in the comparison of losses, which no setting with a diverged seed enters."""
    results = [
        *seeds_of(1e-3, [2.0, 2.0, GONE], "lost a seed"),
        *seeds_of(1e-3, [2.5, 2.4, AT_CHANCE], "two learn"),
        *seeds_of(1e-3, [2.9, 2.9, 2.9], "three learn"),
        *seeds_of(1e-3, [GONE, GONE, GONE], "lost all"),
    ]
    order = [one.label for one in by_success(bests_of(results))]
    assert order == ["two learn", "three learn", "lost a seed", "lost all"]


# --- several runs of one seed ---------------------------------------------------------------------


@pytest.mark.parametrize("later", ["failed", "done"])
def test_a_point_has_one_run_of_each_seed_the_last_that_ended(later: str, tmp_path: Path) -> None:
    """Two runs of seed 0 differ in the interval of their measurements alone."""
    study = tmp_path / "s"
    for depth in (6, 12):
        make_run(study, depth=depth, seed=0, masked=2.0, updates=[2.0])
        make_run(study, depth=depth, seed=1, masked=2.4, updates=[2.4])
        again = make_run(
            tmp_path / f"more{depth}", depth=depth, seed=0, masked=3.0, updates=[3.0], state=later,
            config={"log.layers_every": 5},
        )  # fmt: skip
        again.rename(study / f"{again.name}-again")
    mean = (2.0 + 2.4) / 2 if later == "failed" else (3.0 + 2.4) / 2
    for name in ("final_loss_vs_depth", "update_vs_depth"):
        points = rows(make_chart(name, study), kind="point")
        assert points["n"].tolist() == [2, 2]
        assert points["y"].tolist() == pytest.approx([mean, mean]), name


def test_a_cell_of_the_table_has_one_run_of_each_seed_the_last_that_ended() -> None:
    first, last = seeds_of(1e-3, [2.5, 2.7]), seeds_of(1e-3, [2.9])
    stopped = seeds_of(1e-3, [None], state="interrupted")
    for results, cell in (
        (first + last, ["2.800 ± 0.141, n 2"]),
        (last + first, ["2.600 ± 0.141, n 2"]),
        (first + stopped, ["2.600 ± 0.141, n 2"]),
        (stopped + first, ["2.600 ± 0.141, n 2"]),
    ):
        assert result_table(results) == [{"validation loss": "A", "N = 6": cell}]
