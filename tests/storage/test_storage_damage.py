"""A flipped bit or a cut-off file of an interrupted run is never silently gone on from."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from helpers.storage_calls import KILL_BEFORE
from helpers.storage_harness import LOGS, Harness
from helpers.storage_run import INTERVAL, STEPS


def interrupted(harness: Harness) -> Path:
    """A run that was killed with all rows on disk, as its last checkpoint was to be written."""
    last = f".draft-{STEPS}"
    (first, *_) = [call for call in harness.alone.calls if call.path.name == last]
    out = harness.new()
    assert harness.run(out, KILL_BEFORE, first.number).code == -9
    return out


def flipped(data: bytes, random: Random) -> bytes:
    """One bit is another."""
    changed = bytearray(data)
    changed[random.randrange(len(data))] ^= 1 << random.randrange(8)
    return bytes(changed)


def cut_off(data: bytes, random: Random) -> bytes:
    """Something is missing at the end."""
    return data[: random.randrange(len(data))]


def files_of(run: Path) -> list[Path]:
    """What a resume builds on: checkpoints and the logs that they vouch for."""
    return sorted([*run.glob("checkpoint/*/*"), *(run / name for name in LOGS)])


def names(line: str, name: Path) -> bool:
    """Whether a line names the damaged file: by itself, or the checkpoint that it belongs to."""
    if name.parts[0] != "checkpoint":
        return name.name in line
    return re.search(rf"checkpoint[ /]{name.parts[1]}\b", line) is not None


def harmless(name: Path, before: bytes, now: bytes) -> bool:
    """Whether a resume may say nothing, as long as all ends equal.

    Rows that no checkpoint vouches for may be missing: a kill leaves the same.
    """
    if name.parts[0] == "checkpoint":
        return before.strip() == now.strip()
    missing = before[now.rfind(b"\n") + 1 :].splitlines()
    is_cut = before.startswith(now)
    return is_cut and all(int(line.split(b",")[0]) > STEPS - INTERVAL for line in missing)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("damage", "times"),
    [
        (flipped, 4), (cut_off, 2), pytest.param(flipped, 300, marks=SLOW),
        pytest.param(cut_off, 60, marks=SLOW),
    ],
)  # fmt: skip
def test_no_damage_is_silent(
    damage: Callable[[bytes, Random], bytes], times: int, harness: Harness
) -> None:
    start, random = interrupted(harness), Random(times)
    for _ in range(times):
        out = harness.new()
        shutil.copytree(start, out, dirs_exist_ok=True)
        (run,) = out.glob("*/*/")
        path = random.choice(files_of(run))
        before, name = path.read_bytes(), path.relative_to(run)
        path.write_bytes(damage(before, random))
        now = path.read_bytes()
        ended, log = harness.run(out, None), run / "log.txt"
        messages = ended.stderr + (log.read_text() if log.exists() else "")
        is_named = any(names(line, name) for line in messages.splitlines())
        if ended.code:
            assert ended.code in (5, 6) and is_named, f"{name}: exit {ended.code}: {messages}"
        else:
            assert harness.different(out) == [], name
            assert is_named or harmless(name, before, now), name
        shutil.rmtree(out)
