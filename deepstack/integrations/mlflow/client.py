"""Clients of MLflow: the address of a database, its parameters and its metrics."""

import logging
import os
import re
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from deepstack.runs import Scalars

MOST_METRICS = 1000  # in one call
MOST_PARAMETERS = 100
LONGEST_PARAMETER = 6000


def quiet_mlflow() -> Any:
    """Return the class of MLflow's clients, with telemetry off and only warnings shown."""
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    # Of a server that does not answer: MLflow's own seven tries take minutes.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    from mlflow.tracking import MlflowClient

    logging.getLogger("mlflow").setLevel(logging.WARNING)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    return MlflowClient


def open_client(folder: Path) -> Any:
    """Return the client of the database in a folder, which is made if it does not exist.

    folder: its absolute path, without links.
    """
    client_class = quiet_mlflow()
    folder.mkdir(parents=True, exist_ok=True)
    address = address_of(folder)
    client = client_class(address)
    literal = Path(address.removeprefix("sqlite:///")).parent
    if literal != folder:  # MLflow also makes a folder of the escaped name
        with suppress(OSError):
            literal.rmdir()
    return client


def log_parameters(client: Any, number: str, settings: Mapping[str, Any]) -> None:
    """Write the settings of a run as parameters of MLflow's run with this id."""
    from mlflow.entities import Param

    parameters = [Param(key, str(value)[:LONGEST_PARAMETER]) for key, value in settings.items()]
    for i in range(0, len(parameters), MOST_PARAMETERS):
        client.log_batch(number, params=parameters[i : i + MOST_PARAMETERS])


def metrics_of(rows: Iterable[tuple[int, Scalars]]) -> list[Any]:
    """Return the values of rows (step, values by key) as metrics of MLflow."""
    from mlflow.entities import Metric

    now = int(time.time() * 1000)
    return [Metric(key, value, now, step) for step, row in rows for key, value in row.items()]


def address_of(folder: Path) -> str:
    """Return the address of MLflow's database in a folder, which MLflow reads as a URL."""
    escaped = re.sub("[%?#]", lambda match: quote(match[0]), str(folder))
    return f"sqlite:///{escaped}/mlflow.db"
