"""`extends: NAME` in a file: the settings of an example below the file's own."""

from pathlib import Path

import pytest
import yaml
from helpers.command_line import refusal, succeed

from deepstack import config as conf
from deepstack.base.errors import ConfigError
from deepstack.config.load import example, example_paths

MINE = "extends: quick\nmodel: {scheme: post_ln}\ntrain: {lr: 5e-4, lr_factors: {head: 3}}\n"


def test_own_settings_count_over_the_examples() -> None:
    config, quick = conf.parse_config(MINE), conf.load_config(example("quick"))
    assert config.model.scheme == "post_ln" and config.train.lr == 5e-4
    assert (config.model.depth, config.task.seq_len) == (48, 16)
    assert config.train.steps == quick.train.steps == 200
    # a mapping that is no section is replaced as a whole
    assert config.train.lr_factors == {"head": 3.0} != quick.train.lr_factors
    changes = {"model.scheme": "post_ln", "train.lr": 5e-4, "train.lr_factors": {"head": 3.0}}
    assert config == conf.with_overrides(quick, changes)
    assert conf.parse_config("extends: quick\n") == quick


def test_another_length_replaces_the_examples_steps() -> None:
    config = conf.parse_config("extends: quick\ntrain: {tokens: 25600}\n")
    assert config.train.tokens == 25600 and "steps" not in config.train.model_fields_set


def test_overrides_count_over_both_and_the_written_config_names_no_example(tmp_path: Path) -> None:
    config = conf.parse_config(MINE, overrides=["train.lr=1e-2", "model.depth=2"])
    assert (config.train.lr, config.model.depth) == (1e-2, 2)
    assert "extends" not in yaml.safe_load(conf.to_yaml(config))
    (tmp_path / "mine.yaml").write_text(MINE)
    shown = succeed("check", tmp_path / "mine.yaml", "model.depth=2")
    assert "Post-LN" in shown


def test_a_study_may_extend_and_has_no_sweep_of_its_example() -> None:
    study = conf.parse_study("extends: quick\nsweep: {grid: {model.depth: [2, 4]}}\n")
    assert [dict(cell) for cell in study.cells()] == [{"model.depth": 2}, {"model.depth": 4}]
    assert study.base.model.d_model == 32
    for path in example_paths().values():
        alone = conf.parse_study(f"extends: {path.stem}\n")
        assert alone.size == 1 and alone.base.name is None


def test_mistakes_name_their_place() -> None:
    with pytest.raises(ConfigError, match=r"<string>:1:10: extends: unknown example 'quik'; did"):
        conf.parse_config("extends: quik\n")
    with pytest.raises(ConfigError, match=r"extends: unknown example"):
        conf.parse_config("extends: [quick]\n")
    with pytest.raises(ConfigError, match=r"<string>:2:9: model.shceme"):
        conf.parse_config("extends: quick\nmodel: {shceme: post_ln}\n")


def test_a_missing_word_is_refused_by_the_command(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("extends:\n")
    assert "extends: unknown example" in refusal(2, "check", tmp_path / "mine.yaml")


def test_editors_know_the_key() -> None:
    assert "extends" in conf.json_schema()["properties"]
