"""Checkpoints: written to a draft, synced, read back and verified before old ones are removed."""

import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from deepstack.records import (
    CHECKSUMS,
    STATE,
    RunFolder,
    damage,
    extent,
    mapping,
    sha256,
    sync_folder,
    trouble,
)
from deepstack.records.files import remove_hidden_folders, rewrite_end
from deepstack.records.opened import file_in, open_folder, open_new

CHECKPOINTS = 2  # the number that a run keeps


@dataclass
class Checkpoint:
    """The state from which training resumes after a step, bit for bit.

    parts: groups of tensors, each a safetensors file: 'weights', 'optimizer', 'probe' (F_0 and
        F_{t-1}), 'layers' (the snapshots so far).
    state: the run's digest and the checksums of the logs up to the step.  Batches, dropout and θ_0
        are functions of the seed and the step, so no random state is stored.
    """

    step: int
    parts: dict[str, dict[str, Tensor]]
    state: dict[str, Any] = field(default_factory=dict)


def save(folder: RunFolder, checkpoint: Checkpoint) -> None:
    """Write a checkpoint, verify it, then remove all but the newest two.

    A checkpoint of this step that exists stays: it was verified when it was written or loaded.
    Raises ResourceError when writing fails; earlier checkpoints are then unharmed.
    """
    if write(folder, folder.checkpoint_path(checkpoint.step), checkpoint):
        with trouble(folder.checkpoint_dir):
            for step in folder.checkpoints()[:-CHECKPOINTS]:
                discard(folder.checkpoint_path(step))


def write(folder: RunFolder, target: Path, checkpoint: Checkpoint) -> bool:
    """Write a checkpoint to a folder and verify it; return False for one that exists already.

    Raises ResourceError when the disk refuses; the target then does not exist.
    """
    if target.exists():
        return False
    ending = secrets.token_hex(4)
    draft = target.with_name(f".draft-{checkpoint.step}-{ending}")
    parts = {
        name: {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
        for name, tensors in checkpoint.parts.items()
    }
    state = json.dumps({"step": checkpoint.step, **checkpoint.state}, indent=2) + "\n"
    with trouble(draft):
        remove_hidden_folders(target.parent)
        with open_folder(draft, folder.path, make=True) as opened:
            for name, tensors in parts.items():
                try:
                    save_file(tensors, file_in(opened, draft / f"{name}.safetensors"))
                except SafetensorError as error:  # safetensors' form of a disk error
                    raise OSError(str(error)) from error
            write_new(opened, STATE, state)
            for name in parts:  # safetensors makes files readable by their owner only
                held = (file_in(opened, draft / file) for file in (STATE, f"{name}.safetensors"))
                shutil.copymode(*held)
            sums = {path.name: sha256(path) for path in sorted(draft.iterdir())}
            write_new(opened, CHECKSUMS, json.dumps(sums, indent=2) + "\n")
        for path in draft.iterdir():
            sync_file(path)
        sync_folder(draft)
        # The sha256 only describes the files; this compares them with the values in memory.
        if (draft / STATE).read_text() != state:
            raise OSError(f"read back wrong: {STATE}")
        for name, tensors in parts.items():
            verify_tensors(draft / f"{name}.safetensors", tensors)
        draft.rename(target)
        sync_folder(target.parent)
    return True


def verify_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raise OSError, naming the first tensor of a file that differs in any bit."""
    try:
        with safe_open(path, "pt") as file:
            for name, wanted in tensors.items():
                stored = file.get_tensor(name)
                same = shape_of(stored) == shape_of(wanted)
                if not same or not torch.equal(bits(stored), bits(wanted)):
                    raise OSError(f"{name} in {path.name} differs")
    except SafetensorError as error:
        raise OSError(f"{path.name}: {error}") from error


def bits(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, so that NaN equals NaN."""
    return tensor.reshape(-1).view(torch.uint8)


def write_new(opened: int, name: str, text: str) -> None:
    """Write a new file into an opened folder."""
    with open(open_new(name, opened), "w", encoding="utf-8") as file:
        file.write(text)


def keep_only(folder: RunFolder, step: int) -> None:
    """Remove every checkpoint except this one: a finished run keeps only its weights."""
    with trouble(folder.checkpoint_dir):
        for other in folder.checkpoints():
            if other != step:
                discard(folder.checkpoint_path(other))
        if folder.checkpoint_dir.is_dir():
            remove_hidden_folders(folder.checkpoint_dir)
            sync_folder(folder.checkpoint_dir)


def discard(path: Path) -> None:
    """Remove a checkpoint folder atomically: readers see the whole folder or none.

    The folder is renamed, and the rename synced, before any of its files is removed.
    """
    removed = path.with_name(f".gone-{path.name}-{secrets.token_hex(4)}")
    path.rename(removed)
    sync_folder(path.parent)
    shutil.rmtree(removed, ignore_errors=True)


@dataclass(frozen=True)
class Owner:
    """The run to which a checkpoint must belong.

    run: digest of the run's configuration (`Checkpoint.state['run']`).
    weights: tensors with the expected names, shapes and types, None where each rank holds only a
        part of them.
    largest: upper limit of the bytes of each checkpoint file.
    """

    run: str
    weights: Mapping[str, Tensor] | None
    largest: int

    def mismatch(self, checkpoint: Checkpoint) -> str | None:
        """Return the reason why a checkpoint does not belong to this run, or None."""
        if checkpoint.state.get("run", self.run) != self.run:
            return "is another run's"
        if self.weights is None:
            return None
        weights = checkpoint.parts.get("weights", {})
        for name in sorted({*weights, *self.weights}):
            was, now = shape_of(weights.get(name)), shape_of(self.weights.get(name))
            if was != now:
                return f"is another model's: {name} is {was}, not {now}"
        return None


def shape_of(tensor: Tensor | None) -> str:
    """Return dtype and shape as text: 'float32 (6, 32, 32)', or 'not there' for None."""
    if tensor is None:
        return "not there"
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def whole_checkpoints(folder: RunFolder, damaged: list[str], owner: Owner) -> Iterator[Checkpoint]:
    """Yield the checkpoints that are whole and the owner's, newest first.

    The problem of each other one is appended to `damaged`.
    """
    for step in reversed(folder.checkpoints()):
        try:
            checkpoint = load(folder.checkpoint_path(step), step, owner)
        except ValueError as error:
            damaged.append(f"checkpoint {step}: {error}")
        else:
            yield checkpoint


def load(path: Path, step: int, owner: Owner | None = None) -> Checkpoint:
    """Read a checkpoint; raise ValueError unless it is whole, of this step and the owner's."""
    if problem := damage(path, owner.largest if owner else None):
        raise ValueError(problem)
    parts, file = {}, path / STATE
    try:
        state = mapping(file)
        for file in path.glob("*.safetensors"):
            parts[file.stem] = load_file(file)
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"{file.name} cannot be read: {error}") from error
    stored = state.pop("step", None)
    if type(stored) is not int or stored != step:
        raise ValueError(f"{STATE} says that it is of step {stored!r:.40}")
    for name in {"weights", "optimizer"} & parts.keys():
        parts[name] = dict(in_current_layout(key, value) for key, value in parts[name].items())
    checkpoint = Checkpoint(step, parts, state)
    if owner and (reason := owner.mismatch(checkpoint)):
        raise ValueError(reason)
    return checkpoint


