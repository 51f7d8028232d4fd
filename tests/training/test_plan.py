"""The plan of a run: what `check`, the plan of a sweep and `train` share, before any folder."""

import json
from pathlib import Path

import pytest
from helpers.command_line import TINY, refusal, succeed, typed
from helpers.extensions import needs
from helpers.small_runs import small

import deepstack
from deepstack import config as conf
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


COMMANDS = [["train"], ["check"], ["sweep"], ["sweep", "--dry-run"]]


def words_for(command: list[str], out: Path, *settings: str) -> list[str]:
    to = [] if command == ["check"] else ["--out", str(out)]
    return [command[0], "quick", *TINY, *settings, *to, *command[1:]]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_starting_point_that_is_missing_is_refused_before_any_run(
    command: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    message = refusal(2, *words_for(command, out, f"model.start={tmp_path / 'no'}"))
    assert "model.start: " in message and str(tmp_path / "no") in message
    assert not out.exists()


@needs("tensorboard")
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_tracker_that_is_not_installed_is_refused_before_any_run(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deepstack.runs.trackers.find_spec", lambda name: None)
    message = refusal(2, *words_for(command, tmp_path / "out", "log.to=[tensorboard]"))
    assert "log.to: tensorboard needs the package tensorboard" in message
    assert not (tmp_path / "out").exists()


@needs("slurm")
def test_a_plan_for_another_machine_does_not_ask_for_its_runs_and_packages(
    tmp_path: Path,
) -> None:
    words = words_for(["sweep", "--dry-run", "--slurm"], tmp_path, "model.start=/on/the/node")
    assert typed(*words).exit_code == 0


def test_a_sweep_names_the_run_whose_starting_point_is_missing(tmp_path: Path) -> None:
    starts = [None, str(tmp_path / "no")]
    with pytest.raises(ConfigError, match=r"in the run of model\.start=.*no: model\.start: "):
        deepstack.sweep(small(train__steps=1), {"model.start": starts}, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@needs("tensorboard")
def test_a_finished_run_needs_no_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepstack.runs.trackers.find_spec", lambda name: None)
    config = small(train__steps=1)
    done = deepstack.train(config, out=tmp_path, study="s")
    tracked = conf.with_overrides(config, {"log.to": ["tensorboard"]})
    seeds = {"seed": [config.seed]}
    assert [r.path for r in deepstack.sweep(tracked, seeds, out=tmp_path, study="s")] == [done.path]


def test_a_plan_says_that_its_device_is_not_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a plan all the same: for another machine."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    gpu = "runtime.device=cuda"
    (facts,) = json.loads(succeed("check", "quick", *TINY, gpu, "--json"))
    assert facts["device"] == "cuda, not on this machine: train refuses to start here"
    (facts,) = json.loads(succeed("check", "quick", *TINY, "--json"))
    assert "device" not in facts
    planned = typed(*words_for(["sweep", "--dry-run"], tmp_path, gpu))
    assert planned.exit_code == 0 and planned.stdout
    assert "cuda is not on this machine: no run starts here" in planned.stderr
    for command in ("train", "sweep"):
        assert "torch sees no GPU here" in refusal(5, *words_for([command], tmp_path / "out", gpu))
    assert not list(tmp_path.glob("out/*/*/config.yaml"))
