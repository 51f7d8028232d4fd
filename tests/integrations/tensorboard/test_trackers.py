"""Logs for trackers: equal to those of the run, read back by each tracker's own reader (slow)."""

import json
import shlex
import shutil
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest
from helpers.command_line import TINY, refusal, succeed
from helpers.plot_runs import make_run
from helpers.small_runs import interrupted

import deepstack
from deepstack.base.errors import ConfigError
from deepstack.config import config_hash, parse_config, to_yaml
from deepstack.instruments.export.logs import TRACKERS, export_logs
from deepstack.plots.tracked import heat_maps, layer_summaries, scalars
from deepstack.records import Run, RunFolder, find_runs


def settings(*more: str) -> Any:
    usual = ["model.depth=3", "train.steps=12", "train.eval_every=4", "log.attribution_every=6"]
    return parse_config("", overrides=[*TINY, *usual, *more])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """A run that is done, and one that diverged."""
    out = tmp_path_factory.mktemp("runs")
    done = deepstack.train(settings(), study="study", out=out)
    diverged = deepstack.train(settings("train.max_loss=1e-3", "seed=1"), study="study", out=out)
    assert diverged.state == "diverged"
    return {"done": done, "diverged": diverged}


def test_scalars_are_those_of_the_run(runs: dict[str, Run]) -> None:
    run = runs["done"]
    values = dict(scalars(run))
    assert list(values) == list(range(13))
    for row in run.steps.to_dict("records"):
        logged = values[int(row.pop("step"))]
        assert {key: logged[f"steps/{key}"] for key in row} == row
    assert values[12]["evals/loss"] == run.evals.loss.iloc[-1]
    assert values[12]["attribution/q"] == run.attribution.q.iloc[-1]
    steps, norms = run.layers("grad_norm")
    for step, norm in zip(steps, norms, strict=True):
        assert values[step]["layers/grad_norm/mean"] == pytest.approx(norm.mean())
        assert values[step]["layers/grad_norm/max"] == norm.max()
    # no key for each layer: as many keys for any depth
    keys = {key for each in values.values() for key in each if key.startswith("layers/")}
    assert len(keys) <= 3 * len(run.layer_names())


def test_summaries_are_of_later_steps_and_of_finite_values(tmp_path: Path) -> None:
    folder = RunFolder(make_run(tmp_path))
    folder.write_layers({"a": np.array([[9, 9, 9], [1, np.nan, 5], [2, 4, 9]])}, [0, 4, 12])
    both = layer_summaries(Run(folder.path), after=0)
    names = [f"layers/a/{name}" for name in ("mean", "min", "max")]
    numbers = {4: (3, 1, 5), 12: (5, 2, 9)}
    assert both == [(step, dict(zip(names, n, strict=True))) for step, n in numbers.items()]
    assert layer_summaries(Run(folder.path), after=4) == both[1:]


def test_heat_maps_are_the_charts_of_diagnostics_with_values(tmp_path: Path) -> None:
    folder = RunFolder(make_run(tmp_path))
    layers = {"a": np.ones((2, 3)), "b": np.full((2, 3), np.nan), "c": -np.ones((2, 3))}
    folder.write_layers(layers, [0, 12])
    maps = list(heat_maps(Run(folder.path)))
    assert [(key, step) for key, step, _ in maps] == [("layers/a", 12), ("layers/c", 12)]
    assert all(png.startswith(b"\x89PNG") for _, _, png in maps)


def test_a_missing_package_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepstack.integrations.tensorboard.events.find_spec", lambda name: None)
    config = settings("log.to=[tensorboard]")
    assert config_hash(config) == config_hash(settings())  # no part of the experiment
    (tmp_path / "c.yaml").write_text(to_yaml(config))
    (line,) = refusal(2, "train", tmp_path / "c.yaml", "--out", tmp_path / "out").splitlines()
    assert "log.to: tensorboard needs the package tensorboard" in line
    assert not (tmp_path / "out").exists()


