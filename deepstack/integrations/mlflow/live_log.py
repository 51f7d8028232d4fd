"""Runs of MLflow while a run trains."""

import os
from pathlib import Path
from tempfile import TemporaryDirectory

from deepstack.integrations.mlflow.client import (
    MOST_METRICS,
    log_parameters,
    metrics_of,
    open_client,
    quiet_mlflow,
)
from deepstack.plots import heat_map_images
from deepstack.records import Run, replace
from deepstack.runs import logged_settings
from deepstack.training import LiveLog, Rows

STATUS = {"done": "FINISHED", "interrupted": "KILLED"}  # FAILED for other states


class MlflowLog(LiveLog):
    """Writes a database of MLflow into mlflow/ of the run folder, or to $MLFLOW_TRACKING_URI."""

    name = "mlflow"

    def open(self, run: Run, known: str | None) -> str:
        folder = (run.path / self.name).resolve()
        self._client = (
            quiet_mlflow()(os.environ["MLFLOW_TRACKING_URI"])
            if "MLFLOW_TRACKING_URI" in os.environ
            else open_client(folder)
        )
        if known is not None:
            self._client.update_run(known, status="RUNNING")
            self._id = known
            return known
        experiment = self._client.get_experiment_by_name(run.study)
        if experiment is None:
            location = None
            if "MLFLOW_TRACKING_URI" not in os.environ:
                location = (folder / "artifacts").as_uri()
            number = self._client.create_experiment(run.study, artifact_location=location)
        else:
            number = experiment.experiment_id
        self._id = self._client.create_run(number, run_name=run.name).info.run_id
        settings = {key: value for key, value in logged_settings(run).items() if key != "state"}
        log_parameters(self._client, self._id, settings)
        return self._id

    def send(self, rows: Rows) -> None:
        metrics = metrics_of(rows)
        for i in range(0, len(metrics), MOST_METRICS):
            self._client.log_batch(self._id, metrics=metrics[i : i + MOST_METRICS])

    def end(self, run: Run, state: str) -> None:
        if state != "interrupted":
            with TemporaryDirectory() as temporary:
                for key, _, png in heat_map_images(run):
                    folder, _, name = key.rpartition("/")
                    file = Path(temporary) / f"{name}.png"
                    replace(file, png)
                    self._client.log_artifact(self._id, str(file), folder)
        self._client.set_tag(self._id, "state", state)
        self._client.set_terminated(self._id, STATUS.get(state, "FAILED"))
