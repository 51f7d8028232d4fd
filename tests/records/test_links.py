"""No command writes outside of its folder: a link or a pipe may have the name of any of its files.

Each command runs once on a sound folder, which shows the names that it writes.  Then each of these
names, and the names of drafts of earlier versions, is a link or a pipe in turn.
"""

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from helpers.command_line import TINY, typed
from helpers.extensions import known_words
from helpers.plot_runs import without_layout
from helpers.record_runs import make_run
from helpers.small_runs import interrupted, small

from deepstack.base.errors import ResourceError
from deepstack.cli.commands import find_commands
from deepstack.plots import CHARTS
from deepstack.records.files import replace
from deepstack.records.opened import Draft, followed, open_folder

SETTINGS = [
    *TINY,
    "train.eval_every=1",
    "log.layers_every=1",
    *known_words(["log.attribution_every=1"]),
]
COMMANDS = {
    "note": "note results/study/run text --tag good",
    "report": "report results/study -q",
    "plot": "plot loss_vs_step results/study --format csv",
    "plot of a run": "plot loss_vs_step results/study/run --format csv",
    "plot to": "plot loss_vs_step results/study --format csv --to there",
    "analyze": "analyze results/study/run --what linear --batches 1",
    "export": "export results/study/run --to exported",
    "init": "init mine.yaml",
    "rm": "rm results/study/run --yes",
    "train": "train config.yaml --study new -q",
    "resume": "train stopped.yaml --study runs -q",
    "extend": "train results/study/run --extend 1 --study longer -q",
    "rerun": "rerun results/study/run -q",
    "verify": "verify results",
}
COMMANDS = {name: line for name, line in COMMANDS.items() if line.split()[0] in find_commands()}
KINDS = ("link", "dangling link", "link to a folder", "pipe", "hard link")
# Folders that the command line names: the user may name a link.
NAMED = ("there", "exported", "results/new", "results/longer")
# Commands of milliseconds: every name meets every kind.  Otherwise it meets one of them.
FAST = ("note", "init", "report", "plot", "plot of a run")
QUICK = [
    *(("note", kind) for kind in KINDS), ("init", "dangling link"),
    ("report", "link to a folder"), ("train", "link"),
]  # fmt: skip
QUICK = [(command, kind) for command, kind in QUICK if command in COMMANDS]
SLOW = [(command, kind) for command in COMMANDS for kind in KINDS if (command, kind) not in QUICK]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run, an interrupted one, and their configurations."""
    place = tmp_path_factory.mktemp("links") / "place"
    place.mkdir()
    with inside(place):
        Path("config.yaml").write_text("seed: 1\n")
        words = ["train", "config.yaml", *SETTINGS, "runtime.keep_optimizer=true"]
        done = typed(*words, "train.schedule=constant", "--study", "study", "-q")
        assert done.exit_code == 0, done.output
        (run,) = Path("results/study").iterdir()
        run.rename("results/study/run")
        shutil.copy("results/study/run/config.yaml", "config.yaml")
        folder = interrupted(small(**{"train.steps": 4}), Path("results").resolve(), at=2)
        shutil.copy(folder.config_path, "stopped.yaml")
    return place


@contextmanager
def inside(folder: Path) -> Iterator[None]:
    """Work in a folder."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def content(folder: Path) -> dict[str, bytes | None]:
    """Return the bytes of every file below a folder, and None for everything else."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        if path.is_file() and not path.is_symlink()
        else None
        for path in folder.rglob("*")
    }


class Waited(BaseException):
    """A command waited for a pipe; nothing catches this."""


def run(command: str, folder: Path) -> Any:
    """Run a command in a folder; a command that waits for a minute has failed."""

    def give_up(*_: object) -> None:
        raise Waited(command)

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(60)
    try:
        one_chart = {"loss_vs_step": CHARTS["loss_vs_step"]}
        with inside(folder), without_layout(), ExitStack() as stack:
            if "report" in find_commands():
                page = "deepstack.tools.report.page"
                stack.enter_context(patch.multiple(page, CHARTS=one_chart, FIRST=()))
            done = typed(*COMMANDS[command].split())
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


@cache
def written_names(command: str, place: Path) -> tuple[str, ...]:
    """Return the paths that a command makes or changes, and their drafts in earlier versions."""
    copy = place.parent / f"sound-{command.replace(' ', '-')}"
    shutil.copytree(place, copy)
    before = content(copy)
    done = run(command, copy)
    assert done.exit_code == 0, done.output
    after = content(copy)
    names = [name for name, data in after.items() if before.get(name, b"?") != data]
    # the names of event files have a time in them
    fixed = [name for name in names if "tfevents" not in name]
    drafts = [str(Path(name).with_name(f".{Path(name).name}.new")) for name in fixed]
    return tuple(sorted({*fixed, *drafts}))


def plant(kind: str, path: Path, outside: Path) -> None:
    """Put a link or a pipe in place of a file or a folder, which is moved outside."""
    target = outside / "file"
    if path.is_dir():
        shutil.copytree(path, outside / "folder", dirs_exist_ok=True)
        shutil.rmtree(path)
    elif path.exists():
        path.rename(target)
    if not target.exists():
        target.write_text("precious")
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "hard link":
        os.link(target, path)
    else:
        targets = {"link": target, "link to a folder": outside / "folder"}
        path.symlink_to(targets.get(kind, outside / "absent"))


@pytest.mark.parametrize(
    ("command", "kind"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_no_command_writes_through_a_link_or_waits_for_a_pipe(
    command: str, kind: str, place: Path, tmp_path: Path
) -> None:
    names = written_names(command, place)
    assert names or command in ("rm", "rerun", "verify")
    first, every = (0, 1) if command in FAST else (KINDS.index(kind), len(KINDS))
    for number, name in enumerate(names[first::every]):
        if kind == "link to a folder" and name in NAMED:
            continue
        outside, copy = tmp_path / f"outside-{number}", tmp_path / f"copy-{number}"
        (outside / "folder").mkdir(parents=True)
        (outside / "folder" / "report.html").write_text("precious")
        shutil.copytree(place, copy)
        plant(kind, copy / name, outside)
        before = content(outside)
        done = run(command, copy)
        assert content(outside) == before, f"{name}: {done.output}"
        shutil.rmtree(copy)


def test_only_the_user_s_own_link_is_followed(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.mkdir()
    link.symlink_to(target)
    replace(followed(link) / "file", b"new")
    assert content(target) == {"file": b"new"}
    with patch("os.geteuid", lambda: os.getuid() + 1), pytest.raises(ResourceError) as caught:
        replace(followed(link) / "other", b"new")
    assert "link is a link to" in str(caught.value) and content(target) == {"file": b"new"}


def test_drafts_of_killed_processes_are_removed_and_of_living_ones_stay(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    old = [folder.path / ".status.json.new", folder.path / ".meta.json.0123abcd.new"]
    old.append(folder.layers_dir / ".steps.npy.0123abcd.new")
    folder.layers_dir.mkdir()
    for path in old:
        path.write_text("half")
    with open_folder(folder.path) as opened:
        draft = Draft("meta.json", opened)
        with folder.lock():
            assert not any(path.exists() for path in old)
            assert (folder.path / draft.path).exists()
        draft.close()
    assert not (folder.path / draft.path).exists()


def test_a_pipe_among_drafts_blocks_no_command(place: Path, tmp_path: Path) -> None:
    copy = tmp_path / "place"
    shutil.copytree(place, copy)
    (stopped,) = (copy / "results" / "runs").iterdir()
    for folder in (stopped / "checkpoint", copy / "results" / "study" / "run" / "analysis"):
        folder.mkdir(exist_ok=True)
        os.mkfifo(folder / ".draft")
    assert run("resume", copy).exit_code == 0
    if "analyze" in find_commands():
        assert run("analyze", copy).exit_code in (0, 5)


def test_a_study_that_is_another_user_s_link_is_refused(place: Path, tmp_path: Path) -> None:
    copy = tmp_path / "place"
    shutil.copytree(place, copy)
    (tmp_path / "target").mkdir()
    (copy / "results" / "new").symlink_to(tmp_path / "target")
    with patch("os.geteuid", lambda: os.getuid() + 1):
        done = run("train", copy)
    assert done.exit_code == 5 and "link that another user made" in done.stderr
    assert not list((tmp_path / "target").iterdir())
