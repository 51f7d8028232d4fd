"""The bar of long commands: on a terminal's stderr only, and gone at their end."""

import re
import sys
import time
from pathlib import Path

import pytest
from helpers import QUICK
from helpers.command_line import TINY, typed
from helpers.plot_runs import make_run
from helpers.terminals import terminal
from rich.progress import Progress

from deepstack.cli import output
from deepstack.cli.output import show_work


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["check", QUICK, *TINY], ["building the model"]),
        (["compare", "."], ["reading runs"]),
        (["plot", ".", "loss_vs_step", "--format", "csv"], ["drawing charts"]),
        (["verify", "."], ["comparing checksums", "comparing checksums: deepnorm-d6-s0-0.001"]),
        (["fit", "."], ["fitting"]),
    ],
)
def test_a_command_has_a_text(
    words: list[str], expected: list[str], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(here / "study")
    texts: list[str] = []
    monkeypatch.setattr(Progress, "add_task", lambda bar, text, total: texts.append(text))
    monkeypatch.setattr(
        Progress, "update", lambda bar, task, description, **more: texts.append(description)
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