def newest_usable(
    folder: RunFolder, notify: Callable[[str], None], owner: Owner
) -> Checkpoint | None:
    """Return the newest checkpoint that is whole and whose logs have not changed, or None.

    If a newer checkpoint is damaged or a log has changed, the run folder is reset to that
    checkpoint; without one, to step 0.  After a log changed during the run, no checkpoint is used.

    notify: receives a line for each problem.
    """
    damaged: list[str] = []
    changed: list[str] = []
    checkpoint: Checkpoint | None = None
    if "changed_log" in folder.read_status():
        notify("a log changed while this run worked: no checkpoint is used")
        changed.append(folder.steps_path.name)
    else:
        for candidate in whole_checkpoints(folder, damaged, owner):
            wrong = changed_logs(folder, candidate)
            if not wrong:
                checkpoint = candidate
                break
            for name in wrong:
                notify(f"{name} is not the log that checkpoint {candidate.step} was saved with")
            changed += wrong
    step = -1 if checkpoint is None else checkpoint.step
    for older in folder.checkpoints():
        if older < step and (problem := damage(folder.checkpoint_path(older), owner.largest)):
            damaged.append(f"checkpoint {older}: {problem}")
    for problem in damaged:
        notify(f"not used: {problem}")
    if checkpoint is not None:  # a kill may have come before its name was on the disk
        sync_folder(folder.checkpoint_dir)
    if changed or damaged:
        reset(folder, step, changed, notify)
    return checkpoint


def reset(
    folder: RunFolder, step: int, changed: Sequence[str], notify: Callable[[str], None]
) -> None:
    """Copy the changed logs aside, truncate them to a step and remove later checkpoints.

    step: of a checkpoint; -1 removes the logs, all of them if one has changed.
    """
    if step < 0:
        notify("no checkpoint is left to go on from: starting again from step 0")
        if changed:  # no checkpoint verifies any of the logs
            changed = [path.name for path in folder.path.glob("*.csv")]
    else:
        notify(f"going on from checkpoint {step}")
    for name in dict.fromkeys(changed):
        copy, path = folder.set_aside(name), folder.path / name
        notify(f"{name} as it was found is kept in {copy.relative_to(folder.path)}")
        with trouble(path):
            if step < 0:
                path.unlink(missing_ok=True)
            else:
                rewrite_end(path, extent(path, step).size)
                sync_file(path)
    for newer in folder.checkpoints():
        if newer > step:
            discard(folder.checkpoint_path(newer))


def changed_logs(folder: RunFolder, checkpoint: Checkpoint) -> list[str]:
    """Return the log files whose rows up to the checkpoint differ from those at its save.

    The last of these rows of steps.csv must be of the checkpoint's own step.
    """
    step, wanted = checkpoint.step, checkpoint.state.get("logs")
    if not isinstance(wanted, dict):
        return []
    changed = []
    for name in wanted:
        if not name.isidentifier():
            continue  # a path, which deepstack has not written
        path = folder.csv_path(name)
        rows = extent(path, step)
        ends_early = name == "steps" and step > 0 and rows.last_step != step
        if rows.sha256 != wanted[name] or ends_early:
            changed.append(path.name)
    return changed


def in_current_layout(key: str, value: Tensor) -> tuple[str, Tensor]:
    """Return name and value of a tensor of any version's checkpoint in the current layout.

    Stacks had no name before there were decoders.  SiameseNorm kept the stack's last norms in every
    layer and used the last layer's.
    """
    if key.startswith(("layers.", "entry_norm.", "final_norm.")):
        key = f"encoder.{key}"
    if match := re.match(r"(\w+)\.layers\.scheme\.last_of_([xy])\.(.+)", key):
        stack, stream, rest = match.groups()
        last = value[-1:] if value.ndim else value  # a step count has no axes
        return f"{stack}.stream_norms.{'xy'.index(stream)}.{rest}", last
    return key, value


def sync_file(path: Path) -> None:
    """Flush a file's content to the disk (fsync)."""
    with open(path, "rb") as file:
        os.fsync(file)
