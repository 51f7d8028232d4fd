"""Checkpoints made to harm: refused soon, in one line, and nothing in them is run."""

import json
import os
import pickle
import resource
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.small_runs import interrupted, reseal, small
from safetensors.torch import load_file, save_file

import deepstack
from deepstack.base.errors import ResourceError
from deepstack.config import digest
from deepstack.model import without_defaults
from deepstack.records import RunFolder
from deepstack.training import checkpoint

STEP = 6
WEIGHTS = "weights.safetensors"

Harm = Callable[[Path], object]


class Planted:
    """Unpickled, it makes a file, which shows that code was run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return (os.mkdir, (str(self.path / "planted"),))


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was interrupted after six steps."""
    return interrupted(small(), tmp_path_factory.mktemp("victim"), STEP).path


@pytest.fixture
def run(victim: Path, tmp_path: Path) -> Path:
    """A copy of the victim, in the folder of the test."""
    return shutil.copytree(victim, tmp_path / "runs" / victim.name)


def content(name: str, text: bytes) -> Harm:
    """A file of these bytes."""
    return lambda folder: (folder / name).write_bytes(text)


def header(text: bytes, length: int | None = None, data: bytes = bytes(64)) -> Harm:
    """A weights.safetensors with this header, of this length as it says itself."""
    size = struct.pack("<Q", len(text) if length is None else length)
    return content(WEIGHTS, size + text + data)


def tensor(shape: list[int], end: int) -> bytes:
    return json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, end]}}).encode()


def changed(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Harm:
    """The weights changed."""

    def harm(folder: Path) -> None:
        held = change(load_file(folder / WEIGHTS))
        save_file({k: v.contiguous() for k, v in held.items()}, folder / WEIGHTS)

    return harm


def state(**changes: Any) -> Harm:
    """Other values in state.json."""

    def harm(folder: Path) -> None:
        held = json.loads((folder / "state.json").read_text())
        (folder / "state.json").write_text(json.dumps(held | changes))

    return harm


def instead(name: str, make: Harm) -> Harm:
    """Something else in the place of a file."""
    return lambda folder: ((folder / name).unlink(), make(folder / name))


SUBSTITUTES: dict[str, Harm] = {
    "nothing": lambda path: None,
    "a folder": Path.mkdir,
    "a FIFO": os.mkfifo,
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
    "ten sparse gigabytes": lambda path: path.touch() or os.truncate(path, 10**10),
}
# name -> harm, and a word of the refusal; with valid checksums
FORGED: dict[str, tuple[Harm, str]] = {
    "a pickle": (lambda f: (f / WEIGHTS).write_bytes(pickle.dumps(Planted(f))), WEIGHTS),
    "what torch.save writes": (lambda f: torch.save({"x": Planted(f)}, f / WEIGHTS), WEIGHTS),
    "an empty file": (content(WEIGHTS, b""), WEIGHTS),
    "a header of 2^63 bytes": (header(b"{}", 2**63), WEIGHTS),
    "a deep header": (header(b'{"a":' + b"[" * 50_000), WEIGHTS),
    "an absurd shape": (header(tensor([2**40, 2**20], 64)), WEIGHTS),
    "offsets beyond the file": (header(tensor([32], 128)), WEIGHTS),
    "no tensors": (header(b"{}", data=b""), "embedding"),
    "a tensor less": (changed(lambda held: dict(list(held.items())[1:])), "not there"),
    "a tensor more": (changed(lambda held: held | {"more": torch.ones(3)}), "more"),
    "another type": (changed(lambda held: {k: v.double() for k, v in held.items()}), "float64"),
    "other shapes": (changed(lambda held: {k: v[..., None] for k, v in held.items()}), "1)"),
    "a deep state": (content("state.json", b"[" * 100_000), "state.json"),
    "a state of a million digits": (
        content("state.json", b'{"step": ' + b"9" * 10**6), "state.json"),
    "a step that is a word": (state(step="six"), "step"),
    "another step": (state(step=7), "step 7"),
    "another run": (state(run="0" * 64), "another run"),
    "a run that is a list": (state(run=[[]]), "another run"),
}  # fmt: skip
# the same, with the checksums that are there
HARMS: dict[str, tuple[Harm, str]] = FORGED | {
    "a pickle beside": (
        lambda f: (f / "more.safetensors").write_bytes(pickle.dumps(Planted(f))),
        "more.safetensors"),
    **{
        f"{kind} for {name}": (instead(name, make), name)
        for name in (WEIGHTS, "state.json", "checksums.json")
        for kind, make in SUBSTITUTES.items()
    },
    "deep checksums": (content("checksums.json", b"[" * 100_000), "checksums.json"),
    "checksums of other files": (
        content("checksums.json", b'{"state.json": "0", "../../x": "0"}'), "checksums.json"),
    "checksums that are no UTF-8": (content("checksums.json", b"\xff{}"), "checksums.json"),
}  # fmt: skip


def answer(path: Path) -> tuple[checkpoint.Checkpoint | None, list[str]]:
    """A resuming run reads a hostile checkpoint: it is refused soon, and within 200 MB."""
    weights = deepstack.build_model(small(), vocab_size=257).state()
    owner = checkpoint.Owner(digest(without_defaults(small())), weights, largest=2**26)
    notices: list[str] = []
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin, processor = time.monotonic(), time.process_time()
    found = checkpoint.newest_usable(RunFolder(path), notices.append, owner)
    assert time.process_time() - processor < 1
    assert time.monotonic() - begin < 10  # of a busy machine; a FIFO would hold it for ever
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024
    return found, notices


@pytest.mark.parametrize("name", HARMS)
def test_a_hostile_checkpoint_is_refused(name: str, run: Path, tmp_path: Path) -> None:
    harm, named = HARMS[name]
    folder = run / "checkpoint" / str(STEP)
    harm(folder)
    if name in FORGED:
        reseal(folder)
    found, notices = answer(run)
    assert found is None
    (line,) = [line for line in notices if line.startswith(f"not used: checkpoint {STEP}: ")]
    assert named in line, line
    assert line.isprintable() and len(line) < 400
    assert not list(tmp_path.rglob("planted"))


def test_the_payload_of_these_tests_would_be_seen(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Planted(tmp_path)))
    assert (tmp_path / "planted").is_dir()


