"""A run trained again from its own record, and compared with it row by row as it goes."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from deepstack import config as conf
from deepstack import plugins
from deepstack.distributed import started_by_torchrun
from deepstack.errors import ConfigError, DifferenceError, Interrupted, NothingMatchedError
from deepstack.fast import fast_paths_of
from deepstack.interrupts import Stop
from deepstack.records import ENDED, Run, RunFolder, damage, no_run, number_text, problems
from deepstack.records.comparison import (
    Difference,
    Table,
    compared,
    differences,
    earliest,
    read_table,
    row_difference,
)
from deepstack.tasks import task_of
from deepstack.training import checkpoint as ckpt
from deepstack.training.environment import (
    choose_device,
    environment_of,
    git_state,
    torch_settings,
)
from deepstack.training.loop import train
from deepstack.training.meta import environment_changes
from deepstack.training.observer import Observer, Observers, Row, Started
from deepstack.training.preflight import refuse_probed


@dataclass(frozen=True)
class Comparison:
    """What training a run again has shown.

    differences: the first one of every file, the earliest first; empty where all is identical.
    compared: how many rows, files and tensors were.  upto: the step that the record goes to where
    its run has not ended, else None.  changes: in what the environment differs from the recorded
    one.  damage: what is wrong with the record itself.  code: the commits, where they differ.
    """

    differences: list[Difference]
    compared: dict[str, int]
    upto: int | None = None
    changes: list[str] = field(default_factory=list)
    damage: list[str] = field(default_factory=list)
    code: str = ""


def rerun(
    run: str | Path,
    *,
    out: str | Path = "results",
    observer: Observer | None = None,
    stop: Stop | None = None,
    allow_env_change: bool = False,
    command: str = "",
) -> Run:
    """Train a run again from its own record, into <out>/<study>-rerun, and return the new run.

    Raises ConfigError for another environment (unless allowed), other data or a missing plugin;
    else as `train`.
    """
    record = Run(run)
    config, _ = described(record.folder, allow_env_change)
    return train(
        config,
        study=f"{record.study}-rerun",
        out=out,
        observer=observer,
        stop=stop,
        allow_env_change=allow_env_change,
        command=command,
    )


def check(
    run: str | Path,
    *,
    observer: Observer | None = None,
    stop: Stop = lambda: None,
    allow_env_change: bool = False,
) -> Comparison:
    """Train a run again in a folder that is thrown away, up to the first row that differs.

    A run that has not ended is compared as far as its rows go.  Compared are steps.csv, evals.csv,
    attribution.csv, the layers and the checkpoint that both have, byte for byte.  Raises as
    `rerun`, and NothingMatchedError where the record has no row.
    """
    record = RunFolder(run)
    config, changes = described(record, allow_env_change)
    state = record.read_status().get("state")
    upto = None if state in ENDED else last_step(record)
    # Checkpoints on the way are of no use, and how often they are made changes no number.
    config = conf.with_overrides(config, {"runtime.checkpoint_seconds": 1e9})
    watch = Watch(record, observer or Observer(), upto, stop)
    with tempfile.TemporaryDirectory(prefix="deepstack-") as folder:
        end = float("inf") if upto is None else upto - 1.0
        try:
            train(
                config,
                study="rerun",
                out=folder,
                observer=watch,
                stop=watch.asked,
                allow_env_change=True,
            )
        except _Parted:
            assert watch.parted is not None and watch.parted.step is not None
            end = watch.parted.step - 1.0
        except Interrupted as error:
            if not watch.reached:
                raise Interrupted(
                    f"interrupted at step {watch.step}, identical so far; nothing is kept",
                    error.exit_code - 128,
                ) from None
        assert watch.folder is not None
        found = differences(record, watch.folder, end)
        count = compared(record, watch.folder)
        if watch.parted is None:
            more, count["tensors"] = ends(record, watch.folder, whole=upto is None)
            found += more
        elif watch.parted not in found:  # a row that the record does not have
            found = sorted([watch.parted, *found], key=earliest)
    return Comparison(
        found,
        {name: number for name, number in count.items() if number},
        upto,
        changes,
        problems(record),
        other_code(record.read_meta()),
    )


def described(folder: RunFolder, allow_env_change: bool) -> tuple[conf.Config, list[str]]:
    """A run's configuration, and in what this environment differs from the recorded one.

    Raises ConfigError where that, the data or a plugin is not what the run was made with.
    """
    if not folder.exists():
        raise ConfigError(no_run(folder.path))
    if started_by_torchrun():
        raise ConfigError("rerun: found several processes (torchrun); allowed one")
    refuse_probed(folder)
    meta = folder.read_meta()
    if "environment" not in meta:
        raise NothingMatchedError(f"{folder.path} has no record of its environment in meta.json")
    plugins.require_plugins(meta.get("plugins", []), str(folder.path))
    config = conf.load_config(folder.config_path)
    data, known = task_of(config).data, meta.get("data", {})
    if data.get("sha256") != known.get("sha256"):
        raise ConfigError(
            f"{folder.path} was trained on other data: sha256 was {known.get('sha256')}, "
            f"is {data.get('sha256')} ({data.get('name')})"
        )
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
    """How far the rows of a run go.  Raises NothingMatchedError where there is none."""
    last = read_table(record.steps_path).last
    if last is None and read_table(record.evals_path).last is None:
        raise NothingMatchedError(f"{record.path} has no row yet to compare with")
    return last or 0


def other_code(meta: Mapping[str, Any]) -> str:
    """'commit a, now b' where the recorded commit is not the present one, or either was dirty."""
    known, now = meta.get("git") or {}, git_state()
    if known == now and not now.get("dirty"):
        return ""
    names = [
        f"{str(git.get('commit'))[:12]}{' with changes' if git.get('dirty') else ''}"
        if git
        else "of no commit"
        for git in (known, now)
    ]
    return f"{names[0]}, now {names[1]}"


class _Parted(DifferenceError):
    """A row differs from the recorded one: there is nothing more to be learnt from training on."""


class Watch(Observers):
    """Compares every row with the recorded one, and passes every event on."""

    def __init__(self, record: RunFolder, inner: Observer, upto: int | None, stop: Stop) -> None:
        super().__init__(inner)
        self.upto, self.stop = upto, stop
        self.steps, self.evals = read_table(record.steps_path), read_table(record.evals_path)
        self.folder: RunFolder | None = None
        self.parted: Difference | None = None
        self.step = 0
        self.reached = False
        self._asked = 0

    def asked(self) -> int | None:
        """The stop request: the user's own, or that the record goes no further."""
        self._asked += 1
        if (signal_number := self.stop()) is not None:
            return signal_number
        self.reached = self.upto is not None and self._asked >= self.upto
        return int(signal.SIGTERM) if self.reached else None

    def compare(self, file: str, table: Table, step: int, row: Row) -> None:
        """Stop at the first difference; rows that are missing here are seen at the end."""
        if step in table.rows:
            texts = {name: number_text(value) for name, value in row.items()}
            found = row_difference(table.rows[step], texts)
        else:
            found = None if self.upto is not None else ("the row", "not there", "there")
        if found:
            self.parted = Difference(step, file, *found)
            raise _Parted(self.parted.place)

    def started(self, run: Started) -> None:
        self.folder = run.folder
        super().started(run)

    def stepped(self, step: int, row: Row) -> None:
        self.step = step
        super().stepped(step, row)
        self.compare("steps.csv", self.steps, step, row)

    def evaluated(self, step: int, row: Row) -> None:
        super().evaluated(step, row)
        self.compare("evals.csv", self.evals, step, row)

    def finished(self, state: str, step: int) -> None:
        if self.reached:
            self.notify(f"the record goes to step {step}")
        else:
            super().finished(state, step)


