"""Trains a run again from its own record and compares the two.

The new run has the rows of the record's logs before it starts.  As in a resumed run, each row is
then compared when it is written: the first difference ends the training.
"""

import signal
import tempfile
from dataclasses import dataclass
from pathlib import Path

from deepstack import config as conf
from deepstack.base import torchrun
from deepstack.base.ending import Stop
from deepstack.base.errors import (
    ConfigError,
    DifferenceError,
    Interrupted,
    NothingMatchedError,
    ResourceError,
)
from deepstack.fast.distributed import started_by_torchrun
from deepstack.records import ENDED, RunFolder, existing_run
from deepstack.records.files import read, replace
from deepstack.records.published import is_published
from deepstack.training import checkpoint as ckpt
from deepstack.training.observer import Observer
from deepstack.training.parts.extension import (
    Parent,
    inexact_extension,
    recorded_config,
    recorded_logs,
)
from deepstack.training.plan import RunPlan
from deepstack.training.recorder import TOLERANCE
from deepstack.training.run import train


@dataclass(frozen=True)
class Record(Parent):
    """A run to train again.  compared: whether its rows must equal the record's."""

    compared: bool = False

    def enter(self, plan: RunPlan, folder: RunFolder) -> None:
        """Copy the logs with which the new run is compared."""
        super().enter(plan, folder)
        for path in recorded_logs(self.folder) if self.compared else ():
            replace(folder.path / path.name, read(path) or b"")


def record_of(run: str | Path, *, compared: bool = False) -> Record:
    """Return a run to train again.  Raises ConfigError if its config alone does not repeat it."""
    folder = existing_run(run)
    if started_by_torchrun():
        raise ConfigError(
            "rerun: found several processes (torchrun); allowed one, so first: "
            f"unset {' '.join(torchrun.NEEDED)}"
        )
    config = recorded_config(folder)
    if "environment" not in folder.read_meta():
        raise NothingMatchedError(f"{folder.path} has no record of its environment in meta.json")
    if extends := inexact_extension(folder.read_meta().get("extends")):
        raise ConfigError(
            f"{folder.path} extends {extends.get('run')} after step {extends.get('step')} under "
            "another schedule or with its validation set, so its config alone does not repeat it; "
            "rerun that run instead"
        )
    if compared:  # only the last checkpoint is compared, and their interval changes no number
        config = conf.with_overrides(config, {"runtime.checkpoint_seconds": 1e9})
    return Record(folder, config, compared=compared)


def check(
    run: str | Path,
    *,
    observer: Observer | None = None,
    stop: Stop = lambda: None,
    allow_env_change: bool = False,
) -> str:
    """Train a run again in a temporary folder and return the identical parts in words.

    Compares the logs but timing.csv, the layers and the newest common checkpoint, byte for byte;
    for a run that has not ended, up to its last row.  Raises DifferenceError, the errors of
    `train` and `record_of`, and NothingMatchedError for a record without rows.
    """
    record = record_of(run, compared=True)
    ended = record.folder.read_status().get("state") in ENDED
    last = int(record.folder.last_row().get("step", 0))
    if not ended and not last:
        raise NothingMatchedError(f"{record.folder.path} has no row yet to compare with")
    completed = 0

    def stop_signal() -> int | None:
        nonlocal completed
        completed += 1
        return signal.SIGTERM if completed == last and not ended else stop()

    with tempfile.TemporaryDirectory(prefix="deepstack-") as out:
        try:
            train(
                record.config,
                study="rerun",
                out=out,
                observer=observer or Observer(),
                stop=stop_signal,
                allow_env_change=allow_env_change,
                parent=record,
            )
        except Interrupted as error:
            if completed != last or ended:
                raise Interrupted(
                    f"interrupted at step {completed}, identical so far; nothing is kept",
                    error.exit_code - 128,
                ) from None
        except DifferenceError as error:
            (path,) = Path(out, "rerun").iterdir()
            # without the advice on the temporary run
            problem = str(error.__cause__ or error).replace(f"{path}/", "")
            raise not_reproduced(record.folder, problem) from error
        (path,) = Path(out, "rerun").iterdir()
        if difference := later_difference(record.folder, RunFolder(path), ended):
            raise not_reproduced(record.folder, difference)
        names = [file.name for file in recorded_logs(record.folder)]
        layers = len(record.folder.layer_names())
        steps = {*record.folder.checkpoints()} & {*RunFolder(path).checkpoints()}
    names += [f"{layers} files of layers"] if layers else []
    names += [f"checkpoint {step}" for step in steps]
    return f"identical{'' if ended else f' up to step {last}'}: {', '.join(names)}"


def not_reproduced(folder: RunFolder, problem: str) -> DifferenceError:
    """Return the error for a run that differs from its record."""
    return DifferenceError(
        f"{folder.path} is not reproduced: {problem}\n"
        "`deepstack verify` says whether its files are the ones that were written"
    )


def later_difference(old: RunFolder, new: RunFolder, ended: bool) -> str | None:
    """Return the first difference besides the rows that both runs have, or None.

    ended: whether the recorded run has ended, so that nothing may follow its rows.
    """
    if logs := new.read_meta().get("differing_logs"):  # without deterministic kernels
        return f"rows of {', '.join(logs)} differ, within {TOLERANCE:.0%}"
    if ended:
        for path in recorded_logs(new):
            if read(old.path / path.name) != read(path):
                return f"{path.name} has more rows now"
        was, now = ((s.get("state"), s.get("step")) for s in map(RunFolder.read_status, (old, new)))
        if was != now:
            return f"its state was {was[0]} at step {was[1]}, is {now[0]} at step {now[1]}"
        if new.checkpoints() and not old.checkpoints() and not is_published(old.path):
            return f"checkpoint/{new.checkpoints()[-1]} is not in the record"
    for name in sorted({*old.layer_names(), *(new.layer_names() if ended else ())}):
        try:
            (steps, before), (steps_now, after) = old.read_layers(name), new.read_layers(name)
        except KeyError:
            return f"layers/{name}.npy: only one of the runs has it"
        except ResourceError as error:
            return str(error)
        if ended and len(steps) != len(steps_now):
            return f"layers/{name}.npy had {len(steps)} records, has {len(steps_now)} now"
        common = zip(steps, steps_now, before, after, strict=False)
        for step, step_now, one, two in common:
            if step != step_now:
                return f"layers/steps.npy: a record was of step {step}, is of step {step_now}"
            for layer, (a, b) in enumerate(zip(one, two, strict=False), start=1):
                if a.tobytes() != b.tobytes():
                    return f"layers/{name}.npy at step {step}, layer {layer}: was {a}, is {b}"
    for step in {*old.checkpoints()} & {*new.checkpoints()}:
        try:
            parts = ckpt.load(old.checkpoint_path(step), step).parts
            for name, tensors in parts.items():
                file = new.checkpoint_path(step) / f"{name}.safetensors"
                if file.exists():
                    ckpt.verify_tensors(file, tensors)
        except (OSError, ValueError) as error:
            return f"checkpoint {step}: {error}"
    return None
