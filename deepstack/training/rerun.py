"""Trains a run again from its own record and compares the two row by row."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepstack import config as conf
from deepstack.distributed import started_by_torchrun
from deepstack.errors import ConfigError, Interrupted, NothingMatchedError
from deepstack.fast import fast_paths_of
from deepstack.interrupts import Stop
from deepstack.plugins import require_plugins
from deepstack.records import ENDED, RunFolder, existing_run, number_text, problems
from deepstack.records.comparison import (
    Difference,
    compared,
    differences,
    read_rows,
    row_difference,
)
from deepstack.records.published import is_published
from deepstack.tasks import task_of
from deepstack.training import checkpoint as ckpt
from deepstack.training.environment import (
    choose_device,
    environment_changes,
    environment_of,
    git_state,
    torch_settings,
)
from deepstack.training.extension import inexact_parent
from deepstack.training.observer import Observer, Observers, Row
from deepstack.training.preflight import refuse_probed
from deepstack.training.run import train
from deepstack.training.start import changed_source


@dataclass(frozen=True)
class Comparison:
    """The result of training a run again.

    differences: the first one of every file, the earliest first; empty if all is identical.
    compared: the number of compared rows, files and tensors.  upto: the last recorded step of a run
    that has not ended, else None.  changes: differences between the environments.  damage: problems
    of the record itself.  code: both commits, if they differ.
    """

    differences: list[Difference]
    compared: dict[str, int]
    upto: int | None = None
    changes: list[str] = field(default_factory=list)
    damage: list[str] = field(default_factory=list)
    code: str = ""


def check(
    run: str | Path,
    *,
    observer: Observer | None = None,
    stop: Stop = lambda: None,
    allow_env_change: bool = False,
) -> Comparison:
    """Train a run again in a temporary folder, up to the first row that differs.

    Compares the logs but timing.csv, the layers and the newest common checkpoint, byte for byte;
    for a run that has not ended, up to its last row.  Raises the errors of `train` and
    `recorded_config`, and NothingMatchedError for a record without rows.
    """
    record = RunFolder(run)
    config, changes = recorded_config(record, allow_env_change)
    state = record.read_status().get("state")
    upto = None if state in ENDED else last_step(record)
    # Only the last checkpoint is of use, and their interval changes no number.
    config = conf.with_overrides(config, {"runtime.checkpoint_seconds": 1e9})
    comparer = Comparer(record, observer or Observer(), upto, stop)
    end = float("inf") if upto is None else upto - 1.0
    with tempfile.TemporaryDirectory(prefix="deepstack-") as out:
        try:
            train(
                config,
                study="rerun",
                out=out,
                observer=comparer,
                stop=comparer.stop_signal,
                allow_env_change=True,
            )
        except Interrupted as error:
            if not comparer.is_over:
                raise Interrupted(
                    f"interrupted at step {comparer.completed}, identical so far; nothing is kept",
                    error.exit_code - 128,
                ) from None
            end = min(end, comparer.completed)
        (path,) = Path(out, "rerun").iterdir()
        repeated = RunFolder(path)
        places = differences(record, repeated, end)
        count = compared(record, repeated)
        if not comparer.differs:
            more, count["tensors"] = end_differences(record, repeated, ended=upto is None)
            places += more
    return Comparison(
        places,
        {name: number for name, number in count.items() if number},
        upto,
        changes,
        problems(record),
        other_code(record.read_meta()),
    )


def recorded_config(folder: RunFolder, allow_env_change: bool) -> tuple[conf.Config, list[str]]:
    """Return a run's config, to train it again, and the changes of the environment since.

    Raises ConfigError for a changed environment (unless allowed), other data or a missing plugin.
    """
    existing_run(folder.path)
    if started_by_torchrun():
        raise ConfigError("rerun: found several processes (torchrun); allowed one")
    refuse_probed(folder)
    meta = folder.read_meta()
    if "environment" not in meta:
        raise NothingMatchedError(f"{folder.path} has no record of its environment in meta.json")
    require_plugins(meta.get("plugins", []), str(folder.path))
    if extends := inexact_parent(folder):
        raise ConfigError(
            f"{folder.path} extends {extends.get('run')} after step {extends.get('step')} under "
            "another schedule, so its config alone does not repeat it; rerun that run instead"
        )
    config = conf.load_config(folder.config_path)
    if changed := changed_source({"data": {}} | meta, task_of(config).data, config):
        key, source, was, is_now = changed
        other = "began with other weights" if key == "model.start" else "was trained on other data"
        raise ConfigError(f"{folder.path} {other}: sha256 was {was}, is {is_now} ({source})")
    device = choose_device(config.runtime)
    with torch_settings(config, device) as threads:
        now = environment_of(config, device, threads, fast_paths_of(config, device))
    changes = environment_changes(meta["environment"], now)
    if "environment_changed" in meta:
        changes.append("parts of it were made in different ones (environment_changed)")
    if changes and not allow_env_change:
        raise ConfigError(
            f"{folder.path} was made in another environment: {'; '.join(changes)}\n"
            "its numbers need not come out again; to see how far they do: --allow-env-change"
        )
    return config, changes


def last_step(record: RunFolder) -> int:
    """Return the step of the last recorded row.  Raises NothingMatchedError if there is no row."""
    rows = read_rows(record.steps_path)
    if not rows and not read_rows(record.evals_path):
        raise NothingMatchedError(f"{record.path} has no row yet to compare with")
    return rows[-1][0] if rows else 0


def other_code(meta: Mapping[str, Any]) -> str:
    """Return 'commit a, now b' unless both commits are equal and clean, then ''."""
    known, now = meta.get("git") or {}, git_state()
    if known == now and not now.get("dirty"):
        return ""
    return f"{commit_text(known)}, now {commit_text(now)}"


def commit_text(git: Mapping[str, Any]) -> str:
    """Return a commit in words, from commit and dirty flag."""
    if not git:
        return "of no commit"
    return f"{str(git.get('commit'))[:12]}{' with changes' if git.get('dirty') else ''}"


class Comparer(Observers):
    """Passes every event on; stops after the first row that differs, or the last recorded step.

    The final comparison names the difference, and rows that only the record has.
    """

    def __init__(self, record: RunFolder, inner: Observer, upto: int | None, stop: Stop) -> None:
        super().__init__(inner)
        self.upto, self.stop = upto, stop
        self.steps = dict(read_rows(record.steps_path))
        self.evals = dict(read_rows(record.evals_path))
        self.completed = 0
        self.differs = self.is_over = False

    def stop_signal(self) -> int | None:
        """Return the user's signal to stop, SIGTERM to end the comparison, or None.

        The loop calls this once after every step.
        """
        self.completed += 1
        self.is_over = self.differs or self.completed == self.upto
        return int(signal.SIGTERM) if self.is_over else self.stop()

    def compare(self, rows: Mapping[int, Mapping[str, str]], step: int, row: Row) -> None:
        """Compare a row with the recorded one, if there is one or the recorded run has ended."""
        if step in rows:
            texts = {name: number_text(value) for name, value in row.items()}
            self.differs |= row_difference(rows[step], texts) is not None
        else:
            self.differs |= self.upto is None

    def stepped(self, step: int, row: Row) -> None:
        self.pass_on("stepped", step, row)
        self.compare(self.steps, step, row)

    def evaluated(self, step: int, row: Row) -> None:
        self.pass_on("evaluated", step, row)
        self.compare(self.evals, step, row)

    def finished(self, state: str, step: int) -> None:
        if not self.is_over:
            self.pass_on("finished", state, step)
        elif not self.differs:
            self.pass_on("notify", f"the record goes to step {step}")


def end_differences(old: RunFolder, new: RunFolder, ended: bool) -> tuple[list[Difference], int]:
    """Return the differences between the ends of two runs, and the number of compared tensors.

    Compares the states if the recorded run has ended, and the newest checkpoint of the same step.
    """
    places: list[Difference] = []
    was, now = old.read_status(), new.read_status()
    at = int(now["step"])
    if ended and was.get("state") != now["state"]:
        places.append(Difference(at, "status.json", "state", str(was.get("state")), now["state"]))
    step = max({*old.checkpoints()} & {*new.checkpoints()}, default=None)
    if step is None:
        if ended and now["state"] == "done" and not is_published(old.path):
            places.append(Difference(at, f"checkpoint/{at}", "the folder", "not there", "there"))
        return places, 0
    file = f"checkpoint/{step}"
    try:
        one = ckpt.load(old.checkpoint_path(step), step).parts
    except ValueError as error:
        return [*places, Difference(step, file, "the folder", str(error), "whole")], 0
    two = ckpt.load(new.checkpoint_path(step), step).parts
    names = [
        (part, key)
        for part in sorted(one.keys() & two.keys(), reverse=True)  # the weights first
        for key in sorted({*one[part], *two[part]})
    ]
    for part, key in names:
        if values := tensor_difference(one[part].get(key), two[part].get(key)):
            where_different = Difference(step, f"{file}/{part}.safetensors", key, *values)
            return [*places, where_different], len(names)
    return places, len(names)


def tensor_difference(old: Tensor | None, new: Tensor | None) -> tuple[str, str] | None:
    """Return both values of the first element whose bits differ, or None."""
    if old is None or new is None or old.shape != new.shape or old.dtype != new.dtype:
        return ckpt.shape_of(old), ckpt.shape_of(new)
    one, two = ckpt.bits(old), ckpt.bits(new)
    if torch.equal(one, two):
        return None
    index = int((one != two).nonzero()[0]) // old.element_size()
    at = [int(i) for i in torch.unravel_index(torch.tensor(index), old.shape)]
    values = (t.flatten()[index].item() for t in (old, new))
    first, second = (f"{value!r} at {at}" for value in values)
    return first, second
