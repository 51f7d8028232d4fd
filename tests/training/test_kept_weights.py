"""Weights along the way: kept at chosen steps, analysed and exported by step."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from helpers.command_line import refusal, typed
from helpers.extensions import needs
from helpers.plot_runs import make_chart, rows
from helpers.sampling import some
from helpers.small_runs import interrupted, logs_of, small
from safetensors.torch import load_file

import deepstack
from deepstack.base.errors import ConfigError, NothingMatchedError, ResourceError
from deepstack.config import config_hash, disk_estimate, with_overrides
from deepstack.records import problems
from deepstack.training import load_trained


def kept_files(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in path.glob("weights/*/*.safetensors")}


@pytest.mark.slow(turn=44)
def test_weights_are_kept_once_and_survive_a_resume(tmp_path: Path) -> None:
    config = small(train__keep_weights=[0, 3, 5, 12], model__depth=1)
    run = deepstack.train(config, out=tmp_path / "once")
    assert run.folder.kept_steps() == [0, 3, 5], "the checkpoint has the weights of the last step"
    assert run.folder.checkpoints() == [12] and problems(run.folder) == []
    begun = interrupted(config, tmp_path / "twice", at=4)
    assert begun.kept_steps() == [0, 3] and problems(begun) == []
    first = (begun.kept_path(3) / "weights.safetensors").stat().st_mtime_ns
    again = deepstack.train(config, out=tmp_path / "twice")
    assert (again.folder.kept_path(3) / "weights.safetensors").stat().st_mtime_ns == first
    assert kept_files(again.path) == kept_files(run.path) and len(kept_files(run.path)) == 3
    shorter = with_overrides(config, {"train.keep_weights": 0, "train.steps": 5})
    shorter = with_overrides(shorter, {"train.schedule": "constant"})
    longer = with_overrides(config, {"train.schedule": "constant"})
    five, twelve = (deepstack.train(c, out=tmp_path / "c") for c in (shorter, longer))
    weights = load_file(five.folder.checkpoint_path(5) / "weights.safetensors")
    kept = load_file(twelve.folder.kept_path(5) / "weights.safetensors")
    assert all(kept[name].equal(value) for name, value in weights.items())


def test_damaged_weights_and_other_steps_are_refused_by_name(tmp_path: Path) -> None:
    run = deepstack.train(
        small(train__keep_weights=5, train__steps=6, model__depth=1), out=tmp_path
    )
    assert run.folder.kept_steps() == [0, 5]
    with pytest.raises(NothingMatchedError, match=r"no weights of step 4; kept: 0, 5, 6 "):
        load_trained(run.folder, print, 4)
    assert load_trained(run.folder, print, 5).step == 5
    assert load_trained(run.folder, print, 6).path == run.folder.checkpoint_path(6)
    file = run.folder.kept_path(5) / "weights.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(ResourceError, match=r"weights.5: weights.safetensors is not what was"):
        load_trained(run.folder, print, 5)
    assert problems(run.folder) == ["weights/5/weights.safetensors: changed (sha256 differs)"]


def test_the_setting_counts_in_hash_and_disk_and_names_steps_of_the_run() -> None:
    assert config_hash(small()) == config_hash(small(train__keep_weights=0))
    assert config_hash(small()) != config_hash(small(train__keep_weights=[3]))
    with pytest.raises(ConfigError, match=r"keep_weights: found 13; allowed steps up to"):
        small(train__keep_weights=[3, 13])


@pytest.mark.parametrize(
    ("steps", "chosen", "at"),
    [
        (12, [3, 4, 12], {3, 4}),  # the last step is the checkpoint's
        (12, [0], {0}),
        (12, 5, {0, 5, 10}),
        (10, 5, {0, 5}),
        (1, 5, {0}),
        (400, "log", {0, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377}),
    ],
)
def test_the_disk_estimate_counts_the_weights_of_each_kept_step(
    steps: int, chosen: list[int] | int | str, at: set[int]
) -> None:
    plain, kept = (
        disk_estimate(small(train__steps=steps, train__keep_weights=k)) for k in (0, chosen)
    )
    parameters = sum(deepstack.build_model(small(), vocab_size=257).banks.count().values())
    for before, after in zip(plain, kept, strict=True):
        counted = (after - before) / (4 * parameters)
        assert counted == pytest.approx(len(at), abs=1.5 if chosen == "log" else 0)


@pytest.mark.parametrize("every", some([1, 10], 2))
def test_the_disk_estimate_counts_the_records_of_layers(every: int, tmp_path: Path) -> None:
    sizes = {"model__depth": 8, "train__steps": 30}
    config = small(**sizes, log__layers_every=every)
    counted = disk_estimate(config)[0] - disk_estimate(small(**sizes, log__layers_every=0))[0]
    files = (deepstack.train(config, out=tmp_path).path / "layers").iterdir()
    assert 0.5 < counted / sum(file.stat().st_size for file in files) < 2


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_disk_estimate_is_near_the_bytes_of_a_run(optimizer: str, tmp_path: Path) -> None:
    """Also with Adam's two moments, or Muon's one, and with three checkpoints as it goes on."""
    sizes: dict[str, Any] = {"model__d_model": 64, "model__depth": 3, "train__steps": 4}
    sizes |= {"train__optimizer": optimizer}
    for keeps in (False, True):
        config = small(**sizes, runtime__keep_optimizer=keeps, train__keep_weights=[1, 3])
        run = deepstack.train(config, out=tmp_path / str(keeps))
        files = [path for path in run.path.rglob("*") if path.is_file()]
        estimate = disk_estimate(config)
        found = sum(file.stat().st_size for file in files)
        assert found == pytest.approx(estimate[0], rel=0.2)
    checkpoint = run.folder.checkpoint_path(4)
    one = sum(file.stat().st_size for file in checkpoint.iterdir())
    kept = sum(file.stat().st_size for file in (run.path / "weights").rglob("*.safetensors"))
    assert 3 * one + kept == pytest.approx(estimate[1], rel=0.2)


@needs("depth_use", "export")
@pytest.mark.slow
def test_analyze_and_export_take_a_step(tmp_path: Path) -> None:
    config = small(train__keep_weights=[3], train__steps=6, model__depth=2)
    run = deepstack.train(config, out=tmp_path)
    typed("analyze", run.path, "--step", "3", "--batches", "1")
    typed("analyze", run.path, "--batches", "1")
    early, late = run.analysis("lens_at_3"), run.analysis("lens")
    assert (early.about["step"], late.about["step"]) == (3, 6)
    assert early.about["weights_sha256"] != late.about["weights_sha256"]
    drawn = rows(make_chart("effective_depth_vs_step", run.path.parent))
    assert drawn["x"].tolist() == [3, 6]
    ratios = [lens.scalars["effective_depth_ratio"] for lens in (early, late)]
    assert drawn["y"].tolist() == ratios
    typed("export", run.path, "--step", "3", "--to", tmp_path / "a.safetensors")
    typed("export", run.path, "--to", tmp_path / "b.safetensors")
    a, b = (load_file(tmp_path / f"{name}.safetensors") for name in "ab")
    assert a.keys() == b.keys() and any(not a[name].equal(b[name]) for name in a)
    missing = typed("analyze", run.path, "--step", "4")
    assert missing.exit_code == 7 and "kept: 3, 6" in missing.stderr
    shutil.rmtree(run.folder.kept_dir)
    assert "kept: 6" in typed("export", run.path, "--step", "3", "--to", tmp_path / "c").stderr


WITHOUT = {"runtime__keep_final_weights": False, "model__depth": 1}


def test_a_run_without_final_weights_resumes_and_keeps_the_same_logs_alone(tmp_path: Path) -> None:
    whole = deepstack.train(small(model__depth=1), out=tmp_path / "whole")
    begun = interrupted(small(**WITHOUT), tmp_path / "cut", at=7)
    assert begun.checkpoints() == [7] and problems(begun) == []
    run = deepstack.train(small(**WITHOUT), out=tmp_path / "cut")
    assert run.state == "done" and not run.folder.checkpoints() and problems(run.folder) == []
    assert logs_of(run) == logs_of(whole)
    assert config_hash(small(**WITHOUT)) == config_hash(small(model__depth=1))
    assert not list(run.path.rglob("*.safetensors"))
    assert deepstack.train(small(**WITHOUT), out=tmp_path / "cut").path == run.path, "trained again"


@needs("depth_use", "export")
def test_commands_that_need_weights_say_that_the_run_kept_none(tmp_path: Path) -> None:
    run = deepstack.train(small(**WITHOUT), out=tmp_path)
    why = (
        r"kept no weights \(runtime.keep_final_weights=false\); to train it again: deepstack train"
    )
    for step in (None, 4, 12):
        with pytest.raises(NothingMatchedError, match=why):
            load_trained(run.folder, print, step)
    for words in (["analyze"], ["export", "--to", str(tmp_path / "model")]):
        assert "runtime.keep_final_weights=true --study NAME" in refusal(
            7, words[0], run.path, *words[1:]
        )
    with pytest.raises(ConfigError, match=r"has no weights to begin with"):
        deepstack.train(small(model__depth=1, model__start=str(run.path)), out=tmp_path)
    with pytest.raises(ConfigError, match=r"keep_optimizer: found true, unused under"):
        small(runtime__keep_optimizer=True, **WITHOUT)


def test_the_disk_estimate_counts_no_final_weights(tmp_path: Path) -> None:
    kept, without = (disk_estimate(small(runtime__keep_final_weights=k)) for k in (True, False))
    parameters = sum(deepstack.build_model(small(), vocab_size=257).banks.count().values())
    assert kept[0] - without[0] == 4 * parameters and kept[1] == without[1]


@pytest.mark.parametrize("chosen", [[0], 5, "log"])
def test_a_run_of_no_steps_keeps_its_start(chosen: list[int] | int | str, tmp_path: Path) -> None:
    """It has no checkpoint of a last step."""
    config = small(train__steps=0, train__keep_weights=chosen, model__depth=1)
    run = deepstack.train(config, out=tmp_path)
    assert run.folder.kept_steps() == [0] and problems(run.folder) == []
    assert load_trained(run.folder, print, 0).step == 0 and not run.folder.checkpoints()
    longer = deepstack.train(small(train__keep_weights=[0], model__depth=1), out=tmp_path)
    assert [*kept_files(run.path).values()] == [*kept_files(longer.path).values()]
    kept, none = (disk_estimate(one)[0] for one in (config, small(train__steps=0, model__depth=1)))
    assert kept > none
