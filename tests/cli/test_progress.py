"""Commands that follow runs: bars, the table of `ls --watch` and of sweeps."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import QUICK
from helpers.command_line import TINY, refusal, typed
from helpers.extensions import needs
from helpers.plot_runs import make_run, update
from helpers.terminals import terminal

from deepstack.cli import output, run_watcher, sweep_output
from deepstack.cli.output import show_work
from deepstack.cli.run_table import RunRow
from deepstack.cli.run_watcher import RunWatcher, caption_of
from deepstack.cli.streams import PrintableStream
from deepstack.config import Config
from deepstack.records import RunFolder
from deepstack.runs import Runs
from deepstack.sweeps import Cell, CellProgress


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["check", QUICK, *TINY], ["building the model"]),
        (["compare", "."], ["reading runs"]),
        (["plot", ".", "loss_vs_step", "--format", "csv"], ["drawing charts"]),
        (["verify", "."], ["comparing checksums", "comparing checksums: deepnorm-d6-s0-0.001"]),
        pytest.param(["fit", "."], ["fitting"], marks=needs("laws")),
    ],
)
def test_a_command_has_a_text(
    words: list[str], expected: list[str], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(here / "study")
    texts: list[str] = []
    monkeypatch.setattr(output, "is_interactive", lambda stream: True)
    monkeypatch.setattr(output, "DELAY_SECONDS", 3600.0)
    monkeypatch.setattr(
        "rich.progress.Progress.add_task", lambda bar, text, **more: texts.append(text)
    )
    monkeypatch.setattr(
        "rich.progress.Progress.update",
        lambda bar, task, description, **more: texts.append(description),
    )
    typed(*words)
    assert texts[: len(expected)] == expected


def test_a_pipe_gets_lines_alone_and_a_quiet_command_nothing(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output.threading, "Timer", lambda *_: pytest.fail("a bar is due"))
    with show_work("working") as work:
        work.note("a line")
    assert capfd.readouterr() == ("", "a line\n")
    with terminal() as (stderr, _):
        monkeypatch.setattr(sys, "stderr", stderr)
        with show_work("working", quiet=True):
            pass


def test_a_short_command_shows_nothing_and_notes_stay_letters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with terminal() as (stderr, read):
        monkeypatch.setattr(sys, "stderr", stderr)
        with show_work("short"):
            pass
        monkeypatch.setattr(output, "DELAY_SECONDS", 0.0)
        with show_work("long\x1b[2J") as work:
            work.step("part\x1b[2J", 3)
            time.sleep(0.5)
            work.note("note\x1b[2J [red]")
        stderr.flush()
        text = "".join(iter(read, ""))
    assert "short" not in text and "part\\u001b[2J" in text and "━" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor is there again
    assert "note\\u001b[2J [red]" in re.sub(r"\x1b\[[0-9;]*m", "", text) and "\x1b[2J" not in text


# --- `deepstack ls --watch` shows the runs of any process, and ends with Ctrl-C -------------------


WATCH = [sys.executable, "-m", "deepstack", "ls", "--watch"]


def watcher_of(folder: Path) -> RunWatcher:
    return RunWatcher(lambda: Runs.below(folder))


def add_steps(path: Path, *steps: int) -> None:
    with open(path / "steps.csv", "a") as file:
        file.writelines(f"{step},2.5,0.1,1,0.125,1,1,1\n" for step in steps)


def make_running(root: Path, seed: int = 0) -> RunFolder:
    """A run of 50 steps that is at step 5; each of its steps took 200 ms."""
    folder = RunFolder(make_run(root, seed=seed, config={"train.steps": 50}))
    folder.write_status("running", 5)
    folder.timing_path.write_text(
        "step,step_ms,peak_memory_mb\n" + "".join(f"{step},200,1\n" for step in range(1, 6))
    )
    return folder


def test_a_running_run_has_speed_and_time_left(tmp_path: Path) -> None:
    make_run(tmp_path, scheme="post_ln", state="diverged")
    folder = make_running(tmp_path)
    watcher = watcher_of(tmp_path)
    with folder.lock():
        running, diverged = watcher.read()
        assert running == RunRow(
            folder.name,
            "running",
            5,
            50,
            2.5,
            "2.5 nats (unigram 3.26)",
            pytest.approx(update(6, 5)),
            200.0,
            9.0,
        )
        assert (diverged.state, diverged.step) == ("diverged", 5)
        assert caption_of([running, diverged], tmp_path) == (
            "0 of 2 done, 1 diverged, 1 running; the last of these in about 0:00:09"
        )
        add_steps(folder.path, 6)
        assert watcher.read()[0].step == 6
    # Without a process that holds it here, a log that grows belongs to one of another machine.
    assert watcher_of(tmp_path).read()[0].state == "running"
    add_steps(folder.path, 7)
    assert watcher_of(tmp_path).read()[0].step == 7
    os.utime(folder.steps_path, (0, 0))
    assert watcher.read()[0].state == "interrupted"


def test_unchanged_runs_are_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path)
    watcher = watcher_of(tmp_path)
    before = watcher.read()
    monkeypatch.setattr(run_watcher, "row_of", lambda *_: pytest.fail("read again"))
    assert watcher.read() == before
    monkeypatch.undo()
    (run / "status.json").write_text("{")
    assert watcher.read()[0].state == "damaged"


def test_runs_of_several_studies_are_chosen_and_named_with_their_study(tmp_path: Path) -> None:
    for study, depth in (("one", 6), ("two", 6), ("two", 48)):
        make_run(tmp_path / study, depth=depth)
    watcher = RunWatcher(lambda: Runs.below(tmp_path).select("depth=6"))
    names = [row.name for row in watcher.read()]
    assert [name.partition("/")[0] for name in names] == ["one", "two"]
    assert RunWatcher(lambda: Runs.below(tmp_path).select("depth=7")).read() == []


def test_watching_prints_no_json_and_knows_its_conditions(tmp_path: Path) -> None:
    make_run(tmp_path)
    assert "found --json" in refusal(2, "ls", tmp_path, "--watch", "--json")
    assert "did you mean" in refusal(2, "ls", tmp_path, "--watch", "--where", "dpeth=6")


@pytest.mark.slow(turn=30)
def test_lines_follow_states_and_an_interrupt_ends_them(tmp_path: Path) -> None:
    """It may begin before the first run does."""
    root = tmp_path / "results"
    with subprocess.Popen([*WATCH, root], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert "no runs below" in process.stdout.readline()
            folder = make_running(tmp_path / "later")
            root.mkdir()
            folder.path.parent.rename(root / "study")
            assert process.stdout.readline().startswith("running      deepnorm-d6-s0")
            RunFolder(root / "study" / folder.name).write_status("failed", 5)
            assert process.stdout.readline().startswith("failed       deepnorm-d6-s0")
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0


@pytest.mark.slow(turn=63)
def test_a_terminal_shows_a_table_that_is_redrawn(tmp_path: Path) -> None:
    folder = make_running(tmp_path)
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "120", "LINES": "40"}
    with terminal() as (stdout, read):
        process = subprocess.Popen([*WATCH, tmp_path], stdout=stdout, env=environment)

        def read_until(words: str) -> str:
            text, end = "", time.monotonic() + 60
            while words not in text:
                assert time.monotonic() < end, text
                text += re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", read())
            return text

        try:
            text = read_until("about")
            assert "0 of 1 done, 1 running" in text and "u001b" not in text
            add_steps(folder.path, 7)
            read_until("7/50")
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0


def test_a_sweep_shows_the_same_table_below_a_bar_of_its_flops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = make_running(tmp_path), RunFolder(tmp_path / "run\x1b[2J")
    cells = [Cell(Config(), each, "new", parameters=1, memory=1, flops=10**6) for each in folders]
    progress = list(map(CellProgress, cells, ("running", "waiting")))
    steps = Config().train.steps
    with terminal() as (stderr, read):
        monkeypatch.setattr(sys, "stderr", PrintableStream(stderr))
        with sweep_output.watch(False, cells) as show:
            show(progress)
        stderr.flush()
        text = "".join(iter(read, ""))
    assert "\x1b[36mrunning" in text and "━━━" in text and "0 of 2 done" in text
    assert text.count("\\u001b") == text.count("run\\u001b[2J") > 0 and f"5/{steps}" in text
    row = sweep_output.read_rows(progress, {})[0]
    assert (row.step_ms, row.seconds_left) == (200.0, (steps - 5) * 0.2)
    assert sweep_output.flops_left(progress[0], row) == 10**6 * (1 - 5 / steps)
