"""Checkpoints: written beside, synced, read back and verified before an older one goes."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from deepstack.errors import DifferenceError
from deepstack.records import RunFolder, sync_folder, trouble

CHECKSUMS = "checksums.json"
STATE = "state.json"
KEPT = 2


@dataclass
class Checkpoint:
    """What training needs to go on after a step as if it had never stopped.

    parts: groups of tensors, each a safetensors file: 'weights', 'optimizer', 'probe' (F_0 and
    F_{t-1}), 'layers' (the snapshots so far).  state: step, checksums of the logs up to it, and
    how the rest is made again: batches, dropout and θ_0 are functions of the seed and the step,
    so no random state needs keeping.
    """

    step: int
    parts: dict[str, dict[str, Tensor]]
    state: dict[str, Any] = field(default_factory=dict)


def save(folder: RunFolder, checkpoint: Checkpoint) -> None:
    """Write a checkpoint, verify it, then remove all but the newest two.

    Raises ResourceError when the disk refuses; what was there before is then unharmed.
    """
    target = folder.checkpoint_path(checkpoint.step)
    draft = target.with_name(f".draft-{checkpoint.step}")
    with trouble(draft):
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        for name, tensors in checkpoint.parts.items():
            held = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
            try:
                save_file(held, draft / f"{name}.safetensors")
            except SafetensorError as error:  # how it reports what the disk refused
                raise OSError(str(error)) from error
        state = {"step": checkpoint.step, **checkpoint.state}
        (draft / STATE).write_text(json.dumps(state, indent=2) + "\n")
        sums = {path.name: sha256(path) for path in sorted(draft.iterdir())}
        (draft / CHECKSUMS).write_text(json.dumps(sums, indent=2) + "\n")
        for path in draft.iterdir():
            sync_file(path)
        sync_folder(draft)
        if target.exists():
            shutil.rmtree(target)
        draft.rename(target)
        sync_folder(folder.checkpoint_dir)
        if problem := damage(target):
            raise OSError(f"read back wrong: {problem}")
    for step in folder.checkpoints()[:-KEPT]:
        shutil.rmtree(folder.checkpoint_path(step), ignore_errors=True)


def keep_only(folder: RunFolder, step: int) -> None:
    """Remove every checkpoint but this one: a finished run keeps its weights alone."""
    for other in folder.checkpoints():
        if other != step:
            shutil.rmtree(folder.checkpoint_path(other), ignore_errors=True)
    if folder.checkpoint_dir.is_dir():
        for draft in folder.checkpoint_dir.glob(".draft-*"):
            shutil.rmtree(draft, ignore_errors=True)


def newest(folder: RunFolder, damaged: list[str]) -> Checkpoint | None:
    """The newest checkpoint that is whole, or None; what is wrong with others goes to `damaged`."""
    for step in reversed(folder.checkpoints()):
        path = folder.checkpoint_path(step)
        if problem := damage(path):
            damaged.append(f"checkpoint {step}: {problem}")
            continue
        return load(path)
    return None


def fitting(folder: RunFolder, said: Callable[[str], None]) -> Checkpoint | None:
    """The newest checkpoint that is whole, whose logs are still those that it was saved with.

    said: told of every damaged one.  Raises DifferenceError where a log has changed since.
    """
    damaged: list[str] = []
    found = newest(folder, damaged)
    for problem in damaged:
        said(f"not used: {problem}")
    if found is None:
        if damaged:
            said("no checkpoint is whole: starting again from step 0")
        return None
    for name, wanted in found.state["logs"].items():
        log = folder.log(name, ("step",))
        if log.sha256_upto(found.step) != wanted:
            raise DifferenceError(
                f"{log.path} is not the log that checkpoint {found.step} was saved with; "
                "move the run folder away to start again"
            )
    return found


def load(path: Path) -> Checkpoint:
    """Read a checkpoint folder that `damage` found whole."""
    state = json.loads((path / STATE).read_text())
    parts = {file.stem: load_file(file) for file in path.glob("*.safetensors")}
    for name in ("weights", "optimizer"):
        if name in parts:
            parts[name] = {present_key(key): value for key, value in parts[name].items()}
    return Checkpoint(state.pop("step"), parts, state)


def present_key(key: str) -> str:
    """The name of a parameter as it is now: before there were decoders, stacks had none."""
    return f"encoder.{key}" if key.startswith(("layers.", "entry_norm.", "final_norm.")) else key


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint folder, in words, or None: every file against its sha256."""
    try:
        sums: Mapping[str, str] = json.loads((path / CHECKSUMS).read_text())
        for name, wanted in sums.items():
            if sha256(path / name) != wanted:
                return f"{name} is not what was written (sha256 differs)"
        if STATE not in sums:
            return f"{CHECKSUMS} names no {STATE}"
    except (OSError, ValueError, AttributeError, SafetensorError) as error:
        return str(error)
    return None


def sha256(path: Path) -> str:
    """sha256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_file(path: Path) -> None:
    """Wait until a file's content is on the disk itself."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def layer_records(values: Mapping[str, list[Tensor]], steps: list[int]) -> dict[str, Tensor]:
    """The snapshots so far as tensors: name -> (records, depth), and their steps."""
    stacked = {name: torch.stack(rows) for name, rows in values.items() if rows}
    return stacked | {"steps": torch.tensor(steps, dtype=torch.int64)}
