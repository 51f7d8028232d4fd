"""Sweep files: zipped keys, cells left out or overridden; every YAML that the project ships."""

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
from helpers import ROOT
from helpers.extensions import needs_settings_of

from deepstack import config as conf
from deepstack.base.errors import ConfigError
from deepstack.config import load_config, load_study, parse_study, with_overrides
from deepstack.config.load import example
from deepstack.model import build_model
from deepstack.schemes import stack_positions
from deepstack.sweeps import expand
from deepstack.tasks import task_of

STUDY = """
model: {d_model: 32}
sweep:
  grid:
    model.scheme: [post_ln, deepnorm]
    seed: [0, 1]
  zip:
    model.depth: [6, 48, 200]
    train.lr: [1e-3, 5e-4, 1e-4]
  exclude:
    - {model.scheme: post_ln, model.depth: [48, 200]}
  overrides:
    - where: {model.depth: [48, 200]}
      set: {train.batch_size: 8}
    - where: {model.depth: 200}
      set: {train.batch_size: 4, runtime.recompute_every: 10}
"""


def cells(text: str, *overrides: str) -> list[tuple[Any, ...]]:
    """(scheme, depth, lr, batch_size, seed) of every run."""
    made = expand(parse_study(text, "f.yaml", overrides))
    return [(c.model.scheme, c.model.depth, c.train.lr, c.train.batch_size, c.seed) for c in made]


def test_zip_exclude_and_overrides_give_the_cells() -> None:
    rows = {6: (1e-3, 16), 48: (5e-4, 8), 200: (1e-4, 4)}
    product = itertools.product(["post_ln", "deepnorm"], [0, 1], rows)
    wanted = [(s, d, *rows[d], seed) for s, seed, d in product if s != "post_ln" or d == 6]
    assert cells(STUDY) == wanted
    study = parse_study(STUDY)
    assert study.size == 8 and study.total == 12
    assert study.keys == ["model.scheme", "seed", "model.depth", "train.lr"]
    every = {c.model.depth: c.runtime.recompute_every for c in expand(study)}
    assert every == {6: "auto", 48: "auto", 200: 10}


def test_several_zips_are_factors_of_the_product() -> None:
    study = parse_study(
        "sweep: {zip: [{model.depth: [1, 2], train.lr: [1e-3, 1e-4]}, "
        "{model.d_model: [32, 64], model.n_heads: [1, 2]}]}"
    )
    found = [(c.model.depth, c.train.lr, c.model.d_model, c.model.n_heads) for c in expand(study)]
    assert found == [(1, 1e-3, 32, 1), (1, 1e-3, 64, 2), (2, 1e-4, 32, 1), (2, 1e-4, 64, 2)]


def test_the_command_line_fixes_a_zipped_key_and_replaces_its_values() -> None:
    fixed = cells(STUDY, "model.depth=6")
    assert len(fixed) == 12
    assert {row[1:3] for row in fixed} == {(6, 1e-3), (6, 5e-4), (6, 1e-4)}
    # the rules still know the depth that was fixed
    assert {row[0] for row in cells(STUDY, "model.depth=48")} == {"deepnorm"}
    both = cells(STUDY, "model.depth=6,12", "train.lr=1,2")
    assert {row[1:3] for row in both} == {(6, 1), (12, 2)} and len(both) == 8
    with pytest.raises(ConfigError, match=r"f.yaml:9:5: sweep.zip.train.lr: found 3 values; allow"):
        cells(STUDY, "model.depth=6,12")


def test_the_command_line_wins_over_overrides() -> None:
    assert {row[3] for row in cells(STUDY, "train.batch_size=2")} == {2}
    assert {row[3] for row in cells(STUDY, "train.batch_size=2,3")} == {2, 3}
    assert len(cells(STUDY, "model.scheme=pre_ln")) == 6  # what would be excluded is not swept
    assert len(cells(STUDY, "model.scheme=pre_ln,post_ln")) == 8


def test_values_are_compared_as_numbers_lists_and_words() -> None:
    grid = "sweep:\n  grid: {train.clip: [1.0, 0.5, null], "
    grid += "train.betas: [[0.9, 0.98], [0.9, 0.95]], task.flag: [true, false]}\n"
    for rule, left_out in (
        ("train.clip: 1, train.betas: [0.9, 0.98]", 2),
        ("train.clip: [null, 0.5], task.flag: true", 4),
        ("train.betas: [[0.9, 0.98], [0.9, 0.95]], task.flag: false", 6),
    ):
        study = parse_study(f"{grid}  exclude: [{{{rule}}}]")
        assert study.total - study.size == left_out


