"""Trainings of seconds, and what must be the same when they are made again."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

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
