"""A run never resumes silently from a flipped bit or a truncated file."""

import os
import re
import shutil
from pathlib import Path
from random import Random

import pytest
from helpers.ended_runs import flip
from helpers.sampling import ROTATION
from helpers.storage_calls import KILL_BEFORE
from helpers.storage_harness import LOGS, Harness
from helpers.storage_run import INTERVAL, STEPS


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


@pytest.mark.parametrize(
    ("flips", "cuts"),
    [
        (4, 2),
        pytest.param(50, 10, marks=pytest.mark.slow),
        pytest.param(300, 60, marks=pytest.mark.full),
    ],
)
def test_no_damage_is_silent(flips: int, cuts: int, harness: Harness) -> None:
    # A run that was killed with all rows on disk, as its last checkpoint was to be written.
    drafts = [c for c in harness.alone.calls if c.path.name.startswith(f".draft-{STEPS}-")]
    first = drafts[0]
    start, random = harness.new(), Random(flips + ROTATION)
    assert harness.run(start, KILL_BEFORE, first.number).code == -9
    for number in range(flips + cuts):
        out = harness.new()
        shutil.copytree(start, out, dirs_exist_ok=True)
        (run,) = out.glob("*/*/")
        # A resume reads checkpoints and the logs that they confirm.
        path = random.choice(sorted([*run.glob("checkpoint/*/*"), *map(run.joinpath, LOGS)]))
        before, name = path.read_bytes(), path.relative_to(run)
        if number < flips:
            flip(path, random.randrange(8 * len(before)))
        else:
            os.truncate(path, random.randrange(len(before)))
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
