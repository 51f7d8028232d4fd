"""Exports the logs of finished or running runs to a tracker's own files, without a network."""

import io
import logging
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from deepstack.base.errors import ConfigError, DeepstackError
from deepstack.base.registry import unknown
from deepstack.integrations.tensorboard.events import EventLog
from deepstack.plots.tracked import heat_maps, scalars, settings
from deepstack.records import Run

MLFLOW_BATCH = 1000  # metrics in one call
MLFLOW_PARAMETERS = 100
LONGEST_PARAMETER = 6000
WANDB_FORBIDS = r"[/\\#?%:]"  # in the name of a project


def export_logs(runs: Sequence[Run], tracker: str, to: Path) -> str:
    """Write the logs of runs into the new folder `to`; return the command that shows them.

    Raises ConfigError for an unknown tracker, one whose package is missing, or an existing folder,
    and DeepstackError with the reason if the tracker fails.  A failed export leaves no folder.
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
        discard(to)
        raise ConfigError(
            f"--logs: {tracker} needs the package {error.name}, of the extra [{tracker}]"
        ) from error
    except DeepstackError:
        discard(to)
        raise
    except Exception as error:
        discard(to)
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        raise DeepstackError(f"--logs: {tracker} could not write the runs: {reason}") from error
    return command(to)


def discard(folder: Path) -> None:
    """Remove a folder that an export began."""
    shutil.rmtree(folder, ignore_errors=True)


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
            mode="offline", dir=str(to), project=re.sub(WANDB_FORBIDS, "_", run.study),
            name=run.name, settings=quiet, config=settings(run), reinit="create_new",
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
    address = mlflow_address(to.resolve())
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


def mlflow_address(folder: Path) -> str:
    """Return the address of MLflow's database in a folder, which MLflow reads as a URL."""
    escaped = re.sub("[%?#]", lambda match: quote(match[0]), str(folder))
    return f"sqlite:///{escaped}/mlflow.db"


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
Command = Callable[[Path], str]

TRACKERS: dict[str, tuple[Export, Command]] = {
    "tensorboard": (to_tensorboard, lambda to: shlex.join(["tensorboard", "--logdir", str(to)])),
    "wandb": (to_wandb, lambda to: f"wandb sync {shlex.quote(str(to))}/wandb/offline-run-*"),
    "trackio": (to_trackio, lambda to: f"TRACKIO_DIR={shlex.quote(str(to))} trackio show"),
    "mlflow": (
        to_mlflow,
        lambda to: shlex.join(["mlflow", "ui", "--backend-store-uri", mlflow_address(to)]),
    ),
}
"""Name of a tracker -> the function that writes the runs, and the command that shows a folder."""
