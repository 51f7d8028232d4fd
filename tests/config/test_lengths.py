"""The length of a run: exactly one of steps, tokens and FLOPs."""

from pathlib import Path

import pytest
from helpers.small_runs import SMALL, data_of, interrupted, small

import deepstack
from deepstack import config as conf
from deepstack.errors import ConfigError
from deepstack.model import with_steps
from deepstack.schemes import scheme_flops
from deepstack.sweeps import plan
from deepstack.training import parent_of

FLOPS = conf.step_flops(small(), 257, scheme_flops(small())).step
TOKENS = SMALL["train.batch_size"] * SMALL["task.seq_len"]


@pytest.mark.parametrize(
    ("key", "value"), [("train.tokens", 12 * TOKENS + 31), ("train.flops", 11.6 * FLOPS)]
)
def test_a_budget_is_the_run_of_its_steps(tmp_path: Path, key: str, value: float) -> None:
    config = small(train__eval_every=5, runtime__keep_optimizer=True, train__schedule="constant")
    run = deepstack.train(config, out=tmp_path / "steps")
    budget = conf.with_overrides(config, {key: value})
    interrupted(budget, tmp_path / "budget")
    same = deepstack.train(budget, out=tmp_path / "budget")
    assert (same.name, data_of(same)) == (run.name, data_of(run))
    assert same.get("train.steps") == 12 and same.get(key) is None
    assert parent_of(same.path, 3).config.train.steps == 15


def test_a_later_length_replaces_those_of_the_file() -> None:
    text = "train: {steps: 9, warmup_steps: 2}"
    config = conf.parse_config(text, overrides=["train.tokens=4000", "train.flops=1e9"])
    assert (config.train.tokens, config.train.flops, config.train.warmup_steps) == (None, 1e9, 2)
    assert conf.parse_config(conf.to_yaml(config)) == config
    assert conf.with_overrides(config, {"seed": 1}).train.flops == 1e9
    again = conf.with_overrides(config, {"train.steps": 7}).train
    assert (again.steps, again.flops) == (7, None)
    sweep = f"{text}\nsweep: {{grid: {{train.steps: [2, 4], model.depth: [1, 2]}}}}"
    study = conf.parse_study(sweep, overrides=["train.flops=1e9,2e9"])
    assert study.keys == ["model.depth", "train.flops"] and study.size == 4
    assert conf.parse_study(sweep, overrides=["train.tokens=9"]).keys == ["model.depth"]


def test_overrides_of_a_sweep_set_no_other_length() -> None:
    rule = "overrides: [{where: {seed: 1}, set: {train.steps: 9}}]"
    study = conf.parse_study(f"sweep: {{grid: {{seed: [0, 1]}}, {rule}}}", "f", ["train.tokens=9"])
    assert [cell.overridden for cell in study.combinations()] == [{}, {}]
    with pytest.raises(ConfigError, match=r"'train\.steps', which the sweep varies"):
        conf.parse_study(f"sweep: {{grid: {{seed: [0, 1], train.tokens: [1, 2]}}, {rule}}}")


def test_each_cell_of_a_sweep_has_its_own_steps(tmp_path: Path) -> None:
    grid = {"train.flops": [1e8, 4e8], "model.depth": (1, 2, 4)}
    cells = plan(small(), grid, study="s", out=tmp_path)
    assert len(cells) == 6
    for cell in cells:
        a_step = cell.flops / cell.config.train.steps
        assert abs(cell.flops - cell.values["train.flops"]) <= a_step / 2
        assert not cell.config.train.has_budget


def test_a_budget_below_a_step_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"train.flops: found 1, \S+ steps of") as caught:
        with_steps(small(train__flops=1.0))
    assert caught.value.key == "train.flops"
