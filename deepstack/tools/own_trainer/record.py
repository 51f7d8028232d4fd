"""The run folder of a command: its description at the start, its values and state at the end.

config.yaml  meta.json  columns.json  status.json  checksums.json     as of every run
output.txt                 stdout and stderr of the command
evals.csv                  the metric: step, loss
steps.csv                  the training loss, where the study has a pattern of it
files/                     {run}: what the command writes; no checksums
aside/<n>-output.txt       outputs of earlier starts
"""

from __future__ import annotations

import math
import platform
import shlex
import shutil
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import deepstack
from deepstack import config as conf
from deepstack.config import nested
from deepstack.records import CHECKSUMS, STEPS_COLUMNS, RunFolder, sha256, write_end
from deepstack.records import files as on_disk
from deepstack.tools.own_trainer.external import adopt_probe
from deepstack.tools.own_trainer.metric import (
    Pattern,
    Value,
    from_json,
    lines_of,
    read_metric,
)

OUTPUT, FILES = "output.txt", "files"
STEP = STEPS_COLUMNS["step"]
METRIC_COLUMNS = {
    "step": STEP,
    "loss": ("L", "", "The metric of the study, read from the output or a file of the command."),
}
LOSS_COLUMN = {"loss": ("L", "", "The training loss, read from the output of the command.")}
VARIABLES = (
    "CONDA_PREFIX", "CUDA_VISIBLE_DEVICES", "MKL_NUM_THREADS", "OMP_NUM_THREADS", "PYTHONHASHSEED",
    "PYTHONPATH", "VIRTUAL_ENV",
)  # fmt: skip
"""The variables that meta.json has beside those of the study: others may be secret."""
LARGEST_SCRIPT = 2**20  # bytes of a file among the arguments whose sha256 is recorded


