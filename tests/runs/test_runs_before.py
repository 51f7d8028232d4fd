"""Runs that begin from others: which of them are seeds of one setting."""

import json
from pathlib import Path

import pytest
from helpers.small_runs import small

import deepstack
from deepstack.config import Config
from deepstack.records import Run
from deepstack.runs import Runs, further_commands

VALUES = {
    "task__name": "markov", "task__seq_len": 8, "task__states": 5, "model__scheme": "pre_ln",
    "model__depth": 4, "train__steps": 3,
}  # fmt: skip


def config_from(run: Run, **changes: object) -> Config:
    return small(**VALUES | {"model__start": str(run.path)} | changes)


def grown(way: str | None, seed: int, rate: float, out: Path) -> Run:
    """Return a run of 4 layers that grew from 1 over 2 layers, or that did not grow."""
    run: Run | None = None
    for depth in (1, 2, 4) if way else (4,):
        values = VALUES | {"model__depth": depth, "train__lr": rate, "seed": seed}
        if run is not None:
            values |= {"model__start": str(run.path), "model__grow": way}
        run = deepstack.train(small(**values), out=out / ("last" if depth == 4 else "before"))
    assert run is not None
    return run


@pytest.mark.slow
def test_seeds_of_a_grown_stack_are_one_setting(tmp_path: Path) -> None:
    for way in (None, "stack", "interleave"):
        for seed in (0, 1):
            for rate in (1e-3, 3e-3):
                grown(way, seed, rate, tmp_path)
    runs = Runs.below(tmp_path / "last")
    assert {key: len(one.at(4)) for one in runs.series(["train.lr"]) for key in [one.label]} == {
        "grow\u00a0none": 2, "grow\u00a0interleave": 2, "grow\u00a0stack": 2,
    }  # fmt: skip
    assert [(len(one.cell.tried), len(one.runs)) for one in runs.bests()] == [(2, 2)] * 3


@pytest.mark.slow
def test_a_run_and_its_fine_tuning_are_told_apart_by_what_came_before(tmp_path: Path) -> None:
    before, out = tmp_path / "before", tmp_path / "last"
    for seed in (0, 1):
        deepstack.train(small(**VALUES, seed=seed), out=out)
        for states in (5, 3):
            values = VALUES | {"task__states": states, "seed": seed}
            run = deepstack.train(small(**values), out=before, study=f"of_{states}")
            deepstack.train(config_from(run, seed=seed, task__states=5), out=out)
    anew, *fine_tuned = Runs.below(out).series()
    assert anew.label == "start\u00a0none" and len(anew.at(4)) == 2
    assert {(one.label, len(one.at(4))) for one in fine_tuned} == {
        ("start\u00a0of_3", 2), ("start\u00a0of_5", 2),
    }  # fmt: skip


def test_starts_of_other_seeds_are_settings(tmp_path: Path) -> None:
    for seed in (0, 1):
        run = deepstack.train(small(**VALUES, seed=seed), out=tmp_path / "before")
        deepstack.train(config_from(run, seed=7), out=tmp_path / "last")
    runs = Runs.below(tmp_path / "last")
    assert [len(one.runs) for one in runs.series()] == [1, 1]
    for run in runs:  # as an earlier version wrote it
        meta = json.loads((run.path / "meta.json").read_text())
        del meta["start"]["settings"]
        (run.path / "meta.json").write_text(json.dumps(meta))
    labels = [one.label for one in Runs.below(tmp_path / "last").series()]
    assert len(set(labels)) == 2 and all("before" in label for label in labels)


@pytest.mark.slow
def test_further_seeds_need_their_own_starts(tmp_path: Path) -> None:
    for seed in (0, 1):
        grown("stack", seed, 1e-3, tmp_path)
    grown_runs = Runs.below(tmp_path / "last")
    assert further_commands(grown_runs, seeds=[2]) == []
    fixed = [
        deepstack.train(config_from(run, seed=seed), out=tmp_path, study="tuned")
        for seed in (5, 6)
        for run in grown_runs
    ]
    commands = further_commands(fixed, seeds=[7])
    assert len(commands) == 1 and "seed=7" in commands[0]
    assert all(str(run.path) in commands[0] for run in grown_runs)


def test_another_way_with_one_start_does_not_split_the_seeds_of_the_first(tmp_path: Path) -> None:
    for seed in (0, 1):
        grown("stack", seed, 1e-3, tmp_path)
    before = Runs.below(tmp_path / "before")
    start = next(run for run in before if run.get("seed") == 0 and run.get("model.depth") == 2)
    for seed in (0, 1):
        config = config_from(start, seed=seed, train__lr=1e-3, model__grow="interleave")
        deepstack.train(config, out=tmp_path, study="last")
    assert [len(one.at(4)) for one in Runs.below(tmp_path / "last").series()] == [2, 2]