def test_wrong_exports_are_refused(runs: dict[str, Run], tmp_path: Path) -> None:
    for more, expected in [
        (["--logs", "tensorbord", "--to", tmp_path / "x"], "did you mean 'tensorboard'?"),
        (["--logs", "wandb", "--to", tmp_path], "exists already; give another folder"),
        ([], "--to is missing"),
    ]:
        assert expected in refusal(2, "export", runs["done"].path.parent, *more)
    assert list(tmp_path.iterdir()) == []
    assert "holds no runs" in refusal(7, "export", tmp_path, "--logs", "wandb")


needs_tensorboard = pytest.mark.skipif(
    find_spec("tensorboard") is None, reason="needs the extra [tensorboard]"
)


def events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    unlimited = {"scalars": 0, "images": 0}
    return EventAccumulator(str(folder), size_guidance=unlimited).Reload()


def assert_logged(read: dict[int, dict[str, Any]], run: Run) -> None:
    """The rows by step have every value of the run."""
    for step, values in scalars(run):
        found = {key: float(read[step][key]) for key in values}
        assert found == pytest.approx(values, rel=1e-6, nan_ok=True)


def by_key(run: Run) -> dict[str, dict[int, float]]:
    """The values of a run: key -> step -> value."""
    logged: dict[str, dict[int, float]] = {}
    for step, values in scalars(run):
        for key, value in values.items():
            logged.setdefault(key, {})[step] = value
    return logged


@pytest.mark.slow
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
    maps = {key: png for key, _, png in heat_maps(run)}
    assert set(read.Tags()["images"]) == set(maps)
    for key, png in maps.items():
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
    assert again.path == run.path  # a tracker is no part of the experiment


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


def wandb_records(content: bytes) -> Iterator[bytes]:
    """The records of a .wandb file: LevelDB's log format after seven bytes of identification."""
    parts = b""
    for start in range(0, len(content), 32_768):
        block, at = content[start : start + 32_768], 0 if start else 7
        while at + 7 <= len(block):
            length, kind = struct.unpack_from("<HB", block, at + 4)
            parts += block[at + 7 : at + 7 + length]
            at += 7 + length
            if kind in (1, 4):  # a full record, or the last part of one
                yield parts
                parts = b""


