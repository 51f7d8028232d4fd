"""model.parameters: the width at which the layers' matrices have a number of parameters."""

import math
from pathlib import Path
from typing import Any

import pytest
from helpers.command_line import typed
from helpers.small_runs import small

import deepstack
from deepstack import config as conf
from deepstack.base.errors import ConfigError
from deepstack.config.width import nearest_width, parameters_at
from deepstack.model import build_model
from deepstack.sweeps import expand, plan

WANTED = 200_000
STACKS: dict[str, dict[str, Any]] = {
    "encoder": {},
    "decoder": {"family": "decoder", "gated": True, "bias": False},
    "fixed d_ff": {"d_ff": 100},
    "groups of heads": {"n_heads": 4, "n_kv_heads": 2},
    "rotary": {"n_heads": 3, "positions": "rotary"},
    "two stacks": {"family": "encoder_decoder", "decoder_depth": 3},
    "merged": {"family": "encoder_decoder", "decoder_attention": "merged", "scheme": "post_ln"},
    "average": {"family": "encoder_decoder", "decoder_attention": "average"},
    "looped": {"depth": 8, "prelude_layers": 1, "coda_layers": 1, "unique_layers": 3},
    "two loops": {"family": "encoder_decoder", "depth": 4, "unique_layers": 2},
    "hyper-connections": {"scheme": "hyper_connections"},
}
MATRICES = "q k v o w1 w2 w3 cross_q cross_k cross_v cross_o".split()


def sized(settings: dict[str, Any]) -> conf.Config:
    """The configuration with these settings of the model, and all others at their defaults."""
    return conf.with_overrides(conf.Config(), {f"model.{k}": v for k, v in settings.items()})


def built(settings: dict[str, Any], width: int) -> int:
    """The numbers in the matrices of the layers of a model of that width, which is built."""
    config = sized({**settings, "d_model": width})
    banks = build_model(config, vocab_size=7, device="meta").banks.count()
    return sum(banks.get(role, 0) for role in MATRICES)


@pytest.mark.parametrize("name", STACKS)
def test_no_other_width_of_a_built_model_is_nearer(name: str) -> None:
    settings = STACKS[name]
    width = sized({**settings, "parameters": WANTED}).model.d_model
    step = settings.get("n_heads", 2) * (2 if settings.get("positions") == "rotary" else 1)
    assert width % step == 0
    away = {w: abs(built(settings, w) - WANTED) for w in (width - step, width, width + step)}
    assert min(away, key=lambda w: away[w]) == width, away
    assert away[width] <= 0.1 * WANTED, away


@pytest.mark.parametrize(("depth", "width"), [(4, 128), (16, 64), (64, 32)])
def test_twelve_squares_a_layer(depth: int, width: int) -> None:
    model = sized({"depth": depth, "parameters": 4 * 12 * 128**2}).model
    assert (model.d_model, model.d_ff) == (width, 4 * width)


def test_the_width_follows_the_depth_until_it_is_given() -> None:
    config = sized({"parameters": WANTED, "d_ff": None, "n_heads": 3})
    deeper = conf.with_overrides(config, {"model.depth": 24}).model
    assert deeper.d_ff == 4 * deeper.d_model and deeper.d_model % 3 == 0
    assert deeper.d_model < config.model.d_model
    assert conf.parse_config(conf.to_yaml(config)) == config
    fixed = conf.with_overrides(config, {"model.d_model": 30, "model.depth": 24}).model
    assert (fixed.d_model, fixed.parameters) == (30, None)
    text = "model: {d_model: 30, n_heads: 3}"
    assert conf.parse_config(text, overrides=["model.parameters=30000"]).model.parameters == 30_000


def test_a_run_is_that_of_its_width(tmp_path: Path) -> None:
    wanted = conf.with_overrides(small(), {"model.parameters": 8_000, "model.depth": 2})
    width = wanted.model.d_model
    by_width = small(model__d_model=width, model__depth=2)
    first = deepstack.train(wanted, out=tmp_path)
    assert first.name == deepstack.train(by_width, out=tmp_path).name
    assert first.get("model.parameters") is None and first.get("model.d_model") == width


