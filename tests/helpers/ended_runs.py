"""Trainings of six steps that ended in three ways, for what reads and compares runs afterwards."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import deepstack
from deepstack.config import Config, with_overrides
from deepstack.records import RunFolder
from helpers.command_line import typed
from helpers.small_runs import interrupted

TINY = {
    "model.depth": 2, "model.d_model": 8, "task.seq_len": 8, "train.batch_size": 2,
    "train.steps": 6, "train.eval_every": 2, "train.eval_batches": 1, "log.probe_sequences": 1,
    "log.layers_every": 3, "log.attribution_every": 3, "runtime.checkpoint_seconds": 0.0,
}  # fmt: skip


def train_three(out: Path) -> dict[str, Path]:
    """A run that is done, one that diverged and one that was interrupted after four steps."""
    config = with_overrides(Config(), TINY)
    done = deepstack.train(config, study="done", out=out)
    bound = {"train.max_loss": float(done.steps["loss"][2:].max() - 1e-3)}
    diverged = deepstack.train(with_overrides(config, bound), study="diverged", out=out)
    assert diverged.state == "diverged" and len(diverged.steps) < 6
    stopped = interrupted(config, out, 4, "stopped")
    return {"done": done.path, "diverged": diverged.path, "interrupted": stopped.path}


def copied(source: Path, tmp_path: Path) -> RunFolder:
    """A copy of a run that a test may change."""
    return RunFolder(shutil.copytree(source, tmp_path / "study" / source.name))


def flip(path: Path, bit: int) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


verify = partial(typed, "verify")
