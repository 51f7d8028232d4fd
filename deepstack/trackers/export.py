"""Exports the logs of finished or running runs to a tracker's own files, without a network."""

import io
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from deepstack.errors import ConfigError
from deepstack.records import Run
from deepstack.registry import unknown
from deepstack.trackers.tensorboard import EventLog
from deepstack.trackers.values import heat_maps, scalars, settings

MLFLOW_BATCH = 1000  # metrics in one call
MLFLOW_PARAMETERS = 100
LONGEST_PARAMETER = 6000


def export_logs(runs: Sequence[Run], tracker: str, to: Path) -> str:
    """Write the logs of runs into the new folder `to`; return the command that shows them.

    Raises ConfigError for an unknown tracker, one whose package is missing, or an existing folder.
    """
    if tracker not in TRACKERS:
        raise ConfigError(f"--logs: {unknown('tracker', tracker, sorted(TRACKERS))}")
    if to.exists():
        raise ConfigError(f"{to} exists already; give another folder with --to")
    export, command = TRACKERS[tracker]
    try:
        with redirect_stdout(sys.stderr):  # libraries greet on stdout
            export(runs, to)
    except ImportError as error:
        raise ConfigError(
            f"--logs: {tracker} needs the package {error.name}, of the extra [{tracker}]"
        ) from error
    return command.format(to=to)


def to_tensorboard(runs: Sequence[Run], to: Path) -> None:
    """Write one event file for each run, in <to>/<study>/<run>."""
    for run in runs:
        log = EventLog(to / run.study / run.name)
        log.text(0, "settings", settings(run))
        for step, values in scalars(run):
            log.scalars(step, values)
        for key, step, png in heat_maps(run):
            log.picture(step, key, png)
        log.close()


def to_wandb(runs: Sequence[Run], to: Path) -> None:
    """Write one offline run of W&B for each run, in <to>/wandb; `wandb sync` sends them."""
    os.environ["WANDB_ERROR_REPORTING"] = "false"
    import wandb

    to.mkdir(parents=True)
    quiet = wandb.Settings(
        console="off", silent=True, disable_git=True, disable_code=True, x_disable_stats=True
    )
    for run in runs:
        log = wandb.init(
            mode="offline", dir=str(to), project=run.study, name=run.name, settings=quiet,
            config=settings(run), reinit="create_new",
        )  # fmt: skip
        log_values(run, log.log, wandb.Image)
        log.finish()
    wandb.teardown()  # waits until the process that writes the files has written all


def to_mlflow(runs: Sequence[Run], to: Path) -> None:
    """Write a database of MLflow with one experiment for each study, and the pictures beside it."""
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    from mlflow.entities import Metric, Param
    from mlflow.tracking import MlflowClient

    logging.getLogger("mlflow").setLevel(logging.WARNING)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    to.mkdir(parents=True)
    client = MlflowClient(f"sqlite:///{to.resolve()}/mlflow.db")
    experiments: dict[str, str] = {}
    for run in runs:
        if run.study not in experiments:
            location = (to / "artifacts" / run.study).resolve().as_uri()
            experiments[run.study] = client.create_experiment(run.study, artifact_location=location)
        created = client.create_run(experiments[run.study], run_name=run.name)
        number, now = created.info.run_id, int(time.time() * 1000)
        parameters = [
            Param(key, str(value)[:LONGEST_PARAMETER]) for key, value in settings(run).items()
        ]
        for i in range(0, len(parameters), MLFLOW_PARAMETERS):
            client.log_batch(number, params=parameters[i : i + MLFLOW_PARAMETERS])
        metrics = [
            Metric(key, value, now, step)
            for step, values in scalars(run)
            for key, value in values.items()
        ]
        for i in range(0, len(metrics), MLFLOW_BATCH):
            client.log_batch(number, metrics=metrics[i : i + MLFLOW_BATCH])
        for key, _, png in heat_maps(run):
            file = to / "artifacts" / run.study / number / "artifacts" / f"{key}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(png)
        client.set_terminated(number, "FINISHED" if run.state == "done" else "FAILED")


def to_trackio(runs: Sequence[Run], to: Path) -> None:
    """Write a database of trackio for each study, with the pictures beside it."""
    os.environ["TRACKIO_DIR"] = str(to.resolve())  # read once, by the import
    import trackio

    if Path(trackio.TRACKIO_DIR) != to.resolve():
        raise ConfigError(f"trackio writes to {trackio.TRACKIO_DIR} until this process ends")
    for run in runs:
        trackio.init(
            project=run.study, name=run.name, config=settings(run), embed=False, resume="never",
            auto_log_gpu=False, auto_log_cpu=False,
        )  # fmt: skip
        log_values(run, trackio.log, trackio.Image)
        trackio.finish()


def log_values(run: Run, log: Callable[..., Any], picture: Callable[[Any], Any]) -> None:
    """Log the values of each step, and the pictures with the last one."""
    from PIL import Image

    last = 0
    for last, values in scalars(run):
        log(values, step=last)
    pictures = {key: picture(Image.open(io.BytesIO(png))) for key, _, png in heat_maps(run)}
    log(pictures, step=last)


Export = Callable[[Sequence[Run], Path], Any]

TRACKERS: dict[str, tuple[Export, str]] = {
    "tensorboard": (to_tensorboard, "tensorboard --logdir {to}"),
    "wandb": (to_wandb, "wandb sync {to}/wandb/offline-run-*"),
    "trackio": (to_trackio, "TRACKIO_DIR={to} trackio show"),
    "mlflow": (to_mlflow, "mlflow ui --backend-store-uri sqlite:///{to}/mlflow.db"),
}
