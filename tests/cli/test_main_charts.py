"""The main charts of `plot`, and the commands that take one study of a results folder."""

import json
import os
import re
import shlex
import sys
from pathlib import Path

import pytest
from helpers import ROOT
from helpers.command_line import refusal, succeed, typed
from helpers.extensions import needs
from helpers.plot_runs import make_run, make_runs

import deepstack
from deepstack.plots import CHARTS
from deepstack.plots.chart import MOST_MAIN, chart, main_charts
from deepstack.runs import Runs

PUBLISHED = ROOT / "results/published"


def names(output: str) -> list[str]:
    """Return the names of the charts whose files a command has printed, in order."""
    files = (line.rpartition("\t")[2] for line in output.splitlines())
    return list(dict.fromkeys(Path(file).stem for file in files))


@needs("laws")
def test_a_study_has_five_main_charts_as_png_and_csv(tmp_path: Path) -> None:
    make_runs(tmp_path / "study", depth=(6, 18))
    study = tmp_path / "study"
    shown = typed("plot", study)
    assert shown.exit_code == 0, shown.stderr
    titles, figures = zip(*(line.split("\t") for line in shown.stdout.splitlines()), strict=True)
    assert titles[:2] == ("Final validation loss against depth", "Model update against depth")
    files = {
        path.with_suffix(kind) for path in map(Path, figures) for kind in (".png", ".csv", ".txt")
    }
    assert {Path(figure).suffix for figure in figures} == {".png"}
    assert names(shown.stdout) == [
        "final_loss_vs_depth", "update_vs_depth", "loss_vs_step", "update_vs_step", "outcomes",
    ]  # fmt: skip
    assert set((study / "figures").iterdir()) == files
    assert len(names(shown.stdout)) == MOST_MAIN
    line = "beside each: CSV of its values, TXT of its settings; ([0-9]+) more: --all; "
    counts = re.fullmatch(f"{line}([0-9]+) need other runs: --why", shown.stderr.strip())
    assert counts, shown.stderr
    more, needing = map(int, counts.groups())
    assert MOST_MAIN + more + needing == len(CHARTS)
    shown = typed("plot", study, "--to", tmp_path / "x y", "--format", "csv")
    assert str(tmp_path / "x y/update_vs_depth.csv") in shown.stdout
    assert shown.stderr.strip() == f"{more} more: --all; {needing} need other runs: --why"


@pytest.mark.slow
@pytest.mark.parametrize("study", sorted(path.name for path in PUBLISHED.iterdir()))
def test_a_published_study_prints_at_most_eight_lines(study: str, tmp_path: Path) -> None:
    shown = typed("plot", PUBLISHED / study, "--to", tmp_path / "main", "--format", "png,csv")
    lines = [*shown.stdout.splitlines(), *shown.stderr.splitlines()]
    assert len(lines) <= 8, lines
    for line in shown.stdout.splitlines():
        assert Path(line.split("\t")[1]).is_file()
    every = typed("plot", PUBLISHED / study, "--all", "--to", tmp_path / "all", "--format", "csv")
    drawn = {*names(every.stdout)}
    more = re.search("([0-9]+) more: --all; ([0-9]+) need other runs", shown.stderr)
    assert more and int(more[1]) == len(drawn) - MOST_MAIN
    assert int(more[2]) == len(CHARTS) - len(drawn)
    rows = succeed("plot", PUBLISHED / study, "--why").splitlines()
    assert {word for row in rows for word in row.split()[:1]} & {*CHARTS} == {*CHARTS} - drawn


def test_why_names_the_runs_that_a_chart_needs(tmp_path: Path) -> None:
    make_runs(tmp_path / "study", depth=(6, 18))
    shown = typed("plot", tmp_path / "study", "--why")
    (line,) = (one for one in shown.stdout.splitlines() if one.split()[:1] == ["frontier"])
    assert "needs finished runs of two learning rates at one depth" in line
    assert not (tmp_path / "study/figures").exists()
    message = refusal(2, "plot", "loss_vs_step", tmp_path, "--why")
    assert "--why: found beside the chart loss_vs_step" in message


