"""Depths that a growing study adds get their settings from their neighbours, and say so."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import ROOT
from helpers.plot_runs import make_run

import deepstack
from deepstack.config import Study, load_study, parse_study
from deepstack.records import RunFolder
from deepstack.tools.answer.between import with_depth
from deepstack.tools.answer.looks import growing
from deepstack.tools.answer.sweep_option import lines_of
from deepstack.tools.answer.until import GrowingStudy

GRID = """
sweep:
  grid: {{model.scheme: [post_ln, deepnorm], model.depth: [6, 48], seed: [0, 1]}}
  overrides:
    - {{where: {{model.depth: 6}}, set: {{{at_6}}}}}
    - {{where: {{model.depth: 48}}, set: {{{at_48}}}}}
"""


def study_with(at_6: str, at_48: str, base: str = "train: {lr: 5e-4}") -> Study:
    return parse_study(base + GRID.format(at_6=at_6, at_48=at_48))


def settings_at(study: Study, depth: int, scheme: str = "post_ln") -> dict[str, Any]:
    """The settings that rules give to a run of this depth."""
    values = {"model.scheme": scheme, "model.depth": depth, "seed": 0}
    rules = with_depth(study, values).study.overrides
    matching = [one for one in rules if all(values.get(k) in v for k, v in one.where.items())]
    return {key: value for one in matching for key, value in one.settings.items()}


def test_numbers_are_interpolated_in_logarithms_and_equal_values_stay() -> None:
    study = study_with(
        "train.lr: 2.5e-3, train.steps: 100, train.clip: 1.0",
        "train.lr: 1e-3, train.steps: 400, train.clip: 1.0",
    )
    share = math.log(17 / 6) / math.log(48 / 6)
    made = settings_at(study, 17)
    assert made["train.lr"] == pytest.approx(2.5e-3 * (1e-3 / 2.5e-3) ** share, rel=5e-3)
    assert made["train.steps"] == round(100 * 4**share) and isinstance(made["train.steps"], int)
    assert made["train.clip"] == 1.0
    assert settings_at(study, 6)["train.lr"] == 2.5e-3  # a depth of the grid has its own rule


def test_a_depth_without_a_rule_counts_with_the_value_of_the_file() -> None:
    built_in = load_study(ROOT / "configs/depth_sweep.yaml")  # 48 layers 1e-3, 200 layers 5e-4
    values = {"model.scheme": "post_ln", "model.depth": 98}
    assert with_depth(built_in, values).settings == {"train.lr": 7.07e-4}
    assert with_depth(built_in, values | {"model.depth": 17}).settings == {"train.lr": 1.58e-3}


@pytest.mark.parametrize(
    ("at_6", "at_48", "reason"),
    [
        ("train.schedule: linear", "train.schedule: cosine", "linear at N = 6 and cosine at N ="),
        ("model.norm.kind: rms", "model.norm.eps: 1e-6", "model.norm."),
        ("train.warmup_steps: 0", "train.warmup_steps: 10", "0 at N = 6 and 10 at N = 48"),
        ("model.d_model: 64", "model.d_model: 96", "d_model"),  # 78 is no multiple of the heads
    ],
)
def test_other_values_refuse_the_depth_and_name_the_rule(
    at_6: str, at_48: str, reason: str
) -> None:
    base = "model: {d_model: 64, n_heads: 32}"
    study = study_with(at_6, at_48, base)
    between = with_depth(study, {"model.scheme": "post_ln", "model.depth": 17, "seed": 0})
    assert between.study is study and reason in between.refusal
    assert "N = 17 is not added" in between.refusal
    assert "{where: {model.depth: 17}, set: {" in between.refusal


class RecordedTraining:
    """Writes runs as training leaves them: Post-LN learns down to 20 layers, DeepNorm always."""

    def __init__(self, out: Path) -> None:
        self.order = SimpleNamespace(out=out, name="s")

    def train(self, study: Study, *, part: bool = False) -> list[Any]:
        return [self.entry(one.values, one.settings) for one in study.combinations()]

    def entry(self, values: dict[str, Any], settings: dict[str, Any]) -> Any:
        scheme, depth, seed = (values[key] for key in ("model.scheme", "model.depth", "seed"))
        learns = scheme == "deepnorm" or depth <= 20
        run = RunFolder(
            make_run(
                self.order.out / "s", scheme=scheme, depth=depth, seed=seed,
                lr=settings.get("train.lr", 5e-4),
                masked=(2.5 if learns else 3.4) + 0.001 * (seed % 5) * (1 + (scheme == "deepnorm")),
            )
        )  # fmt: skip
        cell = SimpleNamespace(folder=run, values=values)
        return SimpleNamespace(cell=cell, state="done")

    def finish(self, progress: Sequence[Any]) -> None:
        raise AssertionError("every run is done")


def rates(study: Path, depth: int) -> set[float]:
    files = study.glob(f"*-d{depth}-*/config.yaml")
    return {json.loads(file.read_text())["train"]["lr"] for file in files}


@pytest.mark.slow
def test_an_added_depth_is_trained_by_its_rule_and_named_in_the_sentence(tmp_path: Path) -> None:
    study = study_with("train.lr: 2.5e-3", "train.lr: 1e-3")
    training: Any = RecordedTraining(tmp_path)
    grown = GrowingStudy(study, training, growing(depths=True)).grow(None)
    assert rates(tmp_path / "s", 17) == {1.58e-3} and rates(tmp_path / "s", 6) == {2.5e-3}
    assert rates(tmp_path / "s", 29) == {1.25e-3}  # 29 is between 17 and 48; by the file's depths
    named = "train.lr = 0.00158 at N = 17 and train.lr = 0.00125 at N = 29"
    assert f"; interpolated between neighbouring depths: {named}." in grown.found.sentence
    page = deepstack.answer(tmp_path / "s")
    assert page.sentence == grown.found.sentence  # by until.json


def test_a_refused_depth_leaves_the_question_open(tmp_path: Path) -> None:
    study = study_with("train.schedule: linear", "train.schedule: cosine")
    training: Any = RecordedTraining(tmp_path)
    grown = GrowingStudy(study, training, growing(depths=True)).grow(None)
    assert not grown.found.decided and not list((tmp_path / "s").glob("*-d17-*"))
    lines = lines_of(grown, None, 64)
    assert lines[0].startswith("undecided after") and "N = 17 is not added" in " ".join(lines)
