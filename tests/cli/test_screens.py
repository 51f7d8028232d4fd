"""The screens of train and sweep: one loss with its reference, no silent wait, whole lines."""

import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from helpers import QUICK
from helpers.command_line import TINY, typed
from helpers.terminals import terminal
from rich.cells import cell_len

import deepstack
from deepstack.base.progress import LineView
from deepstack.base.text import fold_lines
from deepstack.cli.output import terminal_console
from deepstack.cli.views import run_view
from deepstack.config import load_config
from deepstack.runs.loss_text import loss_text
from deepstack.training import Observer, PlainLines

MODULE = sys.modules["deepstack.training.observer"]
UNIGRAM = {"unigram_entropy": 3.263, "context_free_entropy": 3.1}


@pytest.mark.parametrize(
    ("row", "stated", "text"),
    [
        (  # positions that show a token do not count
            {"loss": 2.826, "loss_masked": 3.067, "loss_masked_se": 0.059, "unigram_loss": 3.26},
            UNIGRAM,
            "3.067 ± 0.059 nats (unigram 3.26)",
        ),
        ({"loss": 3.0, "loss_masked": None}, UNIGRAM, "3 nats (unigram 3.1)"),
        ({"loss": 1.5}, {"uniform_entropy": 2.079}, "1.5 nats (chance 2.079)"),
        (
            {"loss": 1.5, "loss_masked": 1.5, "optimal_loss": 0.69},
            {"uniform_entropy": 2.079},
            "1.5 nats (chance 2.079, optimum 0.69)",
        ),
        ({"loss": 1.5}, {}, "1.5 nats"),
        ({"loss": float("nan")}, {"uniform_entropy": 2.079}, "nan nats (chance 2.079)"),
    ],
)
def test_a_loss_stands_beside_its_reference(
    row: dict[str, float | None], stated: dict[str, float], text: str
) -> None:
    assert loss_text(row, stated) == text


SWEEP = ["model.scheme=post_ln,deepnorm", "seed=0,1", "--workers", "2"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "ends"),
    [
        (["train"], r"step 200  validation loss \S+ ± \S+ nats \(unigram [\d.]+\)"),
        (["sweep", *SWEEP], r"mean gain in nats over the unigram, [\d.]+\)"),
    ],
    ids=["train", "sweep"],
)
def test_a_screen_of_80_columns(words: list[str], ends: str, tmp_path: Path) -> None:
    """The log has all losses and the kernels; the screen has one loss, and whole lines."""
    command, *more = words
    words = [
        command,
        QUICK,
        *TINY[1:],
        "model.depth=6",
        "runtime.replay=auto",
        "train.steps=200",
        *more,
        "--out",
        "out",
    ]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "80"}
    options: Any = {"cwd": tmp_path, "env": environment}
    with terminal() as (screen, read):
        program = [sys.executable, "-m", "deepstack", *words]
        with subprocess.Popen(program, stdout=screen, stderr=screen, **options) as process:
            text = ""
            while process.poll() is None:
                text += read()
        text += "".join(iter(read, ""))
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
    wide = [line for line in re.split(r"[\r\n]+", text) if cell_len(line) > 80]
    assert all(line.startswith("deepstack ") for line in wide)  # commands to copy stay whole
    assert re.search(ends, text) and "loss_masked" not in text and "replayed" not in text
    log = next(tmp_path.glob("out/*/*/log.txt")).read_text()
    assert "loss_masked" in log and "steps are replayed by" in log


@pytest.mark.usefixtures("warm_server")
def test_sweep_lines_have_the_validation_loss(tmp_path: Path) -> None:
    shown = typed("sweep", QUICK, *TINY, "seed=0", "--workers", "1", "--out", tmp_path)
    (line,) = (line for line in shown.stderr.splitlines() if line.startswith("done"))
    (path,) = tmp_path.glob("*/*/evals.csv")
    names, *_, last = (row.split(",") for row in path.read_text().splitlines())
    values = dict(zip(names, map(float, last), strict=True))
    assert f"validation loss {values['loss_masked']:.4g} ± " in line
    assert f"nats (unigram {values['unigram_loss']:.4g})" in line


def test_a_long_part_is_named_once_it_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    display = PlainLines(view=LineView(lines.append))
    monkeypatch.setattr(MODULE, "WAIT_SECONDS", 3600.0)
    display.working("a short part")
    display.evaluated(0, {"loss": 1.0})
    monkeypatch.setattr(MODULE, "WAIT_SECONDS", 0.01)
    display.working("the first step")
    for _ in range(500):
        if len(lines) > 1:
            break
        time.sleep(0.01)
    display.working("")
    assert lines == ["step 0  validation loss 1 nats", "the first step …"]
    assert not any(isinstance(one, threading.Timer) for one in threading.enumerate())


def test_a_bar_shows_what_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal() as (stderr, read):
        monkeypatch.setattr(sys, "stderr", stderr)
        view = run_view(terminal_console())
        with view.live:
            view.wait("the validation \x1b[2J…")
            view.live.refresh()
        stderr.flush()
        assert "the validation \\u001b[2J…" in "".join(iter(read, ""))


def test_a_training_names_its_parts(tmp_path: Path) -> None:
    parts: list[str] = []

    class Names(Observer):
        def working(self, part: str) -> None:
            parts.append(part)

    settings = load_config(QUICK, [*TINY, "train.steps=3"])
    deepstack.train(settings, out=tmp_path, observer=Names())
    named = list(dict.fromkeys(filter(None, parts)))
    assert named == [
        "building the model", "a snapshot of the layers", "the validation", "the training step",
        "saving a checkpoint",
    ][: len(named)]  # fmt: skip
    assert len(named) >= 4 and parts.count("the training step") == 1 and parts[-1] == ""


def test_a_long_line_ends_at_words_and_before_a_command() -> None:
    command = "deepstack plot results/a_study --where seed=0 --sort depth"
    text = f"short\n{'word ' * 30}to train it anew, first: {command}\n  short too"
    lines = fold_lines(text, 40).split("\n")
    assert lines[0] == "short" and lines[-1] == "  short too" and lines[-2] == command
    assert all(cell_len(line) <= 40 for line in lines[:-2])
    assert " ".join(lines[1:-1]) == text.split("\n")[1].replace("  ", " ")
    assert fold_lines(f"run: {command}", 200) == f"run: {command}"
