"""Settings, copies and damage of the runs that tests of records read and compare."""

import shutil
from functools import partial
from pathlib import Path

from deepstack.records import RunFolder
from helpers.command_line import typed
from helpers.extensions import known

TINY = {
    "model.depth": 2, "model.d_model": 8, "task.seq_len": 8, "train.batch_size": 2,
    "train.steps": 6, "train.eval_every": 2, "train.eval_batches": 1, "log.probe_sequences": 1,
    "log.layers_every": 3, **known({"log.attribution_every": 3}), "runtime.checkpoint_seconds": 0.0,
}  # fmt: skip


def copied(source: Path, tmp_path: Path) -> RunFolder:
    """A copy of a run that a test may change."""
    return RunFolder(shutil.copytree(source, tmp_path / "study" / source.name))


def flip(path: Path, bit: int) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


verify = partial(typed, "verify")
