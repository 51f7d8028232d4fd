"""experiments/rate_choice.py: the rates that the scripts of experiments train."""

import runpy
import sys
from importlib import import_module
from typing import Any

import pytest
from helpers import ROOT

from deepstack.runs.best import Best, bests_of
from deepstack.runs.outcomes import Result

EXPERIMENTS = ROOT / "experiments"


@pytest.fixture
def rate_choice(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(EXPERIMENTS)
    return import_module("rate_choice")


def bests(losses: dict[float, float], name: str = "A") -> list[Best]:
    """Return the best rate of a setting with a seed at each rate; losses: by rate."""
    return bests_of(Result(name, name, 16, rate, 10, "done", x, None) for rate, x in losses.items())


def test_a_best_rate_at_the_edge_asks_for_the_next_one(rate_choice: Any) -> None:
    def next_rate(losses: dict[float, float]) -> float | None:
        (best,) = bests(losses)
        rate: float | None = rate_choice.next_rate(best)
        return rate

    assert next_rate({2e-3: 3.0, 4e-3: 2.0, 8e-3: 2.5}) is None
    assert next_rate({2e-3: 1.0, 4e-3: 2.0, 8e-3: 2.5}) == 1e-3
    assert next_rate({2e-3: 3.0, 4e-3: 2.0, 8e-3: 1.0}) == 1.6e-2
    assert next_rate({5e-4: 1.0, 1e-3: 2.0}) is None
    assert next_rate({1.6e-2: 2.0, 3.2e-2: 1.0}) is None


def test_rates_are_added_until_no_best_one_is_at_an_edge(
    rate_choice: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run is here a pair of cell and rate; its loss is the distance of the rate from an optimum.

    The optimum of A is inside of the rates; that of B is two doublings beyond them.
    """
    optima = {"A": 4e-3, "B": 3e-2}
    trained: list[dict[str, float]] = []

    def train(rates: dict[str, float]) -> list[tuple[str, float]]:
        trained.append(rates)
        return list(rates.items())

    def end(run: tuple[str, float], cell: str) -> Result:
        loss = abs(run[1] - optima[run[0]])
        return Result(cell, cell, 16, run[1], 10, "done", loss, None, run=run)  # type: ignore[arg-type]

    monkeypatch.setattr(rate_choice, "result_of", end)
    chosen = rate_choice.choose_rates(optima, (2e-3, 4e-3, 8e-3), train, lambda run: run[0])
    assert {cell: best.value for cell, best in chosen.items()} == {"A": 4e-3, "B": 3.2e-2}
    first = [{"A": rate, "B": rate} for rate in (2e-3, 4e-3, 8e-3)]
    assert trained == [*first, {"B": 1.6e-2}, {"B": 3.2e-2}]


@pytest.mark.parametrize("name", ["depth_at_equal_parameters", "desk_against_400m", "grown_depth"])
def test_a_script_that_chooses_rates_starts(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = EXPERIMENTS / name / "run.py"
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    monkeypatch.syspath_prepend(path.parent)
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(path), run_name="__main__")
    assert end.value.code == 0 and "--workers" in capsys.readouterr().out
