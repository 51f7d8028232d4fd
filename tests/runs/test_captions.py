"""Captions in plain words."""

from pathlib import Path

import pytest
from helpers.plot_runs import make_run

from deepstack.config.key import LR
from deepstack.runs.captions import follows_depth, settings_line
from deepstack.runs.runs import Runs


@pytest.mark.parametrize(
    ("depths", "text"),
    [
        ((6, 48), "lr 0.006, 0.048 at N 6, 48"),
        ((6, 12, 24, 48, 96), "lr 0.006 at N 6 to 0.096 at N 96"),
    ],
)
def test_a_caption_has_the_rate_of_each_depth(
    depths: tuple[int, ...], text: str, tmp_path: Path
) -> None:
    for depth in depths:
        make_run(tmp_path, depth=depth, lr=depth / 1000)
    runs = Runs.below(tmp_path)
    assert follows_depth(runs, LR) == text
    make_run(tmp_path, scheme="post_ln", depth=6, lr=0.1)
    assert follows_depth(Runs.below(tmp_path), LR) == "lr by N and setting"


def test_a_caption_leaves_out_what_a_run_lacks(tmp_path: Path) -> None:
    make_run(tmp_path, config={"model.d_model": None, "train.steps": None})
    line = settings_line(Runs.below(tmp_path)).replace("\u00a0", " ")
    assert line.startswith("lr ") and "None" not in line
