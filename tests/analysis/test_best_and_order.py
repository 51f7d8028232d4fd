"""`best` and `sort` mean the same in tables, charts and comparisons."""

import json
from pathlib import Path

import pandas as pd
import pytest
from helpers.command_line import typed
from helpers.plot_runs import make_runs, without_layout

import deepstack
from deepstack.errors import ConfigError
from deepstack.records import find_runs

LOSSES = {("deepnorm", 1e-3): 2.5, ("deepnorm", 2e-3): 2.1,
          ("post_ln", 1e-3): 2.2, ("post_ln", 2e-3): 2.4}  # fmt: skip


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two schemes with two learning rates and two seeds; each scheme has another best rate."""
    out = tmp_path_factory.mktemp("results") / "study"
    make_runs(
        out, scheme=("deepnorm", "post_ln"), lr=(1e-3, 2e-3), seed=(0, 1),
        masked=lambda scheme, lr, seed: LOSSES[scheme, lr],
    )  # fmt: skip
    return out


def test_best_keeps_the_runs_that_compare_shows(study: Path, tmp_path: Path) -> None:
    compared = deepstack.compare(study, best=["lr"])
    expected = set(zip(compared["train.lr"], compared["val_loss"], strict=True))
    assert expected == {(2e-3, 2.1), (1e-3, 2.2)}
    table = deepstack.load_runs(study, best="lr", sort="-run")
    assert list(table["run"]) == sorted(table["run"], reverse=True) and len(table) == 4
    assert set(zip(table["train.lr"], table["val_loss_masked"], strict=True)) == expected
    listed = json.loads(typed("ls", study, "--best", "lr", "--sort", "-run", "--json").stdout)
    assert [row["run"] for row in listed] == list(table["run"])
    words = "--x", "depth", "--y", "val_loss_masked", "--to", tmp_path, "--format", "csv"
    assert typed("plot", "metric", study, "--best", "train.lr", *words).exit_code == 0
    assert set(pd.read_csv(tmp_path / "metric.csv")["y"]) == {2.1, 2.2}
    with pytest.raises(ConfigError, match="best: unknown key 'rl'"):
        deepstack.load_runs(study, best="rl")


def test_the_lines_of_a_chart_and_its_legend_have_the_order_of_sort(
    study: Path, tmp_path: Path
) -> None:
    by_loss = ["DeepNorm, lr\u00a00.002", "Post-LN, lr\u00a00.001"]
    by_loss += ["Post-LN, lr\u00a00.002", "DeepNorm, lr\u00a00.001"]
    for sort, expected in (("val_loss_masked", by_loss), ("-val_loss_masked", by_loss[::-1])):
        with without_layout():
            drawn = deepstack.plot(find_runs(study), "loss_vs_step", sort=sort)
        (legend,) = drawn.legends
        assert [text.get_text() for text in legend.get_texts()][:4] == expected
    words = ["--sort", "-scheme", "--x", "step", "--y", "loss", "--by", "scheme", "--format", "csv"]
    assert typed("plot", "metric", study, *words, "--to", tmp_path).exit_code == 0
    drawn = pd.read_csv(tmp_path / "metric.csv")
    assert list(drawn["series"].unique())[:2] == ["Post-LN", "DeepNorm"]
