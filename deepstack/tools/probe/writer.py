"""Writes the run folder of an external probe, and opens it again to go on from a step."""

import math
import re
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepstack import config as conf
from deepstack.base import ChangedLogError, ConfigError
from deepstack.config import flatten, yaml_reader
from deepstack.records import RunFolder, extent, read, rewrite_end, write_end
from deepstack.runs import SPIKES_COLUMNS, SPIKES_LOG
from deepstack.training import (
    Divergence,
    LayerRecords,
    Observer,
    Recorder,
    column_entries,
    is_due,
    is_out_of_memory,
    open_logs,
    sync_logs,
    utc_now,
)

OF_EVERY_PROBE = ("steps", "timing", "attribution", SPIKES_LOG)
LOGGED = "logged"
"""Stem of the files with the values of `probe.log`."""
MAY_DIFFER = ("train.lr", "train.weight_decay")
"""Settings that a loop may change before it goes on."""


class Writer:
    """Writes one run folder, from the start or from a step on, until `end`.

    stack: closes the lock and the logs.
    recorder: rows of steps.csv and timing.csv.
    records: snapshots of layers.
    """

    def __init__(self, folder: RunFolder, stack: ExitStack) -> None:
        self.folder, self._stack = folder, stack.enter_context(ExitStack())
        self._stack.enter_context(folder.lock())
        self.records = LayerRecords(folder)

    def begin(self, config: dict[str, Any], meta: dict[str, Any], columns: dict[str, Any]) -> None:
        """Write config, description and state of a new run; raise ConfigError if there is one."""
        if self.folder.exists():
            raise ConfigError(
                f"{self.folder.path} holds a run already; give another name with out=, or, to go "
                "on with it, probe.load_state_dict(…) before `with probe`"
            )
        self.folder.write_config(conf.yaml_of(config))
        self.folder.write_meta(meta)
        self.folder.write_columns(columns)
        self.folder.write_status("running", 0)

    def resume(self, config: dict[str, Any], environment: dict[str, Any], at: int) -> None:
        """Go on with the run after step `at`: remove later rows and snapshots, which follow again.

        Raises ConfigError for a folder without this run, and if it ends before that step.
        """
        folder = self.folder
        if not folder.exists():
            raise ConfigError(
                f"{folder.path} holds no run, but the loaded state is of step {at}; give the "
                "folder in which the run began with out="
            )
        refuse_other_settings(folder, config)
        every = config["log"]["every"]
        last = next((s for s in range(at, 0, -1) if s == 1 or is_due(every, s)), 0)
        there = extent(folder.steps_path, at).last_step or 0
        if there < last and divergence_of(folder) is None:
            raise ConfigError(
                f"{folder.steps_path} ends at step {there}, but the loaded state is of step {at}; "
                f"allowed a state of step {there} or before, or another folder with out="
            )
        for path in own_logs(folder):
            rewrite_end(path, extent(path, at).size, below=folder.path)
        self._load_records(at)
        meta = folder.read_meta()
        resumed = {"time": utc_now(), "step": at, "environment": environment}
        folder.write_meta(meta | {"resumed": [*meta.get("resumed", []), resumed]})
        folder.write_status("running", at)

    def _load_records(self, at: int) -> None:
        names = self.folder.layer_names()
        if not names:
            return
        values: dict[str, Tensor] = {}
        for name in names:
            steps, layers = self.folder.read_layers(name)
            kept = steps <= at
            values[name] = torch.from_numpy(layers[kept])
            values["steps"] = torch.from_numpy(steps[kept])
        self.records.load(values)

    def open(
        self, attribution: Iterable[str], device: torch.device, at: int, *, spikes: bool
    ) -> None:
        """Open the logs after step `at`; attribution: the columns of attribution.csv, or none.

        spikes: whether there is a log of spikes.
        """
        columns = {"attribution": tuple(attribution)} if attribution else {}
        columns |= {SPIKES_LOG: tuple(SPIKES_COLUMNS)} if spikes else {}
        for path in own_logs(self.folder):
            line = (read(path) or b"").partition(b"\n")[0]
            if path.stem not in OF_EVERY_PROBE and line:
                columns[path.stem] = tuple(line.decode().split(","))
        self.logs = open_logs(self.folder, columns, self._stack, at)
        # every finite loss is allowed: its bound is unknown; a precision scaler leaves out a step
        # whose gradients are not finite
        self.recorder = Recorder(
            self.logs, device, torch.finfo(torch.float64).max, Observer(), ("model_update",)
        )
        self.recorder.divergence = divergence_of(self.folder)

    @property
    def is_writing(self) -> bool:
        """Return whether the run has not diverged."""
        return self.recorder.divergence is None

    def log(self, step: int, caller: str, values: Mapping[str, Any]) -> None:
        """Add a row to the log that has these columns; a new set of names begins a new log.

        Raises ConfigError for other values than numbers, and for a second row of a step.
        """
        numbers = {name: number(f"{caller}: {name}", value) for name, value in values.items()}
        names = ("step", *numbers)
        stem = "evals" if caller == "probe.evaluate" else self._stem(caller, names)
        if stem not in self.logs:
            self.logs[stem] = self._stack.enter_context(self.folder.log(stem, names))
            if stem != "evals":
                self._describe(numbers)
        log = self.logs[stem]
        if log.last_step is not None and log.last_step >= step:
            raise ConfigError(
                f"{caller}: {self.folder.csv_path(stem)} has a row of step {step} already; "
                "allowed one row a step"
            )
        log.write({"step": step, **numbers})

    def _stem(self, caller: str, names: tuple[str, ...]) -> str:
        """Return the stem of the log with these columns; raise ConfigError for a wrong name."""
        known = {n: s for s, log in self.logs.items() for n in log.columns if s != "evals"}
        mine = {s: log for s, log in self.logs.items() if s.startswith(LOGGED)}
        for stem, log in mine.items():
            if set(log.columns) == set(names):
                return stem
        for name in names[1:]:
            if not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
                raise ConfigError(
                    f"{caller}: found the name {name!r}; allowed letters, digits and _ . -"
                )
            if name in known:
                other = ", ".join(self.logs[known[name]].columns)
                raise ConfigError(
                    f"{caller}: {name} is a column of {known[name]}.csv ({other}); allowed another "
                    "name, or all the names of an earlier call"
                )
        return f"{LOGGED}_{len(mine) + 1}" if mine else LOGGED

    def _describe(self, names: Iterable[str]) -> None:
        """Add the columns of a new log to columns.json."""
        columns = self.folder.read_columns()
        given = {name: (name, "", "What probe.log was given after step t.") for name in names}
        self.folder.write_columns(columns | {"columns": columns["columns"] | column_entries(given)})

    def sync(self) -> None:
        """Write all pending rows and snapshots to the disk."""
        self.recorder.flush()
        sync_logs(self.logs.values())
        self.records.write()
        self.recorder.pause()

    def _last_evaluation(self) -> Divergence | None:
        """Return the divergence of a run whose last validation loss is not finite, or None."""
        names, *rows = (read(self.folder.evals_path) or b"").decode().splitlines() or [""]
        if names != "step,loss" or not rows:  # none, or a file of the user's
            return None
        step, loss = rows[-1].split(",")
        value = float(loss or "nan")
        return None if math.isfinite(value) else Divergence(int(step), "val_loss", value)

    def end(self, at: int, error: BaseException | None) -> None:
        """Write the rest and how the run has ended.  Raises ChangedLogError for a changed log."""
        folder = self.folder
        self.recorder.flush()
        try:
            sums = sync_logs(self.logs.values(), ended=True)
        except ChangedLogError as changed:
            write_end(folder, "failed", at, error=str(changed))
            raise
        self.records.write()
        divergence = self.recorder.divergence or (None if error else self._last_evaluation())
        if divergence is not None:
            write_end(folder, "diverged", divergence.step, logs=sums, **divergence.facts())
        elif error is None:
            write_end(folder, "done", at, logs=sums)
        elif not isinstance(error, Exception):  # Ctrl-C, sys.exit
            write_end(folder, "interrupted", at)
        else:
            state = "out_of_memory" if is_out_of_memory(error) else "failed"
            write_end(folder, state, at, error=repr(error))