@pytest.mark.slow
def test_wandb_reads_the_export(runs: dict[str, Run], tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    succeed("export", runs["done"].path.parent, "--logs", "wandb", "--to", tmp_path / "w")
    from wandb.proto import wandb_internal_pb2

    read = {}
    for file in (tmp_path / "w").glob("wandb/offline-run-*/*.wandb"):
        rows: dict[int, dict[str, Any]] = {}
        for data in wandb_records(file.read_bytes()):
            record = wandb_internal_pb2.Record.FromString(data)
            if record.HasField("run"):
                run_record = record.run
            if record.HasField("history"):
                row = {
                    (each.key or "/".join(each.nested_key)): json.loads(each.value_json)
                    for each in record.history.item
                }
                rows[row["_step"]] = row
        config = {each.key: each.value_json for each in run_record.config.update}
        read[run_record.display_name] = rows, config
    assert set(read) == {run.name for run in runs.values()}
    for run in runs.values():
        rows, config = read[run.name]
        assert config["model.depth"] == "3" and config["state"] == f'"{run.state}"'
        assert_logged(rows, run)
        last = rows[max(rows)]
        for key, _, _ in heat_maps(run):
            assert last[f"{key}/_type"] == "image-file" and last[f"{key}/width"] > 300
            assert list((tmp_path / "w").glob(f"wandb/*/files/{last[f'{key}/path']}"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of mlflow's own code
def test_mlflow_takes_its_own_names_and_any_folder(
    runs: dict[str, Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    monkeypatch.setattr(
        "deepstack.instruments.export.logs.heat_maps", lambda run: [("x", 0, b"png")]
    )
    for name in ("Default", "Default_", "50% of a study"):
        shutil.copytree(runs["done"].path, tmp_path / "studies" / name / runs["done"].name)
    to = tmp_path / "a%20b ?c"
    command = export_logs(find_runs(tmp_path / "studies"), "mlflow", to)
    client = MlflowClient(shlex.split(command)[-1])
    experiments = {one.name: one for one in client.search_experiments()}
    assert set(experiments) == {"Default", "Default_", "Default__", "50% of a study"}
    assert (to / "mlflow.db").is_file() and list(to.glob("artifacts/50% of a study/*/artifacts"))
    assert not client.search_runs([experiments["Default"].experiment_id])
    assert {path.name for path in tmp_path.iterdir()} == {"studies", to.name}


def test_a_failed_export_leaves_one_line_and_no_folder(
    runs: dict[str, Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(runs: Sequence[Run], to: Path) -> None:
        to.mkdir()
        raise RuntimeError("table exists\nwith a query of ten lines")

    monkeypatch.setitem(TRACKERS, "mlflow", (fail, str))
    words = "export", runs["done"].path.parent, "--logs", "mlflow", "--to", tmp_path / "m"
    line = "deepstack: --logs: mlflow could not write the runs: RuntimeError: table exists\n"
    assert refusal(1, *words) == line
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize("tracker", sorted(TRACKERS))
def test_the_command_that_shows_an_export_quotes_its_folder(tracker: str) -> None:
    words = shlex.split(TRACKERS[tracker][1](Path("my logs/it's 5%")))
    assert any("my logs/it's 5%" in unquote(word) for word in words)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of mlflow's own code
def test_mlflow_reads_the_export(runs: dict[str, Run], tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    succeed("export", runs["done"].path.parent, "--logs", "mlflow", "--to", tmp_path / "m")
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path}/m/mlflow.db")
    experiment = client.get_experiment_by_name("study")
    read = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    assert set(read) == {run.name for run in runs.values()}
    for run in runs.values():
        one = read[run.name]
        assert one.data.params["model.depth"] == "3"
        assert one.data.params["state"] == run.state
        written = by_key(run)
        for key in ("steps/loss", "evals/loss", "layers/grad_norm/max", "timing/step_ms"):
            history = client.get_metric_history(one.info.run_id, key)
            assert sorted((m.step, m.value) for m in history) == list(written[key].items())
        assert set(one.data.metrics) == set(written)
        paths = {item.path for item in client.list_artifacts(one.info.run_id, "layers")}
        assert paths == {f"{key}.png" for key, _, _ in heat_maps(run)}


@pytest.mark.slow
def test_trackio_reads_the_export(runs: dict[str, Run], tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    # trackio keeps the folder of its first import: use another process
    words = ["export", runs["done"].path.parent, "--logs", "trackio", "--to", tmp_path / "t"]
    command = [sys.executable, "-m", "deepstack", *map(str, words), "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[0]["runs"] == 2  # and nothing else on stdout
    with sqlite3.connect(tmp_path / "t" / "study.db") as database:
        rows = database.execute("select run_name, step, metrics from metrics").fetchall()
    for run in runs.values():
        read: dict[int, dict[str, Any]] = {}
        for name, step, metrics in rows:
            if name == run.name:
                read.setdefault(step, {}).update(json.loads(metrics))
        assert_logged(read, run)
        pictures = {key for key, value in read[max(read)].items() if isinstance(value, dict)}
        assert pictures == {key for key, _, _ in heat_maps(run)}


@pytest.mark.parametrize("tracker", ["tensorboard", "wandb", "mlflow", "trackio"])
def test_an_export_without_its_package_names_the_extra(
    tracker: str, runs: dict[str, Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (tracker, "mlflow.entities", "tensorboard.compat.proto"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=rf"of the extra \[{tracker}\]"):
        export_logs(list(runs.values()), tracker, tmp_path / "x")
    assert not (tmp_path / "x").exists()
