"""The bar of long commands: on a terminal's stderr only, and gone at their end."""

from __future__ import annotations

import os
import pty
import re
import select
import sys
import time
from pathlib import Path

import pytest
from helpers import ROOT
from helpers.command_line import typed
from helpers.plot_runs import make_run
from helpers.terminals import run_on_terminal

from deepstack.cli import progress
from deepstack.cli.progress import show_work

TRAIN = ("train", str(ROOT / "configs" / "quick.yaml"), "model.depth=1", "train.steps=1",
         "train.batch_size=1", "train.eval_batches=1", "--out")  # fmt: skip


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("check", "building the model"),
        ("report", "study: "), ("compare", "reading runs"), ("plot", "drawing charts"),
        ("train", "loading PyTorch"),
    ],
)  # fmt: skip
def test_a_terminal_shows_what_a_command_does(tmp_path: Path, command: str, words: str) -> None:
    make_run(tmp_path / "study")
    rest = {"check": [str(ROOT / "configs" / "quick.yaml")], "train": [*TRAIN[1:], str(tmp_path)]}
    printed, shown = run_on_terminal(command, *rest.get(command, [str(tmp_path)]))
    assert words in shown and words not in printed
    assert printed and "\x1b[?25h" in shown  # the cursor is there again
    if command == "report":
        assert f"{tmp_path}" in printed and "━" in shown


def test_verify_names_each_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path, seed=0), make_run(tmp_path, seed=1)
    steps: list[tuple[str, int]] = []
    monkeypatch.setattr(
        progress.Work, "step", lambda work, text, total: steps.append((text, total))
    )
    assert typed("verify", tmp_path).exit_code == 0
    words = "comparing checksums: deepnorm-d6-s{}-0.001"
    assert steps == [(words.format(0), 2), (words.format(1), 2)]


def test_quiet_shows_nothing_on_a_terminal(tmp_path: Path) -> None:
    make_run(tmp_path / "study")
    for words in (("report", str(tmp_path), "--quiet"), (*TRAIN, str(tmp_path), "--quiet")):
        printed, shown = run_on_terminal(*words)
        assert printed and shown == ""


def test_a_pipe_gets_lines_alone(capfd: pytest.CaptureFixture[str]) -> None:
    with show_work("working") as work:
        work.step("part 1", 2)
        work.note("a line")
        time.sleep(progress.DELAY_SECONDS + 0.2)
    assert capfd.readouterr() == ("", "a line\n")


def test_a_short_command_shows_nothing_and_notes_stay_letters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        with show_work("short"):
            pass
        monkeypatch.setattr(progress, "DELAY_SECONDS", 0.0)
        with show_work("long\x1b[2J") as work:
            work.step("part\x1b[2J", 3)
            time.sleep(0.5)
            work.note("note\x1b[2J [red]")
        terminal.flush()
        written = b""
        while select.select([ours], [], [], 0.2)[0]:  # a terminal hands over parts
            written += os.read(ours, 1 << 16)
        text = written.decode()
    os.close(ours)
    assert "short" not in text and "part\\u001b[2J" in text
    assert "note\\u001b[2J [red]" in re.sub(r"\x1b\[[0-9;]*m", "", text) and "\x1b[2J" not in text
