"""deepstack rm: out of the way, not away; nothing outside of the results is touched."""

import json
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import product
from pathlib import Path
from time import sleep
from typing import Any
from unittest.mock import patch

import pytest
from helpers import record_runs
from helpers.command_line import succeed, typed
from helpers.record_runs import HOLDER, make_run, python

from deepstack.base.errors import LockedError
from deepstack.records import RunFolder, find_runs


def rm(out: Path, *words: object) -> Any:
    return typed("rm", *words, "--out", out)


def removed(out: Path, *words: object) -> list[Path]:
    """Return the places in the trash of what was removed."""
    return list(map(Path, succeed("rm", *words, "--out", out).splitlines()))


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


def test_a_run_goes_to_the_trash_with_every_byte(out: Path) -> None:
    before = contents(out / "one" / "d6")
    (there,) = removed(out, out / "one" / "d6")
    assert there.parts[-2:] == ("one", "d6") and there.parents[2] == out / ".trash"
    assert contents(there) == before
    assert [run.name for run in find_runs(out)] == ["d48", "d6", "d48"]
    there.rename(out / "one" / "d6")  # and back
    assert contents(out / "one" / "d6") == before and len(find_runs(out)) == 4


def test_a_study_goes_whole_and_its_runs_with_it(out: Path) -> None:
    before = contents(out / "one")
    given = out / "one" / "d6", out / "one", out / "two" / "d6", out / "two" / "." / "d6"
    study, run = removed(out, *given)
    assert (study.name, run.name) == ("one", "d6") and study.parent == run.parents[1]
    assert contents(study) == before
    for command in ("ls", "verify"):  # they do not see the trash
        rows = json.loads(typed(command, out, "--json").stdout)
        assert [(row["study"], row["run"]) for row in rows] == [("two", "d48")]
    assert len(json.loads(typed("ls", study, "--json").stdout)) == 2  # unless it is asked for
    rm(out, out / "two")
    assert typed("ls", out).exit_code == 7


def test_a_run_that_another_process_holds_stays(out: Path) -> None:
    process = python(HOLDER, out / "two" / "d48")
    try:
        assert process.stdout is not None and process.stdout.readline() == "locked\n"
        before = contents(out)
        for words in ([out / "two" / "d48"], [out / "two"], [out / "one" / "d6", out / "two"]):
            result = rm(out, *words)
            assert result.exit_code == 5 and f"process {process.pid}" in result.stderr
            assert result.stdout == "" and contents(out) == before
            assert not (out / ".trash").exists()
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert rm(out, out / "two").exit_code == 0


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


def test_what_is_no_run_or_study_below_out_is_refused(out: Path, tmp_path: Path) -> None:
    outside = make_run(tmp_path / "elsewhere" / "run").path
    make_run(out / "one" / "d6" / "checkpoint" / "inner")
    (out / "empty").mkdir()
    (out / "file").write_text("")
    before = contents(tmp_path)
    not_below = outside, out, out / "one" / "..", out / ".." / "elsewhere" / "run", "/", ""
    for path, code, message in (
        *product(not_below, [2], ["is not below"]),
        (out / "one" / "d6" / "checkpoint" / "inner", 2, "is no run and no study"),
        (out / "one" / "figures", 7, "is no run"),
        (out / "empty", 7, "holds no runs"),
        (out / "file", 7, "no such folder"),
        (out / "three", 7, "no such folder"),
    ):
        result = rm(out, out / "two", path)
        assert (result.exit_code, message in result.stderr) == (code, True), (path, result.stderr)
        assert contents(tmp_path) == before and not (out / ".trash").exists(), path
    assert rm(out).exit_code == 2 and rm(out, out / "one", "--empty").exit_code == 2


def test_what_is_in_the_trash_is_not_put_there_again(out: Path) -> None:
    (there,) = removed(out, out / "one")
    before = contents(out)
    for path in (out / ".trash", there.parent, there):
        assert rm(out, path).exit_code == 2
    with RunFolder(there / "d48").lock():  # at work
        assert rm(out, "--empty").exit_code == 5
    assert contents(out) == before


def test_links_are_not_followed(out: Path, tmp_path: Path) -> None:
    outside = make_run(tmp_path / "elsewhere" / "run").path
    (out / "linked").symlink_to(outside.parent)
    (out / "one" / "link").symlink_to(outside)
    before = contents(tmp_path / "elsewhere")
    assert rm(out, out / "linked").exit_code == 2
    assert rm(out, out / "linked" / "run").exit_code == 2
    result = rm(out, out / "one" / "link")
    assert result.exit_code == 2 and "symbolic link" in result.stderr
    # In a study that goes, a link goes as a link.
    (there,) = removed(out, out / "one")
    assert (there / "link").is_symlink() and not (out / "one").exists()
    assert contents(tmp_path / "elsewhere") == before
    assert not (outside / ".lock").exists()


def test_a_results_folder_may_be_a_link_itself(out: Path, here: Path) -> None:
    (here / "link").symlink_to(out)
    removed(Path("link"), "link/one/d6", "results/two")
    assert [run.name for run in find_runs(out)] == ["d48"]


def test_a_disk_or_a_trash_that_leads_elsewhere_leaves_all_where_it_is(
    out: Path, tmp_path: Path
) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("kept")
    before = contents(tmp_path)
    (out / ".trash").symlink_to(tmp_path / "precious")
    for words in ([out / "one"], ["--empty"]):
        result = rm(out, *words)
        assert result.exit_code == 2 and "not a folder of its own" in result.stderr
    (out / ".trash").unlink()
    refused = OSError(18, "Invalid cross-device link")
    with patch("deepstack.records.trash.os.rename", side_effect=refused):
        result = rm(out, out / "one")
    assert result.exit_code == 5 and "cross-device" in result.stderr
    assert contents(tmp_path) == before


def test_emptying_deletes_the_trash_and_nothing_else(out: Path, tmp_path: Path) -> None:
    (out / "one" / "d6" / "big").write_bytes(bytes(3_000_000))
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("kept")
    before = contents(tmp_path)
    (there,) = removed(out, out / "one" / "d6")
    (there / "link").symlink_to(outside)
    (out / ".trash" / "stray").symlink_to(outside)
    assert rm(out, "--empty").stdout == "3.0 MB freed, 1 runs\n"
    assert not list((out / ".trash").iterdir())
    kept = {name: data for name, data in before.items() if "/one/d6/" not in name}
    assert contents(tmp_path) == kept
    assert rm(out, "--empty").stdout == "0.0 MB freed, 0 runs\n"
    assert rm(tmp_path / "none", "--empty").exit_code == 0
    assert not (tmp_path / "none").exists()
