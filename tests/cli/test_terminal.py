"""Texts of runs reach the terminal and the report as letters, never as commands."""

import io
import json
import re
import sys
from pathlib import Path

import pytest
from helpers import plot_runs
from helpers.command_line import typed
from helpers.extensions import needs
from helpers.record_runs import make_run
from helpers.terminals import terminal
from rich.console import Console
from rich.live import Live

from deepstack.cli.display import observe
from deepstack.cli.output import (
    emit,
    log,
    show_work,
    terminal_console,
)
from deepstack.cli.streams import PrintableStream, printable_streams
from deepstack.cli.views import run_view
from deepstack.records import RunFolder
from deepstack.training import PlainLines, Started

# Colours, a window title, C1's CSI, DEL, a bell, a carriage return, bidi overrides, a byte that
# is not UTF-8; and markup and an emoji of rich.
LETTERS = ["\x1b[31m", "\x1b]0;owned\x07", "\x9b2J", "\x7f", "\r", "\x85", "\u202e", "\u2066",
           "\u200f", "\u2028", "\udcff", "\v"]  # fmt: skip
HOSTILE = "x" + "".join(LETTERS) + "[red]y :smile:"
SHOWN = (
    r"x\u001b[31m\u001b]0;owned\u0007\u009b2J\u007f\u000d\u0085\u202e\u2066\u200f\u2028\udcff"
    r"\u000b[red]y :smile:"
)
CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """A study of that name with a damaged run, one that failed and one that is done."""
    path = tmp_path / "out" / HOSTILE
    override = 'task: {{name: "a\\u202eb", n: {}}}\n'  # YAML refuses the others
    make_run(path / f"{HOSTILE}done", override.format(1))
    make_run(path / f"{HOSTILE}bad", override.format(2)).meta_path.write_text("\x1b[2J")
    failed = make_run(path / f"{HOSTILE}failed\nforged", override.format(3))
    failed.write_status("failed", 3, error=HOSTILE, phase="\x1b[2J")
    return path


@pytest.mark.parametrize("terminal", [{}, {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "400"}])
def test_ls_shows_names_and_errors_as_letters(terminal: dict[str, str], study: Path) -> None:
    found = typed("ls", study.parent, env=terminal)
    assert found.exit_code == 0
    assert ("\x1b[1m" in found.stdout) == bool(terminal)  # the head of the table
    for text in (re.sub(r"\x1b\[[0-9;]*m", "", found.stdout), found.stderr):
        assert not CONTROLS.search(text)
        assert f"{SHOWN}failed\\nforged" in text
    assert r"a\u202eb" in found.stdout or "task.n" in found.stdout
    bad, failed = found.stderr.splitlines()
    assert bad.startswith("run " + SHOWN) and failed.startswith("run " + SHOWN)


