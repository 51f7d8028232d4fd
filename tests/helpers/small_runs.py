"""Trainings of seconds, and what must be the same when they are made again."""

from __future__ import annotations

import hashlib
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from deepstack.config import Config, with_overrides
from deepstack.records import Run

SMALL = {
    "model.depth": 4, "model.d_model": 16, "task.seq_len": 16, "train.batch_size": 4,
    "train.steps": 12, "train.eval_every": 4, "train.eval_batches": 2, "log.probe_sequences": 2,
}  # fmt: skip


def small(**changes: Any) -> Config:
    dotted = {key.replace("__", "."): value for key, value in changes.items()}
    return with_overrides(Config(), SMALL | dotted)


def data_of(run: Run) -> dict[str, bytes]:
    """Every byte of a run that must be the same again."""
    files = [run.path / "steps.csv", run.path / "evals.csv", *(run.path / "layers").glob("*.npy")]
    files += (run.path / "checkpoint").glob("*/weights.safetensors")
    return {str(f.relative_to(run.path)): f.read_bytes() for f in sorted(files)}


def stop_at(step: int) -> Callable[[], int | None]:
    """A stop request that comes after so many steps of this process."""
    calls = iter(range(1, 10**6))
    return lambda: signal.SIGTERM if next(calls) >= step else None


def rewrite_tensors(checkpoint: Path, change: Callable[[str, Tensor], tuple[str, Tensor]]) -> None:
    """Apply `change` to every weight and moment of a checkpoint, as an earlier version had it."""
    for file in ("weights.safetensors", "optimizer.safetensors"):
        parts = load_file(checkpoint / file)
        save_file(dict(change(key, value) for key, value in parts.items()), checkpoint / file)
    sums = {
        file: hashlib.sha256((checkpoint / file).read_bytes()).hexdigest()
        for file in json.loads((checkpoint / "checksums.json").read_text())
    }
    (checkpoint / "checksums.json").write_text(json.dumps(sums))
