"""Plugins whose values read later positions are refused in a decoder."""

from pathlib import Path
from textwrap import dedent, indent

import pytest
from helpers import QUICK
from helpers.command_line import TINY, succeed
from helpers.plugin_texts import FIRST, RESIDUAL, said


def accepted(file: Path, text: str, *words: object) -> None:
    """Train with a plugin, which must not be refused."""
    file.write_text(text)
    succeed("train", QUICK, *TINY, *words, "--plugin", file, "-q", "--out", file.parent / "r")


@pytest.mark.parametrize(
    "value",
    [
        "x + G(norm(x + x.roll(-1, 1)))",  # a norm takes away what all features share
        "x + G(norm(x - x.mean(1, keepdim=True)))",
        "x + G(norm(x)) + norm(x).mean(1, keepdim=True)",
        "x + G(norm(x)) + torch.cat([x[:, 2:3], torch.zeros_like(x[:, 1:])], 1)",
        "x + G(norm(x)) + torch.nn.functional.pad(x[:, 2:3], (0, 0, 1, x.shape[1] - 2))",
    ],
)
def test_a_decoder_refuses_what_a_norm_hides(value: str, tmp_path: Path) -> None:
    text = FIRST + indent(RESIDUAL + f"return {value}", "    ")
    found = said(tmp_path / "own.py", text, "model.scheme=own", "model.family=decoder")
    assert "own.py:7: a position of the decoder reads later ones" in found


def test_a_decoder_refuses_a_scheme_that_reads_later_positions(tmp_path: Path) -> None:
    leaky = FIRST + indent(RESIDUAL + "return norm(x + G(x) + x.roll(-1, 1))", "    ")
    found = said(tmp_path / "own.py", leaky, "model.scheme=own", "model.family=decoder")
    assert "own.py:7: a position of the decoder reads later ones" in found
    text = leaky.replace('"own"', '"two"').replace("Own", "Two")
    accepted(tmp_path / "encoder.py", text, "model.scheme=two")
    text = leaky.replace('"own"', '"three"').replace("Own", "Three")
    text = text.replace("x.roll(-1, 1)", "torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]")
    accepted(tmp_path / "earlier.py", text, "model.scheme=three", "model.family=decoder")


def test_a_norm_over_tokens_says_so(tmp_path: Path) -> None:
    text = dedent('''
        from deepstack.schemes import StackNorm

        class Own(StackNorm, name="own_norm", static=True):
            """N(z) = z - mean over tokens."""
            def forward(self, z):
                y = z - z.mean(-1, keepdim=True)
                return self.scaled(y - y.mean(1, keepdim=True))
    ''')
    found = said(tmp_path / "own.py", text, "model.norm.kind=own_norm")
    assert "own.py:6: a token's output depends on other tokens; add by_token = False" in found
    text = text.replace("    def f", "    by_token = False\n    def f").replace("own_norm", "other")
    accepted(tmp_path / "other.py", text, "model.norm.kind=other")
