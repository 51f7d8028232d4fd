"""Registers MLflow: `log.to: [mlflow]` and `deepstack export --logs mlflow`."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepstack.integrations.mlflow.client import (
    MOST_METRICS,
    address_of,
    log_parameters,
    metrics_of,
    open_client,
)
from deepstack.records import Run
from deepstack.runs import Tracker, register_tracker


def export(runs: Sequence[Run], to: Path) -> None:
    """Write a database of MLflow with one experiment for each study, and the pictures beside it."""
    from deepstack.plots import heat_map_images
    from deepstack.runs import logged_settings, scalars

    client = open_client(to.resolve())
    experiments: dict[str, str] = {}
    for run in runs:
        if run.study not in experiments:
            location = (to / "artifacts" / run.study).resolve().as_uri()
            name = run.study
            while client.get_experiment_by_name(name):  # MLflow makes one that is called Default
                name += "_"
            experiments[run.study] = client.create_experiment(name, artifact_location=location)
        number = client.create_run(experiments[run.study], run_name=run.name).info.run_id
        log_parameters(client, number, logged_settings(run))
        metrics = metrics_of(scalars(run))
        for i in range(0, len(metrics), MOST_METRICS):
            client.log_batch(number, metrics=metrics[i : i + MOST_METRICS])
        for key, _, png in heat_map_images(run):
            file = to / "artifacts" / run.study / number / "artifacts" / f"{key}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(png)
        client.set_terminated(number, "FINISHED" if run.state == "done" else "FAILED")


def show(folder: Path) -> str:
    """Return the command that shows exported runs."""
    return shlex.join(["mlflow", "ui", "--backend-store-uri", address_of(folder)])


def live() -> Any:
    """Return the observer that logs a run while it trains."""
    from deepstack.integrations.mlflow.live_log import MlflowLog

    return MlflowLog()


register_tracker("mlflow", Tracker(export, show, live))
