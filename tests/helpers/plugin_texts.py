"""Texts of plugins, and what `deepstack train` says of them."""

from pathlib import Path

from helpers import QUICK
from helpers.command_line import TINY, typed

FIRST = '''
import torch
from deepstack.schemes import Scheme, parameter

class Own(Scheme, name="own", label="Own", paper="none"):
    """x <- LN(x + G(x))."""
'''
RESIDUAL = "def residual(self, x, G, norm):\n    "


def said(file: Path, text: str, *words: object) -> str:
    """Return the message of `deepstack train` on a plugin's file, a line or two."""
    file.write_text(text)
    words = (*TINY, *words, "--plugin", file, "-q", "--out", file.parent / "r")
    result = typed("train", QUICK, *words)
    assert result.exit_code in (1, 2) and isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.stderr and result.stderr.startswith("deepstack: ")
    assert len(result.stderr.splitlines()) == 1
    return str(result.stderr)
