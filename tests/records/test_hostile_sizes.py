"""Files whose size is far above their content are refused before they are read."""

from __future__ import annotations

import os
import resource
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers.command_line import typed
from helpers.ended_runs import copied, verify
from helpers.record_runs import end

from deepstack.records import Run, RunFolder, problems

TERABYTE = 10**12


@contextmanager
def soon() -> Iterator[None]:
    """Fail if the context takes more than two seconds of CPU or 200 MB."""
    began = time.process_time()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert time.process_time() - began < 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024


def newest(folder: RunFolder) -> Path:
    return folder.checkpoint_path(folder.checkpoints()[-1]) / "weights.safetensors"


@pytest.mark.parametrize("state", ["done", "interrupted"])
@pytest.mark.parametrize("name", ["weights.safetensors", "state.json", "checksums.json"])
def test_a_terabyte_of_a_checkpoint_is_refused(
    name: str, state: str, trained: dict[str, Path], tmp_path: Path
) -> None:
    folder = copied(trained[state], tmp_path)
    for step in folder.checkpoints():
        os.truncate(folder.checkpoint_path(step) / name, TERABYTE)
    with soon():
        result = verify(folder.path)
    assert result.exit_code == 6
    assert f"{name} has 1,000,000,000,000 bytes, of " in result.stderr
    with soon():
        found = typed("export", folder.path, "--to", tmp_path / "x")
    assert found.exit_code == 7 and not (tmp_path / "x").exists()
    assert f"{name} has 1,000,000,000,000 bytes, of " in found.stderr


def test_a_header_that_promises_a_terabyte_is_refused(folder: RunFolder) -> None:
    offsets = f"[0,{TERABYTE}]"
    header = f'{{"a":{{"dtype":"U8","shape":[{TERABYTE}],"data_offsets":{offsets}}}}}'.encode()
    newest(folder).write_bytes(struct.pack("<Q", len(header)) + header)
    os.truncate(newest(folder), TERABYTE + 8 + len(header))
    with soon():
        (problem,) = problems(folder)
    assert "weights.safetensors has 1,000,000,000,0" in problem and "the disk holds" in problem


@pytest.mark.parametrize("name", ["steps.csv", "status.json", "config.yaml", "layers/steps.npy"])
def test_a_terabyte_of_another_file_is_refused(
    name: str, trained: dict[str, Path], tmp_path: Path
) -> None:
    for state in ("done", "interrupted"):
        folder = copied(trained[state], tmp_path / state)
        os.truncate(folder.path / name, TERABYTE)
        with soon():
            result = verify(folder.path)
            Run(folder.path).damage(layers=True)
            listed = typed("ls", folder.path)
        assert result.exit_code == 6 and f"{Path(name).name} has 1,000,000" in result.stderr
        assert listed.exit_code == 0
        assert "is damaged" in listed.stderr or name.startswith("layers")


def test_a_large_file_of_bytes_is_read(tmp_path: Path) -> None:
    """Holes of a smaller half refuse nothing."""
    folder = RunFolder(tmp_path / "s" / "r")
    folder.write_config("seed: 1\n")
    folder.steps_path.write_text("step,loss\n1,2.0\n")
    weights = folder.checkpoint_path(1) / "weights.safetensors"
    weights.parent.mkdir(parents=True)
    weights.write_bytes(b"x" * 50 * 2**20)
    os.truncate(weights, 2**26 + 2**20)
    folder.write_meta({})
    folder.write_columns({})
    end(folder, step=1)
    assert problems(folder) == []
