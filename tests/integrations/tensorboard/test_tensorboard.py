"""TensorBoard shows the values of a run, read back by its own reader (slow)."""

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from helpers.command_line import refusal, succeed
from helpers.extensions import needs
from helpers.live_runs import STEPS, Steps, assert_every_row, killed_and_resumed
from helpers.sampling import turn
from helpers.small_runs import interrupted, small
from helpers.tracked_runs import by_key, first_pictures, pictured, settings

import deepstack
from deepstack.config import config_hash, to_yaml
from deepstack.records import Run, RunFolder

needs_tensorboard = pytest.mark.skipif(
    find_spec("tensorboard") is None, reason="needs the extra [tensorboard]"
)


def events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    unlimited = {"scalars": 0, "images": 0}
    return EventAccumulator(str(folder), size_guidance=unlimited).Reload()


def test_a_missing_package_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepstack.runs.trackers.find_spec", lambda name: None)
    config = settings("log.to=[tensorboard]")
    assert config_hash(config) == config_hash(settings())  # no part of the experiment
    (tmp_path / "c.yaml").write_text(to_yaml(config))
    (line,) = refusal(2, "train", tmp_path / "c.yaml", "--out", tmp_path / "out").splitlines()
    assert "log.to: tensorboard needs the package tensorboard" in line
    assert not (tmp_path / "out").exists()


@needs("export")
@turn(1, 3)
@needs_tensorboard
def test_tensorboard_reads_the_export(runs: dict[str, Run], tmp_path: Path) -> None:
    words = "--logs", "tensorboard", "--to", tmp_path / "tb", "--json"
    printed = succeed("export", runs["done"].path.parent, *words)
    assert json.loads(printed)[0]["runs"] == 2
    for run in runs.values():
        read = events(tmp_path / "tb" / "study" / run.name)
        compare_events(run, read)
        assert run.name in str(read.path) and read.Tags()["tensors"] == ["settings"]
        text = read.Tensors("settings")[0].tensor_proto.string_val[0].decode()
        assert '"model.depth": 3' in text and f'"state": "{run.state}"' in text


def compare_events(run: Run, read: Any, *, timing: bool = True) -> None:
    for key, wanted in by_key(run).items():
        if timing or not key.startswith(("timing/", "attribution/")):
            found = {event.step: event.value for event in read.Scalars(key)}
            assert found == pytest.approx(wanted, rel=1e-6, nan_ok=True), key
            assert len(read.Scalars(key)) == len(wanted)
    assert set(read.Tags()["images"]) == pictured(run)
    for key, png in first_pictures(run).items():
        (image,) = read.Images(key)
        assert image.encoded_image_string == png and image.width > 300


@pytest.mark.slow
@needs_tensorboard
def test_tensorboard_follows_a_run_that_is_interrupted(tmp_path: Path) -> None:
    config = settings("log.to=[tensorboard]")
    folder = interrupted(config, tmp_path, study="a").path / "tensorboard"
    assert [event.step for event in events(folder).Scalars("steps/loss")] == list(range(1, 7))
    assert not events(folder).Tags()["images"]
    run = deepstack.train(config, study="a", out=tmp_path)
    compare_events(run, events(folder), timing=False)
    plain = deepstack.train(settings(), study="b", out=tmp_path)
    for name in ("steps.csv", "evals.csv"):
        assert (run.path / name).read_bytes() == (plain.path / name).read_bytes()
    succeed("verify", run.path)
    again = deepstack.train(settings(), study="a", out=tmp_path)
    assert again.path == run.path  # a tracker is not part of the experiment


@pytest.mark.slow
@needs_tensorboard
def test_tensorboard_follows_a_run_through_a_kill(tmp_path: Path) -> None:
    def read(path: Path) -> Steps:
        if not (path / "tensorboard").exists():
            return {}
        shown = events(path / "tensorboard")
        return {key: [one.step for one in shown.Scalars(key)] for key in shown.Tags()["scalars"]}

    _, before, shown = killed_and_resumed("tensorboard", tmp_path, read)
    assert 0 < len(before["steps/loss"]) < STEPS
    assert_every_row(shown)


@pytest.mark.slow
@needs_tensorboard
def test_steps_that_are_trained_again_are_shown_once(tmp_path: Path) -> None:
    from deepstack.integrations.tensorboard.events import EventLog

    for first, last in ((0, 10), (6, 12)):  # killed at 10, resumed after the checkpoint of step 5
        log = EventLog(tmp_path, first)
        for step in range(first, last + 1):
            log.scalars(step, {"x": step + first / 100, "none": None})
        log.close()
    read = [(event.step, round(event.value, 2)) for event in events(tmp_path).Scalars("x")]
    assert read == [(s, float(s)) for s in range(6)] + [(s, s + 0.06) for s in range(6, 13)]


@pytest.mark.slow
@needs_tensorboard
def test_a_run_that_begins_again_hides_the_rows_of_its_first_start(tmp_path: Path) -> None:
    """Killed before its first checkpoint, it has event files and begins at step 1."""
    config = small(log__to=["tensorboard"], train__steps=3)
    run = deepstack.train(config, out=tmp_path)
    shutil.rmtree(run.path / "checkpoint")
    RunFolder(run.path).write_status("interrupted", 0)
    again = deepstack.train(config, out=tmp_path)
    assert again.path == run.path
    shown = [one.step for one in events(run.path / "tensorboard").Scalars("steps/loss")]
    assert shown == [1, 2, 3]
