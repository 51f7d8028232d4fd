"""experiments/redraw.py: every listed figure shows the values of the CSV that git tracks."""

import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from helpers import ROOT
from helpers.extensions import needs

EXPERIMENTS = ROOT / "experiments"
pytestmark = needs("coordinates", "transfer")  # whose names redraw.py uses


@pytest.fixture(scope="module")
def redraw() -> Any:
    """The script as a module."""
    sys.path.insert(0, str(EXPERIMENTS))
    try:
        import redraw

        return redraw
    finally:
        sys.path.remove(str(EXPERIMENTS))


def figures(word: str) -> list[str]:
    """Return the listed figures that are drawn from `csv` files, or from `runs`."""
    import yaml

    entries = yaml.safe_load((EXPERIMENTS / "figures.yaml").read_text(encoding="utf-8"))
    return [name for name, entry in entries.items() if ("runs" in entry) == (word == "runs")]


@pytest.mark.slow
@pytest.mark.parametrize("name", figures("csv"))
def test_a_figure_shows_the_rows_of_its_csv(name: str, redraw: Any) -> None:
    chart = redraw.draw(name)
    assert not redraw.differs(chart, EXPERIMENTS / f"{name}.csv")
    assert chart.figure.axes and chart.caption.startswith(chart.title)


@pytest.mark.slow
@pytest.mark.parametrize("name", figures("runs"))
def test_a_figure_of_published_runs_has_the_tracked_values(name: str, redraw: Any) -> None:
    assert not redraw.differs(redraw.draw(name), EXPERIMENTS / f"{name}.csv")


def test_a_changed_value_or_row_is_a_difference(redraw: Any, tmp_path: Path) -> None:
    name = "one_sgd_step/figures/update_vs_depth"
    chart, rows = redraw.draw(name), pd.read_csv(EXPERIMENTS / f"{name}.csv")
    changed = rows.copy()
    changed.loc[1, "y"] *= 1.001
    for number, table in enumerate((changed, rows.drop(index=1), rows.iloc[::-1])):
        table.to_csv(path := tmp_path / f"{number}.csv", index=False)
        assert redraw.differs(chart, path) == (number < 2)


def test_each_listed_figure_and_its_text_are_tracked() -> None:
    for name in (*figures("csv"), *figures("runs")):
        for kind in ("png", "csv", "txt"):
            assert (EXPERIMENTS / f"{name}.{kind}").is_file(), f"{name}.{kind}"
