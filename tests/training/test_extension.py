"""A finished run goes on for more steps, as a new run that names its parent."""

import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from helpers.command_line import typed
from helpers.small_runs import data_of, interrupted, small, stop_at

import deepstack
from deepstack.errors import ConfigError, DifferenceError, Interrupted
from deepstack.records import Run, RunFolder, find_runs, problems
from deepstack.training import parent_of

# The parent ends at step 12; an evaluation and a record of every layer at its end belong to it.
STEPS = {"train__schedule": "constant", "train__eval_every": 5, "log__attribution_every": "log"}
QUICK: dict[str, Any] = {"log__attribution_every": 0, "log__layers_every": 0}


def parent_run(out: Path, **settings: Any) -> Run:
    return deepstack.train(small(**STEPS | settings, runtime__keep_optimizer=True), out=out)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A parent for tests of refusals and of what has begun."""
    return parent_run(tmp_path_factory.mktemp("parent"), **QUICK)


def extend(run: Run, steps: int, *overrides: str, **options: Any) -> Run:
    parent = parent_of(run.path, steps, overrides)
    return deepstack.train(parent.config, out=run.path.parents[1], parent=parent, **options)


MUON = {"train__optimizer": "muon", "model__dropout": 0.1, "train__schedule": "inverse_sqrt"}


@pytest.mark.parametrize(("settings", "is_interrupted"), [(MUON, False), ({}, True)], ids=str)
def test_an_extended_run_is_one_that_was_trained_at_once(
    settings: dict[str, Any], is_interrupted: bool, tmp_path: Path
) -> None:
    run = parent_run(tmp_path, **settings)
    before = data_of(run)
    if is_interrupted:
        with pytest.raises(Interrupted):
            extend(run, 8, stop=stop_at(3))
    longer = extend(run, 8)
    whole = deepstack.train(small(**STEPS | settings, train__steps=20), out=tmp_path / "whole")
    assert longer.path != run.path and longer.name == whole.name
    assert data_of(longer) == data_of(whole) and data_of(run) == before
    extends = longer.meta["extends"]
    assert (extends["run"], extends["step"], extends["exact"]) == (run.name, 12, True)
    assert len(longer.meta.get("resumed", [])) == is_interrupted
    assert longer.meta["created"] >= run.meta["created"]
    assert problems(longer.folder) == problems(run.folder) == []
    assert len(longer.timing) == 20
    checked = typed("rerun", longer.path, "--check")
    assert checked.exit_code == 0 and checked.stdout.startswith("identical: ")
    assert data_of(extend(longer, 2))["steps.csv"].startswith(before["steps.csv"])


def test_an_extension_keeps_the_fast_path_of_its_parent(finished: Run) -> None:
    with suppress(Interrupted):  # so many steps are replayed by default
        extend(finished, 200, stop=stop_at(1))
    (longer,) = (run for run in find_runs(finished.path.parent) if run.name != finished.name)
    replayed = [each.meta["environment"]["replayed"] for each in (finished, longer)]
    assert replayed == [False, False] and "environment_changed" not in longer.meta


def test_a_schedule_that_depends_on_the_steps_is_chosen(tmp_path: Path) -> None:
    run = parent_run(tmp_path, train__schedule="cosine", **QUICK)
    refused = typed("train", run.path, "--extend", 8, "--out", tmp_path)
    assert refused.exit_code == 2
    for text in (
        "train.schedule=cosine depends on the number of steps; choose",
        "train.schedule=cosine, that of 20 steps",
        "train.schedule=constant train.lr=RATE",
    ):
        assert text in refused.stderr
    words = ["train", run.path / "config.yaml", "--extend", 8, "--out", tmp_path, "-q"]
    choice = ["train.schedule=constant", "train.lr=0.0001"]
    longer = Run(typed(*words, *choice).stdout.strip())
    assert longer.path.parent == run.path.parent and not longer.meta["extends"]["exact"]
    assert longer.steps["lr"].tolist() == [*run.steps["lr"], *[0.0001] * 8]
    # The same command finds the run; the same config without a parent is another run.
    assert typed(*words, *choice).stdout.strip() == str(longer.path)
    alone = deepstack.train(deepstack.load_config(longer.path / "config.yaml"), out=tmp_path)
    assert alone.path.name == f"{longer.name}-2" and "extends" not in alone.meta
    again = typed("rerun", longer.path, "--check")
    assert again.exit_code == 2 and "under another schedule" in again.stderr
    assert not extend(run, 8, "train.schedule=cosine").meta["extends"]["exact"]


def test_runs_that_cannot_be_extended(finished: Run, tmp_path: Path) -> None:
    settings = STEPS | QUICK
    stopped = interrupted(small(**settings), tmp_path / "a")
    weights = deepstack.train(small(**settings), out=tmp_path / "b")
    diverged = deepstack.train(small(**settings, train__max_loss=0.1), out=tmp_path / "c")
    changed = RunFolder(shutil.copytree(finished.path, tmp_path / "d"))
    changed.evals_path.write_bytes(changed.evals_path.read_bytes().replace(b"5", b"6", 1))
    for path, steps, overrides, message in (
        (finished.path, 0, [], "found 0; allowed a number of further steps from 1 on"),
        (finished.path, 8, ["model.dropout=0.1"], r"found model\.dropout; an extension allows"),
        (finished.path, 8, ["train.steps=30"], r"found train\.steps; an extension allows"),
        (tmp_path / "nowhere", 8, [], "nowhere is no run"),
        (stopped.path, 8, [], "is interrupted; allowed a finished run"),
        (weights.path, 8, [], r"keeps only its weights.*runtime\.keep_optimizer=true"),
        (diverged.path, 8, [], "is diverged; allowed"),
        (changed.path, 8, [], r"is damaged: evals\.csv: changed"),
    ):
        with pytest.raises((ConfigError, DifferenceError), match=message):
            parent_of(path, steps, overrides)


def test_an_extension_on_other_data_or_in_another_environment_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "my.txt"
    text.write_text("one way " * 200)
    run = parent_run(tmp_path, task__name="text", task__path=str(text), **QUICK)
    with pytest.raises(ConfigError, match="begun in another environment: threads"):
        extend(run, 8, "runtime.threads=3")
    text.write_text("another " * 200)
    with pytest.raises(ConfigError, match="was trained on other data"):
        extend(run, 8)
    folders = [path for path in run.path.parent.iterdir() if RunFolder(path).exists()]
    assert folders == [run.path]


def test_an_attempt_that_was_killed_begins_again(tmp_path: Path) -> None:
    run = parent_run(tmp_path, **QUICK)
    parent = parent_of(run.path, 8)
    draft = RunFolder(tmp_path / "draft")
    parent.begin(draft, run.meta["data"])
    (draft.path / "config.yaml").unlink()
    name = extend(run, 8).name
    shutil.rmtree(run.path.parent / name)
    draft.path.rename(run.path.parent / name)
    longer = extend(run, 8)
    assert longer.name == name and longer.state == "done" and problems(longer.folder) == []
