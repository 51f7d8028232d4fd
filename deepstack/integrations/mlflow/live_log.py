"""Runs of MLflow while a run trains."""

import os
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import unquote, urlsplit

from deepstack.integrations.mlflow.client import (
    MOST_METRICS,
    log_parameters,
    metrics_of,
    open_client,
    quiet_mlflow,
)
from deepstack.plots import heat_map_images
from deepstack.records import Run, refuse_links_below, replace
from deepstack.training import LiveLog, Rows

STATUS = {"done": "FINISHED", "interrupted": "KILLED"}  # FAILED for other states


class MlflowLog(LiveLog):
    """Writes a database of MLflow into mlflow/ of the run folder, or to $MLFLOW_TRACKING_URI."""

    name = "mlflow"

    def open(self, run: Run, known: str | None, settings: Mapping[str, Any]) -> str:
        server = os.environ.get("MLFLOW_TRACKING_URI")
        folder = (run.path / self.name).resolve()
        if server is None:
            refuse_links_below(folder)  # the database may be another's
        self._client = open_client(folder) if server is None else quiet_mlflow()(server)
        if known is None:
            location = None if server else (folder / "artifacts").as_uri()
            self._id = self._new_run(run, location, settings)
        else:
            self._client.update_run(known, status="RUNNING")
            self._id = known
        place = urlsplit(self._client.get_run(self._id).info.artifact_uri)
        self._keeps_pictures = server is not None or (
            place.scheme in ("", "file")
            and Path(unquote(place.path)).resolve().is_relative_to(folder)
        )
        return self._id

    def _new_run(self, run: Run, location: str | None, settings: Mapping[str, Any]) -> str:
        """Make a run of MLflow in the study's experiment; return its id."""
        experiment = self._client.get_experiment_by_name(run.study)
        number = (
            self._client.create_experiment(run.study, artifact_location=location)
            if experiment is None
            else experiment.experiment_id
        )
        identity = str(self._client.create_run(number, run_name=run.name).info.run_id)
        log_parameters(self._client, identity, settings)
        return identity

    def send(self, rows: Rows) -> None:
        metrics = metrics_of(rows)
        for i in range(0, len(metrics), MOST_METRICS):
            self._client.log_batch(self._id, metrics=metrics[i : i + MOST_METRICS])

    def end(self, run: Run, state: str) -> None:
        if state != "interrupted" and self._keeps_pictures:
            with TemporaryDirectory() as temporary:
                for key, _, png in heat_map_images(run):
                    folder, _, name = key.rpartition("/")
                    file = Path(temporary) / f"{name}.png"
                    replace(file, png)
                    self._client.log_artifact(self._id, str(file), folder)
        self._client.set_tag(self._id, "state", state)
        self._client.set_terminated(self._id, STATUS.get(state, "FAILED"))