def test_numbers_that_no_width_has_are_refused_with_the_nearest_ones() -> None:
    with pytest.raises(ConfigError) as caught:
        sized({"depth": 64, "n_heads": 4, "parameters": 30_000})
    text = str(caught.value)
    for width in (4, 8):
        count = built({"depth": 64, "n_heads": 4}, width)
        assert abs(count - 30_000) > 3_000 and f"{count:,} (d_model={width})" in text, text
    with pytest.raises(ConfigError, match="allowed one of d_model, parameters"):
        conf.parse_config("model: {d_model: 8, parameters: 900}")


def test_a_study_takes_numbers_as_an_axis(tmp_path: Path) -> None:
    text = """
model: {d_model: 8}
sweep:
  grid: {model.depth: [2, 8], model.parameters: [20000, 80000]}
  overrides: [{where: {model.depth: 8}, set: {train.lr: 1e-4}}]
"""
    study = conf.parse_study(text)
    configs = expand(study)
    assert [one.model.parameters for one in configs] == [None] * 4
    assert [one.model.d_model for one in configs] == [
        2 * round(math.sqrt(n / 12 / depth) / 2) for depth in (2, 8) for n in (20_000, 80_000)
    ]
    for cell in plan(study, study="s", out=tmp_path):
        assert cell.overridden["model.d_model"] == cell.config.model.d_model
    widths = "sweep: {grid: {model.d_model: [8, 16], model.depth: [2, 8]}}"
    assert conf.parse_study(widths, overrides=["model.parameters=900,3000"]).keys == [
        "model.depth", "model.parameters",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match=r"model\.depth=8, .*the nearest are"):
        expand(conf.parse_study(text, overrides=["model.parameters=20000,1600", "model.n_heads=4"]))


def test_a_sweep_says_the_widths_and_their_numbers(tmp_path: Path) -> None:
    words = "sweep", "--params", "20k", "--depths", "2,8", "--schemes", "pre_ln", "model.d_ff=null"
    plain = typed(*words, "model.n_heads=2", "--dry-run", "--out", tmp_path)
    assert plain.exit_code == 0, plain.output
    texts = [f"N = {n}: d_model {d} ({built({'depth': n}, d):,})" for n, d in ((2, 28), (8, 14))]
    assert f"widths by model.parameters: {', '.join(texts)}" in plain.stderr
    assert "28*" in plain.stdout and "14*" in plain.stdout
    both = typed(*words, "--widths", "8", "--dry-run")
    assert both.exit_code == 2 and "allowed one of them" in both.stderr
    checked = typed("check", "quick", "model.parameters=20000", "model.depth=2")
    width = conf.load_config("quick", ["model.parameters=20000", "model.depth=2"]).model.d_model
    assert f" {built({'depth': 2, 'n_heads': 1}, width):,}\n" in checked.stdout


def test_one_number_of_parameters_is_checked_at_the_depths_of_the_sweep_alone() -> None:
    """At 48 layers no width has 5,000; the file's own depth is not swept."""
    text = "model: {depth: 48, d_model: 16, n_heads: 2}"
    settings = ["model.depth=2,4", "model.parameters=5000"]
    study = conf.parse_study(text, overrides=settings)
    found = {one.model.depth: one.model.d_model for one in expand(study)}
    assert found == {2: 14, 4: 10}
    with pytest.raises(ConfigError, match="at 48 layers"):
        expand(conf.parse_study(text, overrides=settings[1:]))


@pytest.mark.parametrize(("positions", "step"), [("learned", 2), ("rotary", 4)])
def test_a_width_of_rotary_positions_has_even_heads(positions: str, step: int) -> None:
    model = small(model__positions=positions, model__n_heads=2, model__depth=2).model
    for wanted in (20_000, 50_000, 100_000):
        width = nearest_width(model, wanted)
        assert width % step == 0
        odd = [parameters_at(model, width + sign * step) for sign in (-1, 1)]
        here = parameters_at(model, width)
        assert all(abs(here - wanted) <= abs(other - wanted) for other in odd)
