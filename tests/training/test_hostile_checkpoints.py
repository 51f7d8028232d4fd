"""Checkpoints made to harm: refused soon, in one line, and nothing in them is run."""

from __future__ import annotations

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
from helpers.small_runs import interrupted, only_run, reseal, small
from safetensors.torch import load_file, save_file

import deepstack
from deepstack.config import digest
from deepstack.errors import ResourceError
from deepstack.model import without_defaults
from deepstack.records import RunFolder
from deepstack.training import checkpoint

STEP = 6
WEIGHTS = "weights.safetensors"

Harm = Callable[[Path], None]


class Planted:
    """Unpickled, it makes a file, which shows that code was run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return (os.mkdir, (str(self.path / "planted"),))


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, checkpoint.Owner]:
    """A run that was interrupted after six steps, and what its checkpoints must be."""
    weights = deepstack.build_model(small(), vocab_size=257).state()
    owner = checkpoint.Owner(digest(without_defaults(small())), weights, largest=2**26)
    return interrupted(small(), tmp_path_factory.mktemp("victim"), STEP).path, owner


def header(value: object, length: int | None = None, data: bytes = bytes(64)) -> Harm:
    """A weights.safetensors with this header, of this length as it says itself."""
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    return text_in(
        WEIGHTS, struct.pack("<Q", len(text) if length is None else length) + text + data
    )


def tensor(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def saved_by_torch(folder: Path) -> None:
    torch.save({"x": Planted(folder)}, folder / WEIGHTS)
    reseal(folder)


def extra_pickle(folder: Path) -> None:
    (folder / "more.safetensors").write_bytes(pickle.dumps(Planted(folder)))


def changed(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Harm:
    """The weights changed, with a valid checksum."""

    def harm(folder: Path) -> None:
        held = change(load_file(folder / WEIGHTS))
        save_file({k: v.contiguous() for k, v in held.items()}, folder / WEIGHTS)
        reseal(folder)

    return harm


def state(**changes: Any) -> Harm:
    """Other values in state.json, with a valid checksum."""

    def harm(folder: Path) -> None:
        held = json.loads((folder / "state.json").read_text())
        text_in("state.json", json.dumps(held | changes))(folder)

    return harm


def text_in(name: str, text: str | bytes) -> Harm:
    """A file of these bytes, with a valid checksum unless it is that of the checksums."""

    def harm(folder: Path) -> None:
        (folder / name).write_bytes(text.encode() if isinstance(text, str) else text)
        if name != "checksums.json":
            reseal(folder)

    return harm


def instead(name: str, make: Callable[[Path], None]) -> Harm:
    """Something else in the place of a file."""

    def harm(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return harm


SUBSTITUTES: dict[str, Callable[[Path], None]] = {
    "nothing": lambda path: None,
    "a folder": Path.mkdir,
    "a FIFO": os.mkfifo,
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
    "ten sparse gigabytes": lambda path: path.touch() or os.truncate(path, 10**10),
}
HARMS: dict[str, tuple[Harm, str]] = {
    "a pickle": (lambda f: text_in(WEIGHTS, pickle.dumps(Planted(f)))(f), WEIGHTS),
    "what torch.save writes": (saved_by_torch, WEIGHTS),
    "a pickle beside": (extra_pickle, "more.safetensors"),
    "an empty file": (text_in(WEIGHTS, b""), WEIGHTS),
    "a header of 2^63 bytes": (header({}, 2**63), WEIGHTS),
    "a deep header": (header(b'{"a":' + b"[" * 50_000), WEIGHTS),
    "an absurd shape": (header({"a": tensor([2**40, 2**20], 0, 64)}), WEIGHTS),
    "offsets beyond the file": (header({"a": tensor([32], 0, 128)}), WEIGHTS),
    "no tensors": (header({}, data=b""), "embedding"),
    "a tensor less": (changed(lambda held: dict(list(held.items())[1:])), "not there"),
    "a tensor more": (changed(lambda held: held | {"more": torch.ones(3)}), "more"),
    "another type": (changed(lambda held: {k: v.double() for k, v in held.items()}), "float64"),
    "other shapes": (changed(lambda held: {k: v[..., None] for k, v in held.items()}), "1)"),
    **{
        f"{kind} for {name}": (instead(name, make), name)
        for name in (WEIGHTS, "state.json", "checksums.json")
        for kind, make in SUBSTITUTES.items()
    },
    "deep checksums": (text_in("checksums.json", "[" * 100_000), "checksums.json"),
    "checksums of other files": (
        text_in("checksums.json", '{"state.json": "0", "../../x": "0"}'), "checksums.json"),
    "checksums that are no UTF-8": (text_in("checksums.json", b"\xff{}"), "checksums.json"),
    "a deep state": (text_in("state.json", "[" * 100_000), "state.json"),
    "a state of a million digits": (text_in("state.json", '{"step": ' + "9" * 10**6), "state.json"),
    "a step that is a word": (state(step="six"), "step"),
    "another step": (state(step=7), "step 7"),
    "another run": (state(run="0" * 64), "another run"),
    "a run that is a list": (state(run=[[]]), "another run"),
}  # fmt: skip


def answer(path: Path, owner: checkpoint.Owner) -> tuple[checkpoint.Checkpoint | None, list[str]]:
    """What a resuming run finds, and is told; soon, and within 200 MB."""
    notices: list[str] = []
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin, processor = time.monotonic(), time.process_time()
    found = checkpoint.newest_usable(RunFolder(path), notices.append, owner)
    assert time.process_time() - processor < 1
    assert time.monotonic() - begin < 10  # of a busy machine; a FIFO would hold it for ever
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024
    return found, notices


@pytest.mark.parametrize("name", HARMS)
def test_a_hostile_checkpoint_is_refused(
    name: str, victim: tuple[Path, checkpoint.Owner], tmp_path: Path
) -> None:
    harm, named = HARMS[name]
    path = tmp_path / "run"
    shutil.copytree(victim[0], path)
    harm(path / "checkpoint" / str(STEP))
    found, notices = answer(path, victim[1])
    assert found is None
    (line,) = [line for line in notices if line.startswith(f"not used: checkpoint {STEP}: ")]
    assert named in line, line
    assert line.isprintable() and len(line) < 400
    assert not list(tmp_path.rglob("planted"))


def test_the_payload_of_these_tests_would_be_seen(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Planted(tmp_path)))
    assert (tmp_path / "planted").is_dir()


def test_the_checkpoint_that_was_not_touched_is_taken(
    victim: tuple[Path, checkpoint.Owner], tmp_path: Path
) -> None:
    shutil.copytree(victim[0], tmp_path / "run")
    found, notices = answer(tmp_path / "run", victim[1])
    assert found is not None and found.step == STEP and not notices


def test_a_checkpoint_that_is_a_link_deletes_nothing_elsewhere(
    victim: tuple[Path, checkpoint.Owner], tmp_path: Path
) -> None:
    path, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    shutil.copytree(victim[0], path)
    elsewhere.mkdir()
    (elsewhere / "dear").write_text("mine")
    (path / "checkpoint" / "9").symlink_to(elsewhere)
    answer(path, victim[1])
    assert (elsewhere / "dear").read_text() == "mine"


def test_a_checkpoint_cannot_be_of_a_step_that_was_not_made(
    victim: tuple[Path, checkpoint.Owner], tmp_path: Path
) -> None:
    path = tmp_path / "run"
    shutil.copytree(victim[0], path)
    forged = path / "checkpoint" / str(STEP + 3)
    (path / "checkpoint" / str(STEP)).rename(forged)
    state(step=STEP + 3)(forged)
    found, notices = answer(path, victim[1])
    assert found is None or found.step < STEP
    assert f"steps.csv is not the log that checkpoint {STEP + 3} was saved with" in notices


PARTS: dict[str, Harm] = {
    "no probe": lambda folder: (folder / "probe.safetensors").unlink(),
    "no snapshots": lambda folder: (folder / "layers.safetensors").unlink(),
    "another probe": lambda folder: save_file({"x": torch.ones(3)}, folder / "probe.safetensors"),
    "other snapshots": lambda f: save_file({"x": torch.ones(3)}, f / "layers.safetensors"),
    "an empty optimizer": lambda folder: save_file({}, folder / "optimizer.safetensors"),
}


@pytest.mark.parametrize("name", PARTS)
def test_parts_that_do_not_belong_are_refused(
    name: str, victim: tuple[Path, checkpoint.Owner], tmp_path: Path
) -> None:
    """With valid checksums: an error of one line, or a run that goes on without them."""
    shutil.copytree(victim[0].parent, tmp_path / "runs")
    path = only_run(tmp_path / "runs").path
    folder = path / "checkpoint" / str(STEP)
    PARTS[name](folder)
    reseal(folder)
    try:
        deepstack.train(small(), out=tmp_path)
    except ResourceError as error:
        assert str(folder) in str(error) and str(error).isprintable()
    else:
        assert f"not used: checkpoint {STEP}" in (path / "log.txt").read_text()