def test_a_link_beside_the_checkpoint_is_not_followed(run: Path, tmp_path: Path) -> None:
    """The checkpoint that was not touched is taken, and nothing elsewhere is removed."""
    (tmp_path / "dear").write_text("mine")
    (run / "checkpoint" / "9").symlink_to(tmp_path)
    found, notices = answer(run)
    assert found is not None and found.step == STEP
    assert [line for line in notices if f"checkpoint {STEP}" in line] == []
    assert (tmp_path / "dear").read_text() == "mine"


def test_a_checkpoint_cannot_be_of_a_step_that_was_not_made(run: Path) -> None:
    forged = run / "checkpoint" / str(STEP + 3)
    (run / "checkpoint" / str(STEP)).rename(forged)
    state(step=STEP + 3)(forged)
    reseal(forged)
    found, notices = answer(run)
    assert found is None
    assert f"steps.csv is not the log that checkpoint {STEP + 3} was saved with" in notices


PARTS: dict[str, Harm] = {
    "no probe": lambda folder: (folder / "probe.safetensors").unlink(),
    "no snapshots": lambda folder: (folder / "layers.safetensors").unlink(),
    "another probe": lambda folder: save_file({"x": torch.ones(3)}, folder / "probe.safetensors"),
    "other snapshots": lambda f: save_file({"x": torch.ones(3)}, f / "layers.safetensors"),
    "an empty optimizer": lambda folder: save_file({}, folder / "optimizer.safetensors"),
}


@pytest.mark.parametrize("name", PARTS)
def test_parts_that_do_not_belong_are_refused(name: str, run: Path, tmp_path: Path) -> None:
    """With valid checksums: an error of one line, or a run that goes on without them."""
    folder = run / "checkpoint" / str(STEP)
    PARTS[name](folder)
    reseal(folder)
    try:
        deepstack.train(small(), out=tmp_path)
    except ResourceError as error:
        assert str(folder) in str(error) and str(error).isprintable()
    else:
        assert f"not used: checkpoint {STEP}" in (run / "log.txt").read_text()
