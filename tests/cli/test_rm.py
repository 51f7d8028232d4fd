"""deepstack rm: it lists, asks and deletes; nothing outside of the results is touched."""

import json
import os
import pty
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import product
from pathlib import Path
from time import sleep
from typing import Any
from unittest.mock import patch

import pytest
from helpers import ROOT, record_runs
from helpers.command_line import succeed, typed
from helpers.record_runs import HOLDER, make_run, python

from deepstack.base.errors import LockedError
from deepstack.records import RunFolder, find_runs
from deepstack.records.removal import plan_removals, remove


def rm(out: Path, *words: object) -> Any:
    return typed("rm", *words, "--out", out, "--yes")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Two studies of two runs."""
    results = tmp_path / "results"
    for study in ("one", "two"):
        for depth in (6, 48):
            make_run(results / study / f"d{depth}", f"model: {{depth: {depth}}}\n")
        (results / study / "figures").mkdir()
        (results / study / "figures" / "chart.csv").write_text("x\n")
    return results


contents = partial(record_runs.contents, without=".lock")  # taking a lock writes who has it


def hidden(out: Path) -> list[Path]:
    """Return the rest of killed removals."""
    return [*out.glob(".removed-*"), *out.glob("*/.removed-*")]


def test_a_run_is_listed_with_its_size_and_deleted(out: Path) -> None:
    before = contents(out)
    (out / "one" / "d6" / "big").write_bytes(bytes(3_000_000))
    result = rm(out, out / "one" / "d6")
    assert result.stderr == f"       3.0 MB  {out}/one/d6\n"
    assert result.stdout == "deleted: 1 run, 3.0 MB\n"
    kept = {name: data for name, data in before.items() if not name.startswith("one/d6/")}
    assert contents(out) == kept and not hidden(out)


def test_a_study_is_deleted_with_its_runs(out: Path) -> None:
    before = contents(out / "two")
    given = out / "one" / "d6", out / "one", out / "two" / "d6", out / "two" / "." / "d6"
    result = rm(out, *given)
    listed = [line.split(" MB  ")[1] for line in result.stderr.splitlines()]
    one = [f"{out}/one/d6", f"{out}/one/d48", f"{out}/one as a whole"]
    assert listed == [*one, f"{out}/two/d6"] and result.stdout.startswith("deleted: 3 runs, ")
    assert not (out / "one").exists() and not hidden(out)
    kept = {name: data for name, data in before.items() if not name.startswith("d6/")}
    assert contents(out / "two") == kept
    assert rm(out, out / "two").exit_code == 0
    assert typed("ls", out).exit_code == 7


def test_without_a_terminal_nothing_is_deleted_unless_yes_is_given(out: Path) -> None:
    before = contents(out)
    result = typed("rm", out / "one", "--out", out)
    assert result.exit_code == 2 and contents(out) == before
    assert f"{out}/one/d48" in result.stderr
    assert "no terminal to ask on; to delete 2 runs, 0.0 MB: add --yes" in result.stderr


def test_a_terminal_is_asked_and_any_answer_but_yes_deletes_nothing(here: Path) -> None:
    make_run(here / "results" / "one" / "run")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "deepstack", "rm", "results/one"]
    for answer, is_left in ((b"\n", True), (b"y\n", False)):
        controller, terminal = pty.openpty()
        os.write(controller, answer)
        process = subprocess.run(
            command, stdin=terminal, stdout=terminal, stderr=terminal, env=environment
        )
        os.close(terminal)
        shown = os.read(controller, 10_000).decode()
        os.close(controller)
        assert process.returncode == 0 and "results/one/run" in shown
        assert "delete 1 run, 0.0 MB for good? [y/N]" in shown
        assert ("nothing was deleted" in shown) == is_left
        assert Path("results/one/run").exists() == Path("results/one").exists() == is_left


def test_a_run_that_another_process_holds_stays(out: Path) -> None:
    process = python(HOLDER, out / "two" / "d48")
    try:
        assert process.stdout is not None and process.stdout.readline() == "locked\n"
        before = contents(out)
        for words in ([out / "two" / "d48"], [out / "two"], [out / "one" / "d6", out / "two"]):
            result = rm(out, *words)
            assert result.exit_code == 5 and f"process {process.pid}" in result.stderr
            assert result.stdout == "" and contents(out) == before
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert rm(out, out / "two").exit_code == 0


def test_a_run_that_begins_after_the_question_stays(out: Path) -> None:
    """It is a listed run, or one that is locked and has no config.yaml yet."""
    for name in ("d48", "new"):
        folder = RunFolder(out / "one" / name)
        (removal,) = plan_removals([out / "one"], out)
        with folder.lock():
            before = contents(folder.path)
            with pytest.raises(LockedError):
                remove(removal)
            assert folder.path.is_dir() and contents(folder.path) == before
        folder.write_config("model: {depth: 6}\n")
    assert not (out / "one" / "d6").exists() and not hidden(out)


def test_who_waited_for_a_folder_that_went_away_is_refused(out: Path) -> None:
    folder = RunFolder(out / "one" / "d6")

    def move() -> None:
        sleep(0.1)
        folder.path.rename(out / "gone")

    with ThreadPoolExecutor(1) as threads, ExitStack() as moved:
        moved.enter_context(folder.lock())
        threads.submit(move).add_done_callback(lambda _: moved.close())
        with pytest.raises(LockedError, match="was moved away"), folder.lock():
            pass


def test_a_path_that_is_not_a_run_or_a_study_is_refused(out: Path, tmp_path: Path) -> None:
    outside = make_run(tmp_path / "elsewhere" / "run").path
    make_run(out / "one" / "d6" / "checkpoint" / "inner")
    (out / "empty").mkdir()
    (out / "file").write_text("")
    before = contents(tmp_path)
    not_below = outside, out, out / "one" / "..", out / ".." / "elsewhere" / "run", "/", ""
    for path, code, message in (
        *product(not_below, [2], ["is not below"]),
        (out / "one" / "d6" / "checkpoint" / "inner", 2, "is not a run or a study"),
        (out / "one" / "figures", 7, "is not a run"),
        (out / "empty", 7, "holds no runs"),
        (out / "file", 7, "no such folder"),
        (out / "three", 7, "no such folder"),
    ):
        result = rm(out, out / "two", path)
        assert (result.exit_code, message in result.stderr) == (code, True), (path, result.stderr)
        assert contents(tmp_path) == before, path
    assert rm(out).exit_code == 2


def test_links_are_not_followed(out: Path, tmp_path: Path) -> None:
    outside = make_run(tmp_path / "elsewhere" / "run").path
    (out / "linked").symlink_to(outside.parent)
    (out / "one" / "link").symlink_to(outside)
    (out / "two" / "d6" / ".lock").symlink_to(outside / "config.yaml")
    before = contents(tmp_path / "elsewhere")
    assert rm(out, out / "linked").exit_code == 2
    assert rm(out, out / "linked" / "run").exit_code == 2
    result = rm(out, out / "one" / "link")
    assert result.exit_code == 2 and "symbolic link" in result.stderr
    result = rm(out, out / "two")
    assert result.exit_code == 5 and "found a link" in result.stderr
    # In a study that is deleted, a link is deleted and its target stays.
    assert rm(out, out / "one").exit_code == 0 and not (out / "one").exists()
    assert contents(tmp_path / "elsewhere") == before
    assert not (outside / ".lock").exists()


def test_a_results_folder_may_be_a_link(out: Path, here: Path) -> None:
    (here / "link").symlink_to(out)
    succeed("rm", "link/one/d6", "results/two", "--out", "link", "--yes")
    assert [run.name for run in find_runs(out)] == ["d48"]


def test_a_kill_leaves_whole_runs_and_later_use_deletes_the_rest(
    out: Path,
) -> None:
    before = {name: contents(out / "one" / name) for name in ("d6", "d48")}

    class Killed(BaseException):
        pass

    with patch("deepstack.records.removal.shutil.rmtree", side_effect=Killed):
        (removal,) = plan_removals([out / "one"], out)
        with pytest.raises(Killed):
            remove(removal)
    (rest,) = hidden(out)
    assert contents(rest) == before["d6"] and contents(out / "one" / "d48") == before["d48"]
    for command in ("ls", "verify"):  # they do not see the rest
        rows = json.loads(typed(command, out, "--json").stdout)
        assert [row["run"] for row in rows] == ["d48", "d6", "d48"]
    with RunFolder(out / "one" / "d48").lock():  # as training does
        assert not hidden(out)
    (out / "one" / "d48").rename(out / ".removed-01234567")
    assert rm(out, out / "three").exit_code == 7 and not hidden(out)


def test_a_disk_that_refuses_leaves_every_run_where_it_is(out: Path) -> None:
    before = contents(out)
    refused = OSError(30, "Read-only file system")
    with patch("deepstack.records.removal.os.rename", side_effect=refused):
        result = rm(out, out / "one")
    assert result.exit_code == 5 and "Read-only" in result.stderr
    assert contents(out) == before


def test_the_trash_of_an_earlier_version_is_deleted_like_a_study(out: Path, tmp_path: Path) -> None:
    old = out / ".trash" / "20260101-000000-000000" / "one"
    old.parent.mkdir(parents=True)
    (out / "one").rename(old)
    rows = json.loads(typed("ls", out, "--json").stdout)
    assert {row["study"] for row in rows} == {"two"}
    for path in (old, old.parent, old / "d6"):
        assert rm(out, path).exit_code == 2
    with RunFolder(old / "d48").lock():
        assert rm(out, out / ".trash").exit_code == 5
    assert rm(out, out / ".trash").stdout.startswith("deleted: 2 runs")
    assert not (out / ".trash").exists() and len(find_runs(out)) == 2
    (out / ".trash").symlink_to(tmp_path)
    assert rm(out, out / ".trash").exit_code == 2
