"""MLflow shows the values of a run, read back by its own reader (slow)."""

import shlex
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from helpers.command_line import succeed
from helpers.live_runs import STEPS, Steps, assert_every_row, killed_and_resumed
from helpers.sampling import turn
from helpers.small_runs import interrupted
from helpers.tracked_runs import by_key, pictured, settings

import deepstack
from deepstack.base.errors import ResourceError
from deepstack.records import Run, find_runs
from deepstack.tools.export.logs import export_logs


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of mlflow's own code
def test_mlflow_takes_its_own_names_and_any_folder(
    runs: dict[str, Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    monkeypatch.setattr("deepstack.plots.heat_map_images", lambda run: [("x", 0, b"png")])
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


@turn(0, 3)
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
        assert paths == {f"{key}.png" for key in pictured(run)}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of mlflow's own code
def test_mlflow_follows_a_run_through_a_kill(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    def read(path: Path) -> Steps:
        if not (path / "mlflow" / "run.json").exists():
            return {}
        client = MlflowClient(f"sqlite:///{path}/mlflow/mlflow.db")
        experiment = client.get_experiment_by_name("s")
        (one,) = client.search_runs([experiment.experiment_id])  # also after the kill
        status.append(one.info.status)
        number = one.info.run_id
        return {
            key: sorted(metric.step for metric in client.get_metric_history(number, key))
            for key in one.data.metrics
        }

    status: list[str] = []
    run, before, shown = killed_and_resumed("mlflow", tmp_path, read)
    assert 0 < len(before["steps/loss"]) < STEPS
    assert_every_row(shown)
    assert status[0] == "RUNNING" and status[-1] == "FINISHED"
    assert list((run.path / "mlflow" / "artifacts").rglob("layers/grad_norm.png"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of mlflow's own code
def test_a_run_folder_of_others_lets_mlflow_write_nowhere_else(tmp_path: Path) -> None:
    """A link is refused; a database that names another folder for pictures gets none."""
    pytest.importorskip("mlflow")
    config = settings("log.to=[mlflow]")
    run = interrupted(config, tmp_path, study="a")
    folder, elsewhere = run.path / "mlflow", tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("artifacts", "mlflow.db-journal"):
        (folder / name).symlink_to(elsewhere)
        with pytest.raises(ResourceError, match=rf"mlflow/{name} is a link"):
            deepstack.train(config, study="a", out=tmp_path)
        (folder / name).unlink()
    with closing(sqlite3.connect(folder / "mlflow.db")) as database, database:
        database.execute("update runs set artifact_uri = ?", [elsewhere.as_uri()])
        database.execute("update experiments set artifact_location = ?", [elsewhere.as_uri()])
    assert deepstack.train(config, study="a", out=tmp_path).state == "done"
    assert not list(elsewhere.iterdir())