def test_mistakes_in_all_parts_of_a_sweep_are_reported_together() -> None:
    text = "sweep:\n  grid: {model.depth: [0], seed: 3}\n  zip: {seed: [1]}\n"
    text += "  exclude: [{}]\n  overrides: [{where: {}, sett: {}}]\n  extra: 1\n"
    with pytest.raises(ConfigError) as error:
        parse_study(text)
    places = re.findall(r"^<string>:(\S+): ", str(error.value), re.MULTILINE)
    assert places == ["2:34", "3:8", "4:13", "5:15", "5:23", "5:27", "6:3"]


def test_an_invalid_cell_is_named_unless_it_is_excluded() -> None:
    keys = "{model.family: [encoder, encoder_decoder], model.decoder_depth: [null, 3]}"
    assert parse_study(f"sweep: {{zip: {keys}}}").size == 2
    with pytest.raises(ConfigError, match=r"in the run of model.d_model=30, model.n_heads=4: .*"):
        expand(parse_study("sweep: {grid: {model.d_model: [32, 30], model.n_heads: [2, 4]}}"))
    wide = "sweep: {grid: {model.d_model: [4096, 2], model.depth: [2, 100000]}"
    with pytest.raises(ConfigError, match=r"in the run of .*: found 100000, a run of about"):
        expand(parse_study(wide + "}"))
    left = ", exclude: [{model.d_model: 4096, model.depth: 100000}]}"
    assert len(expand(parse_study(wide + left))) == 3


def test_the_file_of_init_becomes_a_sweep_when_its_last_lines_are_uncommented() -> None:
    text = conf.annotated_defaults("schema.json")
    assert conf.parse_config(text).model.depth == 48
    study = parse_study(text.replace("\n#| ", "\n"))
    assert study.zips and study.exclude and study.overrides and 1 < study.size < study.total


def test_the_examples_of_the_manual_are_sweep_files() -> None:
    manual = (ROOT / "docs" / "sweeps.md").read_text(encoding="utf-8")
    blocks = [block.split("```")[0] for block in manual.split("```yaml\n")[1:]]
    assert blocks and all(parse_study(block).size > 1 for block in blocks)
    parts = conf.json_schema()["$defs"]["Sweep"]["properties"]  # for editors
    assert list(parts) == ["grid", "zip", "exclude", "overrides"]


# --- every shipped YAML is loaded and built; example and built-in study are found -----------------


FILES = sorted([*ROOT.glob("configs/*.yaml"), *ROOT.glob("experiments/*/*.yaml")])


def test_the_promised_examples_are_there() -> None:
    names = {"quick", "deepnorm_1000", "deepnorm_1000_gpu", "post_ln_1000", "pre_ln_1000"}
    names |= {"depth_sweep", "text_file", "bench_narrow", "bench_wide", "modern_48"}
    assert names <= {path.stem for path in FILES}


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(
            path,
            marks=[needs_settings_of(path), *([pytest.mark.slow(turn=at)] if at % 6 else [])],
            id=f"{path.parent.name}/{path.name}",
        )
        for at, path in enumerate(FILES)
    ],
)
def test_every_yaml_is_loaded_and_built(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # text_file.yaml names a file of the checkout
    study = load_study(path)  # a configuration is a study of one run
    configs = expand(study)
    assert len(configs) == study.size and bool(study.keys) == (study.size > 1)
    vocab = task_of(configs[0]).vocab_size
    assert all(config.model.depth >= 2 for config in configs)
    for each in {
        c.model.scheme: c for c in configs
    }.values():  # few layers are built in the same way
        loop: dict[str, Any] = dict.fromkeys(("model.prelude_layers", "model.coda_layers"), 0)
        config = with_overrides(each, {"model.depth": 2, "model.unique_layers": None, **loop})
        counts = build_model(config, vocab_size=vocab, device="meta").banks.count()
        layers = sum(place.depth for place in stack_positions(config.model).values())
        assert counts["w1"] == layers * config.model.d_model * (config.model.d_ff or 0)


def test_the_three_1000_layer_configs_differ_in_their_scheme_alone() -> None:
    deepnorm = load_config(example("deepnorm_1000"))
    for scheme in ("deepnorm", "post_ln", "pre_ln"):
        same_but_scheme = with_overrides(deepnorm, {"model.scheme": scheme})
        assert load_config(example(f"{scheme}_1000")) == same_but_scheme
    # the built-in study has the same settings
    assert deepnorm in expand(load_study(example("depth_sweep")))