def config_of(
    label: str, command: str, environment: Mapping[str, str], values: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the content of config.yaml: the settings of a run, nested by section.

    label: the setting's name; command: before its names have values.
    environment: variables of the study; others of theirs make another setting.
    values: of the settings, by dotted key.
    """
    known: dict[str, Any] = {"seed": 0, "model.scheme": label, "model.depth": 0}
    known |= {"task.name": "unnamed"} | dict(values)
    known |= {"model.scheme_options.command": command}
    if environment:
        variables = shlex.join(f"{name}={value}" for name, value in environment.items())
        known |= {"model.scheme_options.environment": variables}
    return nested(known)


def environment_of(arguments: Sequence[str], variables: Mapping[str, str]) -> dict[str, Any]:
    """Return the environment of a run for meta.json.  variables: all of the command's."""
    return {
        "deepstack": deepstack.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "cores": conf.cores(),
        "executable": shutil.which(arguments[0], path=variables.get("PATH")) or arguments[0],
        "variables": {name: variables[name] for name in VARIABLES if name in variables},
    }


def scripts_of(arguments: Sequence[str], folder: Path) -> dict[str, str]:
    """Return the sha256 of each small file among the arguments, such as train.py."""
    found = {}
    for word in arguments[1:]:
        with suppress(OSError, ValueError):
            path = folder / word
            if path.is_file() and path.stat().st_size <= LARGEST_SCRIPT:
                found[word] = sha256(path)
    return found


def columns_of(label: str) -> dict[str, Any]:
    """Return the content of columns.json."""
    return {
        "columns": entries(METRIC_COLUMNS),
        "layers": {},
        "scheme": {"name": label, "label": label},
        "references": {},
    }


def entries(table: Mapping[str, tuple[str, str, str]]) -> dict[str, dict[str, str]]:
    """Return the entries of columns.json for name -> (symbol, unit, description)."""
    keys = ("symbol", "unit", "description")
    return {name: dict(zip(keys, row, strict=True)) for name, row in table.items()}


def begin(
    folder: RunFolder, config: str, meta: dict[str, Any], columns: dict[str, Any], *, keep: bool
) -> Path:
    """Write the description of a run that begins, and return {run}, an empty folder.

    keep: whether {run} keeps its files of an earlier start.  The caller holds the lock.
    """
    if (folder.path / OUTPUT).is_file() and (folder.path / OUTPUT).stat().st_size:
        folder.set_aside(OUTPUT)
    files = folder.path / FILES
    if not keep and files.exists():
        shutil.rmtree(files)
    for path in (folder.steps_path, folder.evals_path, folder.path / CHECKSUMS):
        path.unlink(missing_ok=True)
    before = folder.read_meta() if folder.meta_path.exists() else {}
    if "created" in before:
        started = {"time": meta["created"], "git": meta["git"]}
        meta = meta | {
            "created": before["created"],
            "resumed": [*before.get("resumed", []), started],
        }
    folder.write_config(config)
    folder.write_meta(meta)
    folder.write_columns(columns)
    on_disk.replace(folder.path / OUTPUT, b"")
    on_disk.make_folder(files)
    folder.write_status("running", 0)
    return files


def end(folder: RunFolder, exit_code: int) -> str:
    """Write the values and the state of a run whose command has ended; return why it failed, or ''.

    It is done if the command ended with 0 and the last value of the metric is finite.  It has
    diverged if the last value of the metric or of the loss is not finite.  The caller holds the
    lock.
    """
    meta = folder.read_meta()
    known = meta["trainer"]
    output, why, earlier = folder.path / OUTPUT, "", earlier_outputs(folder, known)
    since = folder.status_path.stat().st_mtime_ns
    values: list[Value] = []
    metric, loss = from_json(known["metric"]), from_json(known["loss"])
    assert metric is not None
    try:
        values = read_metric(
            metric, output, folder.path / FILES, known.get("since", since), earlier
        )
    except ValueError as error:
        why = str(error)
    losses = loss.values(lines_of(*earlier, output)) if isinstance(loss, Pattern) else []
    diverged = any(rows and not math.isfinite(rows[-1].value) for rows in (values, losses))
    if exit_code:
        why = f"the command ended with exit code {exit_code}{last_line(output)}"
        if exit_code < 0:
            why = f"the command was killed by signal {-exit_code}{last_line(output)}"
    known |= {"exit_code": exit_code, "since": since, "values": len(values)}
    folder.write_meta(meta | {"trainer": known})
    if why and not diverged:
        write_end(folder, "failed", 0, error=why)
        return why
    problem = adopt_probe(folder, folder.path / FILES)
    if problem and not diverged:
        write_end(folder, "failed", 0, error=problem)
        return problem
    if folder.steps_path.exists():  # the probe's
        diverged |= not math.isfinite(float(folder.last_row().get("loss") or 0))
    else:
        write_rows(folder.steps_path, losses or [Value(v.step, math.nan) for v in values])
        columns = folder.read_columns()
        columns["columns"] = columns["columns"] | entries(LOSS_COLUMN if losses else {})
        folder.write_columns(columns)
    write_rows(folder.evals_path, values)
    step = int(folder.last_row().get("step", 0))
    write_end(folder, "diverged" if diverged else "done", step)
    return ""


def earlier_outputs(folder: RunFolder, trainer: Mapping[str, Any]) -> list[Path]:
    """Return the outputs of the starts that a run continues, in their order; none without `resume`.

    trainer: of meta.json.
    """
    if not trainer.get("resume"):
        return []
    found = (folder.path / "aside").glob(f"*-{OUTPUT}")
    numbered = [(int(path.name.split("-")[0]), path) for path in found]
    return [path for _, path in sorted(numbered)]


def write_rows(path: Path, values: Sequence[Value]) -> None:
    """Write a log with the columns step and loss."""
    cells = ("" if math.isnan(value) else repr(value) for _, value in values)
    rows = (f"{value.step},{cell}\n" for value, cell in zip(values, cells, strict=True))
    on_disk.replace(path, "".join(["step,loss\n", *rows]).encode())


def last_line(output: Path) -> str:
    """Return ': ' and the last line of an output that says something, or ''."""
    last = ""
    for line in lines_of(output):
        last = line.strip() or last
    return f": {last[:200]}" if last else ""