@pytest.mark.slow
def test_the_main_charts_follow_the_settings_that_vary(tmp_path: Path) -> None:
    make_runs(tmp_path / "rates", depth=(6, 18), lr=(1e-3, 4e-3), seed=(0, 1))
    make_run(tmp_path / "one")
    rates = names(succeed("plot", tmp_path / "rates", "--format", "csv"))
    assert rates == [*main_charts()[:5]] and "loss_vs_lr" in rates
    one = names(succeed("plot", tmp_path / "one", "--format", "csv"))
    assert one[:2] == ["loss_vs_step", "update_vs_step"] and len(one) <= MOST_MAIN
    figures = deepstack.plot(Runs.below(tmp_path / "rates"), main=True)
    assert isinstance(figures, list) and len(figures) == MOST_MAIN


@pytest.mark.slow
def test_named_charts_and_all_have_every_format_and_study(tmp_path: Path) -> None:
    for study in ("one", "two"):
        make_runs(tmp_path / study, depth=(6, 18))
    shown = [Path(line) for line in succeed("plot", "loss_vs_step", tmp_path).splitlines()]
    assert {path.suffix for path in shown} == {".pdf", ".png", ".svg", ".csv", ".txt"}
    every = typed("plot", tmp_path, "--all", "--format", "csv")
    folders = {Path(line).parent.parent.name for line in every.stdout.splitlines()}
    assert folders == {"one", "two"} and len(names(every.stdout)) > MOST_MAIN
    assert "these runs do not allow" in every.stderr
    message = refusal(2, "plot", "loss_vs_step", tmp_path, "--all")
    assert "--all: found beside the chart loss_vs_step" in message


@needs("transfer")
def test_the_page_on_charts_lists_the_main_ones_in_their_order() -> None:
    page = (ROOT / "docs/charts.md").read_text(encoding="utf-8")
    listed = page.partition("The main charts are")[2].partition("Of a folder")[0]
    assert re.findall(r"`(\w+)`", listed) == main_charts()


def test_a_plugin_may_add_a_main_chart() -> None:
    before = main_charts()

    def draw(runs: Runs, *, options: object) -> None:
        """Nothing."""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CHARTS, "_objects", dict(CHARTS.items()))
        patch.setattr(
            sys.modules["deepstack.plots.chart"], "_MAIN", dict.fromkeys(before, 1) | {"last": 3}
        )
        chart("first_of_all", main=0)(draw)  # type: ignore[arg-type]
        assert main_charts() == ["first_of_all", *sorted(before), "last"]
        chart("first_of_all")(draw)  # type: ignore[arg-type]
        assert "first_of_all" not in main_charts()


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A results folder with three studies; the middle one by name has the newest run."""
    for number, study in enumerate(("c", "a", "b b")):
        for path in make_runs(tmp_path / study, seed=(0, 1)):
            meta = json.loads((path / "meta.json").read_text())
            created = f"2026-01-0{number + 1}T00:00:00Z"
            (path / "meta.json").write_text(json.dumps(meta | {"created": created}))
    os.utime(tmp_path / "c")  # dates of folders do not count
    return tmp_path


def test_plot_takes_the_newest_study_and_names_the_others(results: Path) -> None:
    shown = typed("plot", results, "--format", "csv")
    assert shown.exit_code == 0, shown.stderr
    files = [Path(line.split("\t")[1]) for line in shown.stdout.splitlines()]
    assert {file.parent.parent.name for file in files} == {"b b"}
    assert f"{results} has 3 studies; these charts are of the newest, b b; others: " in shown.stderr
    assert f"{results / 'a'}, {results / 'c'}\n" in shown.stderr


@pytest.mark.slow(turn=40)
@needs("answer")
def test_answer_lists_studies_with_the_command_for_each(results: Path) -> None:
    shown = typed("answer", results)
    assert shown.exit_code == 0, shown.stderr
    assert f"{results} has 3 studies; answer takes one" in shown.stderr
    rows = json.loads(succeed("answer", results, "--json"))
    assert [row["study"] for row in rows] == ["b b", "a", "c"]
    for row in rows:
        assert row["command"] in shown.stdout and row["runs"] == row["ended"] == 2
        program, *words = shlex.split(row["command"])
        assert program == "deepstack" and "Figure: " in succeed(*words)
    assert not (results / "answer").exists()
