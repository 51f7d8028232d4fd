"""The plan of a run: what `check`, the plan of a sweep and `train` share, before any folder."""

from pathlib import Path

import pytest
from helpers.small_runs import small

import deepstack
from deepstack import sweeps
from deepstack.base.errors import ConfigError
from deepstack.cli.check_command import facts_of
from deepstack.training import temporary_run
from deepstack.training.parts import parts_of
from deepstack.training.preflight import plan_run

ATTRIBUTES = 12  # the largest number of attributes of a run


def test_check_sweep_and_train_name_a_run_alike_and_need_as_much(tmp_path: Path) -> None:
    config = small()
    (cell,) = sweeps.plan(config, {"seed": [config.seed]}, study="runs", out=tmp_path)
    plan, facts = plan_run(config, None, tmp_path), facts_of(config)
    assert not list(tmp_path.iterdir()), "a plan writes nothing"
    assert facts["run"] == cell.folder.name == plan.name
    assert facts["memory estimate (MB)"] == round(cell.memory / 1e6) == round(plan.memory / 1e6)
    assert facts["FLOPs of the training"] == cell.flops == config.train.steps * plan.flops.step
    run = deepstack.train(config, out=tmp_path)
    assert run.path == cell.folder.path and run.meta["flops"]["step"] == plan.flops.step


def test_a_refused_plan_writes_nothing(tmp_path: Path) -> None:
    config = small(model__norm__kind="batch", train__micro_batches=2)
    with pytest.raises(ConfigError, match=r"model\.norm\.kind"):
        plan_run(config, None, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_run_has_few_attributes_and_only_the_parts_for_which_it_asks(tmp_path: Path) -> None:
    with temporary_run(small(), folder=tmp_path) as run:
        assert 5 < len(vars(run)) <= ATTRIBUTES, sorted(vars(run))
        assert not run.prepared.plan.parts
    asks = small(train__spectral_penalty=0.1, train__keep_weights=(1,))
    names = [type(part).__name__ for part in parts_of(plan_run(asks, None, tmp_path))]
    assert names == ["Penalty", "KeptWeights"]
