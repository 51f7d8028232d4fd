"""The runs of a study of commands: their folders, states and orders to a supervisor."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepstack import config as conf
from deepstack.base import ConfigError, ResourceError, scalar
from deepstack.cli import command_line
from deepstack.config import DEPTH, SCHEME, SEED
from deepstack.records import ENDED, Run, RunFolder
from deepstack.runs import study_digest
from deepstack.sweeps import Cell, Job, Requirements
from deepstack.tools.own_trainer.command import RUN, Command
from deepstack.tools.own_trainer.command_file import CommandFile
from deepstack.tools.own_trainer.metric import read_metric
from deepstack.tools.own_trainer.processes import SUPERVISE
from deepstack.tools.own_trainer.record import (
    FILES,
    OUTPUT,
    columns_of,
    config_of,
    earlier_outputs,
    end,
    environment_of,
    scripts_of,
)
from deepstack.training import git_state, utc_now

SHORT = {DEPTH: "d", SEED: "s"}
LONGEST_NAME = 100
WHOLE_GPU = 2**50
"""A number of bytes that no GPU has twice."""


@dataclass(frozen=True, kw_only=True)
class CommandCell(Cell):
    """A run of a command.  `config` is the base of the study, of which a command reads nothing.

    file: the study.
    label: the setting's name.
    command: with names in braces.
    """

    file: CommandFile
    label: str
    command: Command

    @property
    def files(self) -> Path:
        """The folder {run}."""
        return Path(os.path.abspath(self.folder.path)) / FILES

    @property
    def arguments(self) -> list[str]:
        """The arguments of the command."""
        values = {name: self.values.get(key, 0) for name, key in self.file.keys.items()}
        return self.command.arguments(values | {RUN: str(self.files)})

    @property
    def config_text(self) -> str:
        """The content of config.yaml."""
        return conf.yaml_of(
            config_of(self.label, self.command.text, self.file.environment, self.values)
        )

    def write_config(self) -> None:
        if not self.folder.exists():
            self.folder.write_config(self.config_text)

    def claim(self) -> None:
        """Leave the folder to the supervisor, whose order names it."""

    def requirements(self, *, has_gpu: bool) -> Requirements:
        """Return one core and a whole GPU; the memory of a command is unknown."""
        return Requirements(1, 0, WHOLE_GPU if has_gpu else 0)

    def job(self, study: str, out: Path, file: str, cores: int) -> Job:
        """Return the order to a supervisor that no sweep waits for."""
        order = self.order(command_line(), {}) | {"sweep": 0}
        return Job(json.dumps(order), f"{shlex.join(SUPERVISE)} < {file}", trains=False)

    def order(self, words: str, environment: Mapping[str, str]) -> dict[str, Any]:
        """Return the order to the supervisor of the run.

        words: the command line of the sweep.
        environment: variables to add to those of this process.
        """
        place, arguments = Path.cwd(), self.arguments
        added = {"PYTHONUNBUFFERED": "1", "DEEPSTACK_RUN": str(self.files)}
        added |= {**self.file.environment, **environment}
        trainer = {
            "arguments": arguments,
            "command": self.command.text,
            "folder": str(place),
            "environment": dict(self.file.environment),
            "files": scripts_of(arguments, place),
            "resume": self.file.resume,
            **self.file.metrics(),
        }
        meta = {
            "command": words,
            "created": utc_now(),
            "environment": environment_of(arguments, os.environ | added),
            "git": git_of(place),
            "seed": self.values.get(SEED, 0),
            "study_file": {
                "file": os.path.abspath(self.file.path),
                "folder": str(place),
                "digest": study_digest(self.file.path),
                "settings": {key: self.values[key] for key in self.file.grid_keys},
            },
            "trainer": trainer,
        }
        return {
            "folder": os.path.abspath(self.folder.path),
            "arguments": arguments,
            "environment": added,
            "place": str(place),
            "config": self.config_text,
            "meta": meta,
            "columns": columns_of(self.label),
            "keep": self.file.resume,
            "label": self.label,
            "log_to": list(self.file.trackers),
            "sweep": os.getpid(),  # 0: none waits for it
        }


def plan_cells(file: CommandFile, study: conf.Study, out: Path) -> list[CommandCell]:
    """Return the runs of a study, in the order of its grid.  out: the folder of the study."""
    cells: dict[str, CommandCell] = {}
    for combination in study.combinations():
        values = combination.settings
        label, command = file.command_of(values)
        name = run_name(label, values, file.digest(values))
        folder = RunFolder(out / name)
        try:
            state = Run(folder.path).state if folder.exists() else "new"
        except ResourceError:
            state = "damaged"
        cells.setdefault(
            name,
            CommandCell(
                study.base, folder, state, 0, 0, values, file=file, label=label, command=command
            ),
        )
    return list(cells.values())


def run_name(label: str, values: Mapping[str, Any], digest: str) -> str:
    """Return the name of a run's folder: 'train-d6-lr0.001-s0-3f9a1c'."""
    parts = [label]
    for key, value in values.items():
        if key != SCHEME:
            parts.append(f"{SHORT.get(conf_key(key), conf_key(key).rpartition('.')[2])}{value}")
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", "-".join(parts)).lstrip(".-_")
    return f"{name[:LONGEST_NAME]}-{digest}"


def conf_key(key: str) -> Any:
    """Return a key of a grid as a text."""
    return key


def plan_rows(cells: list[CommandCell]) -> list[dict[str, Any]]:
    """Return a row for each run: its values, its state and its command."""
    return [
        {"run": cell.folder.name, "state": cell.state}
        | {key: scalar(value) for key, value in cell.values.items()}
        | {"command": Command(tuple(cell.arguments)).text}
        for cell in cells
    ]


def read_again(cell: CommandCell) -> None:
    """Read the values of an ended run anew if the study has another metric than the run.

    Raises ConfigError if the run is done and its output has no such value.
    """
    folder = cell.folder
    meta = folder.read_meta()
    known, metrics = meta.get("trainer", {}), cell.file.metrics()
    if "exit_code" not in known or all(known.get(key) == one for key, one in metrics.items()):
        return
    try:
        places = folder.path / OUTPUT, folder.path / FILES
        earlier = earlier_outputs(folder, known)
        read_metric(cell.file.metric, *places, known.get("since", 0), earlier)
    except ValueError as error:
        if cell.state not in ENDED:
            return  # it is run again
        raise ConfigError(
            f"metric: found another one than that of {folder.path}, which is {cell.state}, and "
            f"{error}; allowed a metric that reads it, or another study: --study NAME"
        ) from None
    with folder.lock():
        folder.write_status("running", 0)
        for path in (folder.steps_path, folder.evals_path):
            path.unlink(missing_ok=True)
        folder.write_meta(meta | {"trainer": known | metrics})
        end(folder, known["exit_code"])


def changed_scripts(cells: list[CommandCell]) -> dict[str, int]:
    """Return the scripts that ended runs had in another version, with the number of these runs."""
    counts: dict[str, int] = {}
    for cell in cells:
        if cell.state not in ENDED:
            continue
        with suppress(ResourceError):
            before = cell.folder.read_meta().get("trainer", {}).get("files", {})
            for name, digest in scripts_of(cell.arguments, Path.cwd()).items():
                if before.get(name, digest) != digest:
                    counts[name] = counts.get(name, 0) + 1
    return counts


def git_of(place: Path) -> dict[str, Any]:
    """Return commit and state of the repository around a folder; empty for none."""
    above = [place.resolve(), *place.resolve().parents]
    top = next((path for path in above if (path / ".git").exists()), None)
    return git_state(top) if top else {}
