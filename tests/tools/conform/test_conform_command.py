"""`deepstack conform` and the two examples of docs/conform.md."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import pages
from helpers.command_line import refusal, succeed, typed
from helpers.pages import without_numbers

from deepstack.base.errors import DifferenceError
from deepstack.schemes import SCHEMES
from deepstack.tools.conform.template import template_of


def shown(title: str) -> str:
    """The content of a file that docs/conform.md shows."""
    return pages.shown("conform.md", title)


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
    scheme = "--scheme", "deepnorm"
    speed = refusal(2, "conform", block, *scheme, "--checks", "speed")
    assert "allowed: forward, gradients" in speed
    assert "did you mean 'deepnorm'" in refusal(2, "conform", block, "--scheme", "depnorm")


def test_the_template_is_a_python_file() -> None:
    done = typed("conform", "--scheme", "peri_ln", "--template")
    names: dict[str, Any] = {}
    exec(done.stdout, names)
    assert names["PARAMETERS"]["attention_norm_2"] == "{l}.attention_norm_2"
    assert names["PARAMETERS"]["entry_norm"] == "entry_norm"


def test_a_scheme_a_file_and_settings_are_asked_for(block: Path) -> None:
    message = refusal(2, "conform", block)
    assert f"type deepstack conform {block} --scheme deepnorm" in message.replace("\n", " ")
    assert "--scheme is missing" in refusal(2, "conform", block, "seed")
    message = refusal(2, "conform", block, "seed", "--scheme", "deepnorm")
    assert "found 'seed'; allowed key=value" in message and "model.norm.kind=rms" in message
    assert "FILE is missing" in refusal(2, "conform", "--scheme", "deepnorm")
    assert "FILE is missing" in refusal(2, "conform", "model.bias=false", "--scheme", "deepnorm")


ENDS = {
    "sys.exit(0)": "import sys; sys.exit(0)",
    "sys.exit('done')": "import sys; sys.exit('done')",
    "sys.exit(None)": "quit()",
    "os._exit(0)": "import os; os._exit(0)",
    "os.abort()": "import os; os.abort()",
    "os.kill(": "import os; os.kill(os.getpid(), 9)",
    "signal.raise_signal(15)": "import signal; signal.raise_signal(15)",
}


@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize("where", ["file", "build", "forward"])
def test_a_file_that_ends_python_is_refused_with_the_place(
    how: str, where: str, tmp_path: Path
) -> None:
    end = ENDS[how]
    lines = {
        "file": [end],
        "build": ["def build(*sizes):", f"    {end}"],
        "forward": [
            "import torch", "class M(torch.nn.Module):", "    def __init__(self):",
            "        super().__init__()", "        self.q = torch.nn.Linear(24, 24)",
            "    def forward(self, x):", f"        {end}", "def build(*sizes):", "    return M()",
        ],
    }[where]  # fmt: skip
    file = tmp_path / "mine.py"
    file.write_text("\n".join([*lines, "PARAMETERS = {'q': 'q'}"]))
    message = refusal(2, "conform", file, "--scheme", "rezero", "--checks", "forward")
    line = next(number for number, text in enumerate(lines, 1) if end in text)
    assert f"mine.py:{line}: {how}" in message and "ends Python" in message


def test_modes_that_a_file_sets_are_restored(block: Path, tmp_path: Path) -> None:
    modes = """
import os, sys, torch
torch.set_default_dtype(torch.float16)
torch.set_default_device("meta")
torch.use_deterministic_algorithms(True)
torch.set_grad_enabled(False)
torch.set_num_threads(3)
torch.set_float32_matmul_precision("medium")
os.chdir("/")
sys.path.insert(0, "/nowhere")
"""
    block.write_text(modes + block.read_text().replace("(2 * 2 * N)", "(2 * N)"))
    before = modes_now()
    found = json.loads(
        succeed("conform", block, "--scheme", "deepnorm", "--checks", "gradients", "--json")
    )
    assert found["agrees"] and modes_now() == before


def modes_now() -> list[Any]:
    return [
        torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(), torch.get_num_threads(),
        torch.get_float32_matmul_precision(), os.getcwd(), list(sys.path),
    ]  # fmt: skip


@pytest.mark.slow
def test_mhc_is_written_from_the_page_and_the_template(tmp_path: Path) -> None:
    path = tmp_path / "my_mhc.py"
    path.write_text(shown("my_mhc.py"), encoding="utf-8")
    found = json.loads(succeed("conform", path, "--scheme", "mhc", "--json"))
    assert found["agrees"] and found["notes"] == []
    assert {row["check"] for row in found["rows"]} >= {"forward", "gradients", "start"}


def test_the_template_states_formulas_order_starts_and_epsilons() -> None:
    text = typed("conform", "--scheme", "mhc", "--template").stdout
    for words in (
        "H <- A_r H + B G(LN(h))", "mean(z^2) + 1e-6", "in the order [a | b | R]",
        "by its sums over i, then by its\nsums over j", "0 on the diagonal and -8 elsewhere",
        "iterations=20", "streams=4", "epsilon 1e-05 inside the root", "phi relu: max(z, 0)",
        "# 3, starts at 0.01", "# 4 x 24 x 24, starts at 0", "# 24 x 24, random", "xavier_normal",
    ):  # fmt: skip
        assert words in text, words
    decoder = ("model.family=decoder", "model.positions=rotary", "model.n_kv_heads=2")
    text = typed("conform", *decoder, "--scheme", "deepnorm", "--template").stdout
    assert "A position reads itself and those before it." in text
    assert "(2i, 2i + 1) or (i, i + d_head/2)" in " ".join(text.split())
    assert '"k": "{l}.k",  # 8 x 24, random' in text
    assert "random times a gain, 0.5 in layer 1 of 2" in text


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_template_is_a_python_file_with_the_schemes_equation(scheme: str) -> None:
    text = template_of(scheme, {})
    compile(text, scheme, "exec")
    assert SCHEMES[scheme].equation.split("\n")[0] in text


def test_a_build_with_other_arguments_is_told_the_line_to_type(block: Path) -> None:
    block.write_text(
        block.read_text().replace("n_heads, d_ff):\n    return", "n_heads):\n    return")
    )
    error = refusal(2, "conform", block, "--scheme", "deepnorm")
    assert "build cannot be called with four numbers (too many positional arguments)" in error
    assert "type:\n    def build(depth, d_model, n_heads, d_ff):" in error
