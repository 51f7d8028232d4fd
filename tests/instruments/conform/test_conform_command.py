"""`deepstack conform` and the two examples of docs/conform.md."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from helpers import ROOT
from helpers.command_line import refusal, succeed, typed

from deepstack.base.errors import DifferenceError

PAGE = (ROOT / "docs" / "conform.md").read_text(encoding="utf-8")


def shown(name: str) -> str:
    """The content of a file that the page shows."""
    (text,) = re.findall(rf'```\w+ title="{re.escape(name)}"\n(.*?)```', PAGE, re.DOTALL)
    return str(text)


def without_numbers(text: str) -> str:
    """A text whose numbers, but for powers and names, may differ by version and machine."""
    return re.sub(r"(?<![\w^])\d[\d.]*(e[-+]?\d+)?", "#", text.replace("deepstack: ", "")).strip()


@pytest.fixture
def block(tmp_path: Path) -> Path:
    path = tmp_path / "my_block.py"
    path.write_text(shown("my_block.py"), encoding="utf-8")
    return path


def test_the_first_example_of_the_page_exits_6_with_the_text_shown(block: Path) -> None:
    message = refusal(6, "conform", block, "--scheme", "deepnorm")
    assert without_numbers(message) == without_numbers(shown("my_block.txt"))
    assert "alpha of N counted in sublayers (2N)" in message
    block.write_text(block.read_text().replace("(2 * 2 * N)", "(2 * N)"))
    few = "--checks", "forward,gradients"
    found = json.loads(succeed("conform", block, "--scheme", "deepnorm", *few, "--json"))
    assert found["agrees"] and found["difference"] is None and found["notes"] == []
    assert len(found["rows"]) == 3 * 18  # F, x_0 and 16 parameters at three depths


@pytest.mark.slow
def test_the_second_example_of_the_page_raises_the_text_shown() -> None:
    there: dict[str, Any] = {}
    exec(shown("test_my_residual.py"), there)
    with pytest.raises(DifferenceError) as error:
        there["test_my_residual"]()
    assert without_numbers(str(error.value)) == without_numbers(shown("test_my_residual.txt"))


@pytest.mark.slow
def test_settings_and_checks_come_from_the_command_line(block: Path) -> None:
    block.write_text(block.read_text().replace("(2 * 2 * N)", "(2 * N)"))
    only = "--checks", "forward"
    message = refusal(6, "conform", block, "model.norm.eps=1e-4", "--scheme", "deepnorm", *only)
    assert "epsilon is 1e-05\n" in message
    assert "allowed: forward, gradients" in refusal(2, "conform", block, "--checks", "speed")
    assert "did you mean 'deepnorm'" in refusal(2, "conform", block, "--scheme", "depnorm")
    assert "FILE is missing" in refusal(2, "conform", "--scheme", "deepnorm")


def test_the_template_is_a_python_file() -> None:
    done = typed("conform", "--scheme", "peri_ln", "--template")
    names: dict[str, Any] = {}
    exec(done.stdout, names)
    assert names["PARAMETERS"]["attention_norm_2"] == "{l}.attention_norm_2"
    assert names["PARAMETERS"]["entry_norm"] == "entry_norm"


def test_a_file_that_ends_python_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "my_block.py"
    path.write_text("import sys\n\nsys.exit(0)\n", encoding="utf-8")
    message = refusal(2, "conform", path, "--scheme", "deepnorm")
    assert "my_block.py: it ends Python, with 0; put what is to be run below" in message