def ends(old: RunFolder, new: RunFolder, whole: bool) -> tuple[list[Difference], int]:
    """How the ends of two runs differ, and how many tensors of them were compared.

    Compared are their states, where the record is whole, and the newest checkpoint of a step of
    which both have one.
    """
    found: list[Difference] = []
    was, now = old.read_status(), new.read_status()
    at = int(now["step"])
    if whole and was.get("state") != now["state"]:
        found.append(Difference(at, "status.json", "state", str(was.get("state")), now["state"]))
    step = max({*old.checkpoints()} & {*new.checkpoints()}, default=None)
    if step is None:
        if whole and now["state"] == "done":
            found.append(Difference(at, f"checkpoint/{at}", "the folder", "not there", "there"))
        return found, 0
    file = f"checkpoint/{step}"
    try:
        problem = damage(old.checkpoint_path(step))
        one = {} if problem else ckpt.load(old.checkpoint_path(step)).parts
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        problem, one = str(error), {}
    if problem:
        return [*found, Difference(step, file, "the folder", problem, "whole")], 0
    two = ckpt.load(new.checkpoint_path(step)).parts
    names = [
        (part, key)
        for part in sorted(one.keys() & two.keys(), reverse=True)  # the weights first
        for key in sorted({*one[part], *two[part]})
    ]
    for part, key in names:
        if said := tensor_difference(one[part].get(key), two[part].get(key)):
            return [*found, Difference(step, f"{file}/{part}.safetensors", key, *said)], len(names)
    return found, len(names)


def tensor_difference(old: Tensor | None, new: Tensor | None) -> tuple[str, str] | None:
    """Both values of the first element whose bits differ, or None."""
    if old is None or new is None or old.shape != new.shape or old.dtype != new.dtype:
        return ckpt.shape_of(old), ckpt.shape_of(new)
    one, two = ckpt.bits(old), ckpt.bits(new)
    if torch.equal(one, two):
        return None
    place = int((one != two).nonzero()[0]) // old.element_size()
    at = [int(i) for i in torch.unravel_index(torch.tensor(place), old.shape)]
    values = (t.flatten()[place].item() for t in (old, new))
    first, second = (f"{value!r} at {at}" for value in values)
    return first, second
