"""Long tables of cases: which of them the default run, the slow tests and the full tests try.

The rest of a table rotates: ROTATION is a number of the commit, so each commit tries another part.
So do the slow tests, by halves.
`pytest -m full` tries all of it.
"""

import os
import subprocess
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar
from zlib import crc32

import pytest

from helpers import ROOT, TESTS

T = TypeVar("T")

FAST = ("config", "records", "runs", "schemes", "tasks", "training/test_training.py")
"""The places of `pytest -m fast`: equations, configurations, run folders, tasks, one training."""


ALWAYS = ("mlflow", "ray", "slurm", "tensorboard", "trackio", "wandb")
"""The packages of other programs, whose slow tests are always tried."""


def find_rotation() -> int:
    """Return DEEPSTACK_ROTATION, else the first digits of the commit, else 0."""
    given = os.environ.get("DEEPSTACK_ROTATION", "")
    command = ["git", "-C", str(ROOT), "rev-parse", "--short=8", "HEAD"]
    try:
        return int(given) if given else int(subprocess.check_output(command, text=True), 16)
    except (OSError, subprocess.CalledProcessError):  # no repository
        return 0


ROTATION = find_rotation()


def one_of_each(cases: Sequence[T], kind: Callable[[T], Hashable]) -> list[T]:
    """Return one case of each kind, in their order; ROTATION chooses it."""
    kinds: dict[Hashable, list[T]] = {}
    for case in cases:
        kinds.setdefault(kind(case), []).append(case)
    chosen = {id(group[ROTATION % len(group)]) for group in kinds.values()}
    return [case for case in cases if id(case) in chosen]


def some(cases: Iterable[Any], every: int, first: int = 0) -> list[Any]:
    """The cases, of which all but each `every`-th, from the one at `first` on, are marked slow.

    Tests over one registry begin at different places, so that together they see all of it.
    A case is a tuple where a test takes several values.
    """
    return [
        case
        if at % every == first
        else pytest.param(
            *(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow(turn=at)
        )
        for at, case in enumerate(cases)
    ]


def turn(at: int, every: int) -> pytest.MarkDecorator:
    """Return the mark slow at each `every`-th commit, and full at the others."""
    return pytest.mark.full if (at + ROTATION) % every else pytest.mark.slow(chosen=True)


def rotating(cases: Iterable[Any], every: int) -> list[Any]:
    """The cases, of which each `every`-th is marked slow, and the rest full; ROTATION chooses."""
    return [pytest.param(case, marks=turn(at, every)) for at, case in enumerate(cases)]


@cache
def changed_packages() -> frozenset[str]:
    """Return the packages whose code or tests the commits of the last day change."""
    git = ["git", "-C", str(ROOT)]
    try:
        day = int(subprocess.check_output([*git, "log", "-1", "--format=%ct"], text=True)) - 86400
        log = [
            *git,
            "log",
            f"--since={day}",
            "--name-only",
            "--format=",
            "--",
            "deepstack",
            "deepstack_lab",
            "tests",
        ]
        paths = map(Path, subprocess.check_output(log, text=True).splitlines())
        return frozenset(package_of(path.parts[1:]) for path in paths if len(path.parts) > 2)
    except (OSError, subprocess.CalledProcessError):
        return frozenset()


def package_of(parts: Sequence[str]) -> str:
    """Return the package or addition of a path below deepstack/, deepstack_lab/ or tests/."""
    return parts[parts[0] in ("instruments", "tools", "integrations", "lab")]


def is_put_off(item: pytest.Item) -> bool:
    """Return whether a slow test waits for another commit.

    A commit tries half of the slow tests.  Of the cases of `some` it tries a quarter in packages
    that have changed, and an eighth in the others.  Those of `rotating` are chosen already, and
    the few of other programs are always tried.
    """
    marks = [mark.kwargs for mark in item.iter_markers("slow")]
    package = package_of(item.path.relative_to(TESTS).parts)
    if not marks or "chosen" in marks[0] or package in ALWAYS:
        return False
    turns = [kwargs["turn"] for kwargs in marks if "turn" in kwargs]
    if not turns:
        return (crc32(item.nodeid.encode()) + ROTATION) % 2 != 0
    every = 4 if package in changed_packages() else 8
    return (sum(turns) + ROTATION) % every != 0
