"""Each message on a mistake has place, value, allowed values and the text to type instead."""

import shlex
from pathlib import Path

import pytest
from helpers.command_line import typed
from helpers.extensions import needs, needs_command
from helpers.mistakes import FILES, MISTAKES, Mistake
from helpers.plot_runs import make_run

from deepstack.config import load_config

LONGEST = 480  # characters: about four lines of a wide terminal
PARTS = ("place", "found", "allowed", "instead")


def later(mistake: Mistake) -> list[pytest.MarkDecorator]:
    """Skip a mistake in an option that a missing addition gives to a command of the core."""
    wanted = {"--until": "answer", "wandbb": "wandb"}
    return [needs(name) for word, name in wanted.items() if word in mistake.line]


@pytest.fixture
def files(here: Path) -> Path:
    make_run(here / "results" / "study")
    for name, text in FILES.items():
        (here / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return here


@pytest.mark.parametrize(
    "mistake",
    [
        pytest.param(one, id=one.line, marks=needs_command(one.line.split()[:1]) + later(one))
        for one in MISTAKES
    ],
)
def test_a_message_has_the_parts_that_its_reader_needs(mistake: Mistake, files: Path) -> None:
    before = sorted(files.rglob("*"))
    done = typed(*shlex.split(mistake.line))
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    message = " ".join(" ".join(lines).split())
    assert done.exit_code == mistake.exit_code, message
    assert {part: text for part in PARTS if (text := getattr(mistake, part)) not in message} == {}
    assert "Traceback" not in message and done.stdout == ""
    said = [line for line in lines if not line.startswith(("Usage: ", "Try "))]
    assert len(said) == 1 and len(said[0]) <= LONGEST, said
    assert sorted(files.rglob("*")) == before


def test_most_messages_have_all_parts_and_none_lacks_two() -> None:
    lacking = {one.line: sum(not getattr(one, part) for part in PARTS) for one in MISTAKES}
    assert len(MISTAKES) >= 90 and max(lacking.values()) == 1
    assert sum(count == 0 for count in lacking.values()) >= 70


@pytest.mark.parametrize("words", ["model.depth = 3", "model.depth =3", "model.depth= 3"])
def test_spaces_around_the_equals_sign_are_accepted(words: str) -> None:
    assert load_config("quick", words.split()).model.depth == 3
    assert load_config("quick", [*words.split(), "seed=5"]).seed == 5


def test_words_to_type_in_place_of_an_override_are_accepted(files: Path) -> None:
    task = typed("check", "decoder_small", "task={name: markov, seq_len: 32}", "model.depth=2")
    assert task.exit_code == 0, task.stderr
    for typed_line in ("model.scheme=pre_ln 'model.scheme_options={}'",):
        done = typed("check", "own.yaml", "model.depth=2", *shlex.split(typed_line))
        assert done.exit_code == 0, done.stderr


def test_all_options_that_are_left_over_are_named_and_others_are_kept(files: Path) -> None:
    (files / "two.yaml").write_text(
        "task:\n  name: text\n  source: stdlib\n  mask_rate: 0.2\n  held_out: 0.2\n"
    )
    message = typed("check", "two.yaml", "task.name=markov", "task.seq_len=8").stderr
    assert "two.yaml:3:11: task.source, task.held_out: found 'stdlib'" in message
    assert "type 'task={name: markov, mask_rate: 0.2, seq_len: 8}'" in message


def test_an_option_of_the_command_line_is_not_called_left_over(files: Path) -> None:
    message = typed("check", "quick", "model.scheme=pre_ln", "model.scheme_options.power=1").stderr
    assert "model.scheme_options.power=1 on the command line" in message and "type" not in message
