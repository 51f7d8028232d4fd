"""Registers MLflow: `deepstack export --logs mlflow`."""

import logging
import os
import re
import shlex
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

from deepstack.records import Run
from deepstack.runs import Tracker, register_tracker

MOST_METRICS = 1000  # in one call
MOST_PARAMETERS = 100
LONGEST_PARAMETER = 6000


def export(runs: Sequence[Run], to: Path) -> None:
    """Write a database of MLflow with one experiment for each study, and the pictures beside it."""
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    from mlflow.entities import Metric, Param
    from mlflow.tracking import MlflowClient

    from deepstack.plots import heat_map_images, logged_settings, scalars

    logging.getLogger("mlflow").setLevel(logging.WARNING)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    to.mkdir(parents=True)
    address = address_of(to.resolve())
    client = MlflowClient(address)
    literal = Path(address.removeprefix("sqlite:///")).parent
    if literal != to.resolve():  # MLflow also makes a folder of the escaped name
        with suppress(OSError):
            literal.rmdir()
    experiments: dict[str, str] = {}
    for run in runs:
        if run.study not in experiments:
            location = (to / "artifacts" / run.study).resolve().as_uri()
            name = run.study
            while client.get_experiment_by_name(name):  # MLflow makes one that is called Default
                name += "_"
            experiments[run.study] = client.create_experiment(name, artifact_location=location)
        created = client.create_run(experiments[run.study], run_name=run.name)
        number, now = created.info.run_id, int(time.time() * 1000)
        parameters = [
            Param(key, str(value)[:LONGEST_PARAMETER])
            for key, value in logged_settings(run).items()
        ]
        for i in range(0, len(parameters), MOST_PARAMETERS):
            client.log_batch(number, params=parameters[i : i + MOST_PARAMETERS])
        metrics = [
            Metric(key, value, now, step)
            for step, values in scalars(run)
            for key, value in values.items()
        ]
        for i in range(0, len(metrics), MOST_METRICS):
            client.log_batch(number, metrics=metrics[i : i + MOST_METRICS])
        for key, _, png in heat_map_images(run):
            file = to / "artifacts" / run.study / number / "artifacts" / f"{key}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(png)
        client.set_terminated(number, "FINISHED" if run.state == "done" else "FAILED")


def address_of(folder: Path) -> str:
    """Return the address of MLflow's database in a folder, which MLflow reads as a URL."""
    escaped = re.sub("[%?#]", lambda match: quote(match[0]), str(folder))
    return f"sqlite:///{escaped}/mlflow.db"


def show(folder: Path) -> str:
    """Return the command that shows exported runs."""
    return shlex.join(["mlflow", "ui", "--backend-store-uri", address_of(folder)])


register_tracker("mlflow", Tracker(export, show))
