"""A configuration of a run whose steps are replayed."""

from __future__ import annotations

from typing import Any

from deepstack.config import Config, with_overrides

BASE = {
    "model.depth": 3, "model.d_model": 24, "model.n_heads": 3, "task.name": "markov",
    "task.seq_len": 12, "train.batch_size": 4, "train.steps": 8, "train.eval_every": 5,
    "train.eval_batches": 1, "train.clip": 0.1, "log.layers_every": 4,
    "runtime.device": "cpu", "runtime.threads": 1,
}  # fmt: skip


def config(**changes: Any) -> Config:
    return with_overrides(Config(), BASE | {k.replace("__", "."): v for k, v in changes.items()})