def own_logs(folder: RunFolder) -> list[Path]:
    """Return the paths of the logs that a probe has written; a user may have put others there."""
    pattern = rf"({'|'.join(OF_EVERY_PROBE)}|evals|{LOGGED}(_\d+)?)\.csv"
    return [path for path in folder.path.glob("*.csv") if re.fullmatch(pattern, path.name)]


def number(name: str, value: Any) -> float:
    """Return a number or a tensor with one; raise ConfigError for anything else."""
    try:
        return float(value.detach() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        found = type(value).__name__
        raise ConfigError(
            f"{name}: found {found}; allowed a number, or a tensor with one"
        ) from None


def divergence_of(folder: RunFolder) -> Divergence | None:
    """Return the divergence in the last row of steps.csv, which nothing follows."""
    row = folder.last_row()
    for name in ("loss", "model_update") if row else ():
        if not abs(float(row[name])) < float("inf"):
            return Divergence(int(row["step"]), name, float(row[name]))
    return None


def refuse_other_settings(folder: RunFolder, config: dict[str, Any]) -> None:
    """Raise ConfigError if the run in a folder has another setting than the probe."""
    written = yaml_reader.read(conf.yaml_of(config), "config")[0].plain()
    there, now = (dict(flatten(c)) for c in (folder.read_config(), written))
    for key in {**there, **now}:
        if key not in MAY_DIFFER and there.get(key) != now.get(key):
            raise ConfigError(
                f"{folder.path}: {key}: the run has {there.get(key)}, the probe {now.get(key)}; "
                "allowed the arguments with which the run began"
            )
