"""Captions in plain words."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.plot_runs import make_run

from deepstack.config.key import LR
from deepstack.runs.captions import follows_depth, seeds_note, settings_line, sides_note, title_of
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


@pytest.mark.parametrize(
    ("counts", "note"), [({1, 3}, "n = 1 to 3"), ({1}, ""), ({2}, "n = 2"), (set(), "")]
)
def test_the_legend_names_the_numbers_of_seeds_if_some_have_several(
    counts: set[int], note: str
) -> None:
    assert seeds_note(counts) == note


@pytest.mark.parametrize(("encoders", "start"), [((6,), "layers 1 to 6"), ((6, 12), "the first")])
def test_a_note_names_the_layers_of_the_encoder(encoders: tuple[int, ...], start: str) -> None:
    stacks = [{"stacks": {"encoder": n, "decoder": 6}} for n in encoders]
    runs: Any = [SimpleNamespace(columns=columns) for columns in stacks]
    assert sides_note(runs)[0].startswith(start)


def test_a_title_names_four_schemes_and_counts_five(tmp_path: Path) -> None:
    names = ("deepnorm", "post_ln", "pre_ln", "rezero", "admin")
    for scheme in names[:4]:
        make_run(tmp_path, scheme=scheme)
    runs = Runs.below(tmp_path)
    assert title_of(runs, runs.series()).startswith("DeepNorm, Post-LN, Pre-LN, ReZero on")
    make_run(tmp_path, scheme=names[4])
    runs = Runs.below(tmp_path)
    assert title_of(runs, runs.series()).startswith("5 schemes on")
