"""The chart `scatter`: two columns of `compare` against each other."""

from pathlib import Path

import numpy as np
import pytest
from helpers.command_line import refusal, succeed
from helpers.plot_runs import make_run, make_runs, without_layout
from matplotlib.colors import to_hex

import deepstack
from deepstack.base.errors import ConfigError, NothingMatchedError
from deepstack.plots.chart import Options
from deepstack.plots.scatter import scatter
from deepstack.plots.style import scheme_style
from deepstack.records import find_runs

LOSS = {("deepnorm", 6): 2.0, ("deepnorm", 48): 1.5, ("post_ln", 6): 2.2, ("post_ln", 48): 2.9}
SCHEMES = {"deepnorm": "DeepNorm", "post_ln": "Post-LN"}


@pytest.fixture
def study(tmp_path: Path) -> Path:
    make_runs(
        tmp_path / "study", scheme=(*SCHEMES,), depth=(6, 48), seed=(0, 1),
        masked=lambda scheme, depth, seed: LOSS[scheme, depth] + 0.1 * seed,
        updates=lambda scheme, depth, seed: [depth / 10 + seed, 7.0],
    )  # fmt: skip
    return tmp_path / "study"


def test_a_point_is_a_row_of_compare_in_the_colour_of_its_scheme(study: Path) -> None:
    chart = scatter(find_runs(study), "update_first", "val_loss", options=Options())
    for scheme, label in SCHEMES.items():
        points = chart.data[chart.data["series"] == label]
        at = {f"{label}, N = {N}": (N / 10 + 0.5, LOSS[scheme, N] + 0.05) for N in (6, 48)}
        assert points["mark"].str.replace("\u00a0", " ").tolist() == [*at]
        assert points[["x", "y"]].to_numpy() == pytest.approx(np.array([*at.values()]))
        assert points["n"].tolist() == [2, 2]
    axes = chart.figure.axes[0]
    colours = {to_hex(line.get_color()) for line in axes.lines if len(line.get_xdata())}
    assert colours == {to_hex(scheme_style(name)["color"]) for name in SCHEMES}
    assert all(line.get_linestyle() == "None" for line in axes.lines)
    assert (axes.get_xlabel(), axes.get_ylabel()) == (
        "‖ΔF‖ after the first step", "validation loss on [MASK] (nats)",
    )  # fmt: skip


def test_a_chart_of_another_loss_than_that_of_compare_says_which(
    study: Path, tmp_path: Path
) -> None:
    words = ["--x", "depth", "--y", "val_loss", "--to", tmp_path]
    succeed("plot", "metric", study, *words)
    (text,) = (path.read_text() for path in tmp_path.glob("*.txt"))
    assert "over all predicted positions; the loss on [MASK] is val_loss_masked" in text


def test_the_points_are_those_of_the_table(study: Path) -> None:
    table = deepstack.compare(study)
    chart = scatter(find_runs(study), "depth", "val_sd", options=Options())
    assert sorted(chart.data["x"]) == sorted(table["depth"].astype(float))
    assert sorted(chart.data["y"]) == pytest.approx(sorted(table["val_sd"]))


@pytest.mark.slow(turn=24)
def test_the_files_are_named_for_the_columns(study: Path) -> None:
    with without_layout():
        paths = succeed("plot", "scatter", study, "--x", "update_first", "--y", "val_loss").split()
    names = {Path(path).name for path in paths}
    kinds = ("pdf", "png", "svg", "csv", "txt")
    assert names == {f"scatter_val_loss_vs_update_first.{kind}" for kind in kinds}


def test_rows_without_a_value_are_left_out_and_counted(study: Path) -> None:
    make_run(study, scheme="pre_ln", depth=6, state="diverged")
    chart = scatter(find_runs(study), "update_first", "val_loss", options=Options())
    assert len(chart.data) == 4
    assert "left out: 1 row of compare without a value" in chart.caption


def test_other_columns_are_refused(study: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--y: unknown numeric column .* 'val_loss'"):
        scatter(find_runs(study), "depth", "val_los", options=Options())
    with pytest.raises(ConfigError, match="--x: unknown numeric column of compare 'setting'"):
        scatter(find_runs(study), "setting", "val_loss", options=Options())
    assert "plot scatter: needs --y" in refusal(2, "plot", "scatter", study, "--x", "depth")
    make_run(tmp_path / "other", seed=0)  # one seed: no interval
    with pytest.raises((ConfigError, NothingMatchedError), match="val_low"):
        scatter(find_runs(tmp_path / "other"), "depth", "val_low", options=Options())