def test_a_pipe_with_forced_colours_has_every_column(tmp_path: Path) -> None:
    make_run(tmp_path / "study" / "run", "name: study\n")
    plain = typed("ls", tmp_path, env={"COLUMNS": "400"})
    forced = typed("ls", tmp_path, env={"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "20"})
    assert re.sub(r"\x1b\[[0-9;]*m", "", forced.stdout) == plain.stdout
    assert "\x1b[1m" in forced.stdout and "omitted" not in forced.stderr


@pytest.mark.parametrize("environment", [{"TERM": "dumb"}, {"TERM": "dumb", "FORCE_COLOR": "1"}])
def test_a_dumb_terminal_gets_no_escape_sequence(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (environment | {"COLUMNS": "60"}).items():
        monkeypatch.setenv(name, value)
    with terminal() as (file, read):
        monkeypatch.setattr(sys, "stdout", file)
        monkeypatch.setattr(sys, "stderr", file)
        emit([{"name": "a", "value": 1}], False)
        monkeypatch.setattr("deepstack.cli.output.DELAY_SECONDS", 0.0)
        with show_work("reading") as work, observe(quiet=False) as observer:
            work.show("reading", 1, 2)
            observer.notify("a line")
        file.flush()
        shown = "".join(iter(read, ""))
    assert "name" in shown and "a line" in shown and "\x1b" not in shown


def test_titles_of_columns_are_letters(tmp_path: Path) -> None:
    for number in (1, 2):
        make_run(tmp_path / f"run{number}", f'task: {{name: a, "\\e[31m\\rn": {number}}}\n')
    for words in ([], ["--markdown"]):
        found = typed("ls" if not words else "compare", tmp_path, *words)
        assert not CONTROLS.search(found.output), found.output
    assert r"task.\u001b[31m\u000dn" in typed("ls", tmp_path).stdout


def test_json_keeps_the_true_names(study: Path) -> None:
    found = typed("ls", study.parent, "--json")
    assert not CONTROLS.search(found.stdout)
    assert {row["study"] for row in json.loads(found.stdout)} == {HOSTILE}
    stream = io.StringIO()
    print(json.dumps(HOSTILE, ensure_ascii=False), file=PrintableStream(stream))
    assert not CONTROLS.search(stream.getvalue()) and json.loads(stream.getvalue()) == HOSTILE


@needs("export")
def test_verify_and_rm_and_errors_show_letters(study: Path, tmp_path: Path) -> None:
    done = study / f"{HOSTILE}done"
    for words in (
        ["verify", study.parent],
        ["verify", tmp_path / HOSTILE],
        ["compare", study.parent],
        ["export", done, "--to", tmp_path / "x"],
        ["check", done / "config.yaml"],
        ["rm", done, "--out", study.parent, "--yes"],
        ["plot", f"--{HOSTILE}"],
    ):
        found = typed(*words)
        assert found.output and not CONTROLS.search(found.output), words
        assert re.search(r"\\(u00|x)1b\[31m", found.output), found.output


@needs("report")
def test_a_report_and_its_progress_show_letters(tmp_path: Path) -> None:
    hostile, shown = HOSTILE.replace("\udcff", ""), SHOWN.replace(r"\udcff", "")
    study = tmp_path / hostile
    for seed in (0, 1):
        path = plot_runs.make_run(study, seed=seed, config={"task.note": "a\u202eb"})
        path.rename(path.with_name(f"{hostile}{seed}"))
    failed = plot_runs.make_run(study, seed=2)
    RunFolder(failed).write_status("failed", 1, error=HOSTILE)
    RunFolder(failed).write_meta({"environment": {"torch": HOSTILE}})
    found = typed("report", study, "--to", tmp_path / "page.html")
    assert found.exit_code == 0, found.output
    assert not CONTROLS.search(found.output) and f"{shown}: loss_vs_step" in found.stderr
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert not CONTROLS.search(page)
    assert page.count(shown) > 5 and SHOWN in page and r"a\u202eb" in page


def test_the_display_of_a_run_shows_letters(tmp_path: Path) -> None:
    stream, folder = io.StringIO(), RunFolder(tmp_path / HOSTILE)
    console = Console(file=stream, force_terminal=True, markup=False, emoji=False, width=400)
    display = PlainLines(0.0, run_view(console))
    display.started(Started(folder, "[red]A[/red]", [2], 10, 1, 5, "cpu", {}))
    display.notify(f"not used: {HOSTILE}")
    display.finished("done", 5)
    text = re.sub(r"\x1b\[([0-9;]*m|\?25[hl]|2K|1A)|\r", "", stream.getvalue())
    assert not CONTROLS.search(text)
    assert text.count(SHOWN) == 2 and "[red]A[/red], 2 layers" in text


def test_a_line_above_a_live_display_shows_letters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    with terminal() as (stderr, read):
        monkeypatch.setattr(sys, "stderr", stderr)
        with printable_streams(), Live("table", console=terminal_console()):
            log(HOSTILE.replace("\udcff", ""))
        stderr.flush()
        text = "".join(iter(read, ""))
    assert SHOWN.replace(r"\udcff", "") in "".join(text.splitlines())
