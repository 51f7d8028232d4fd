"""experiments/redraw.py: every listed figure shows the values of the CSV that git tracks."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from helpers import ROOT
from helpers.extensions import needs

EXPERIMENTS = ROOT / "experiments"
pytestmark = needs("attribution", "coordinates", "transfer")  # whose names redraw.py uses


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
    """Return the listed figures that are drawn from `csv` files, from `runs` or by a `script`."""
    import yaml

    entries = yaml.safe_load((EXPERIMENTS / "figures.yaml").read_text(encoding="utf-8"))
    source = {name: next((one for one in ("runs", "script") if one in entry), "csv")
              for name, entry in entries.items()}  # fmt: skip
    return [name for name in entries if source[name] == word]


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


@pytest.mark.slow
@pytest.mark.parametrize("name", figures("script"))
def test_a_script_draws_its_figure_from_what_git_tracks(name: str, tmp_path: Path) -> None:
    copy = tmp_path / "experiments"
    shutil.copytree(EXPERIMENTS, copy)
    tables = {path: path.read_text() for path in (copy / name).parent.parent.rglob("*.csv")}
    (picture := copy / f"{name}.png").unlink()
    command = [sys.executable, copy / "redraw.py", name]
    environment = os.environ | {"MPLBACKEND": "agg", "PYTHONPATH": str(ROOT)}
    subprocess.run(command, check=True, cwd=tmp_path, env=environment, capture_output=True)
    assert picture.stat().st_size > 10_000
    assert {path: path.read_text() for path in tables} == tables


def test_a_changed_value_or_row_is_a_difference(redraw: Any, tmp_path: Path) -> None:
    name = "one_sgd_step/figures/update_vs_depth"
    chart, rows = redraw.draw(name), pd.read_csv(EXPERIMENTS / f"{name}.csv")
    changed = rows.copy()
    changed.loc[1, "y"] *= 1.001
    for number, table in enumerate((changed, rows.drop(index=1), rows.iloc[::-1])):
        table.to_csv(path := tmp_path / f"{number}.csv", index=False)
        assert redraw.differs(chart, path) == (number < 2)


def test_every_figure_of_an_experiment_is_listed() -> None:
    listed = {*figures("csv"), *figures("runs"), *figures("script")}
    drawn = {path.relative_to(EXPERIMENTS).with_suffix("").as_posix()
             for path in EXPERIMENTS.glob("*/figures*/*.png")}  # fmt: skip
    assert drawn == listed


def test_each_listed_figure_and_its_text_are_tracked() -> None:
    for name in (*figures("csv"), *figures("runs")):
        for kind in ("png", "csv", "txt"):
            assert (EXPERIMENTS / f"{name}.{kind}").is_file(), f"{name}.{kind}"
    for name in figures("script"):
        assert (EXPERIMENTS / f"{name}.png").is_file(), name
