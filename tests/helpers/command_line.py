"""Runs deepstack's commands in this process."""

from typing import Any

import typer
from typer.testing import CliRunner

from deepstack.cli import app

TINY = [
    "model.depth=2", "model.d_model=8", "task.seq_len=8", "train.batch_size=2",
    "train.steps=2", "train.eval_batches=1", "log.probe_sequences=1",
]  # fmt: skip


PLUGIN = '''
from deepstack.schemes import Scheme

class Own(Scheme, name="own", label="Own", paper="none"):
    """x <- x + G(x)."""

    def residual(self, x, G, norm):
        return x + G(x)
'''


def typed(*words: object, program: typer.Typer = app, **options: Any) -> Any:
    return CliRunner().invoke(program, [str(word) for word in words], **options)


def succeed(*words: object, **options: Any) -> str:
    """Return the output of a command, which must not fail."""
    done = typed(*words, **options)
    assert done.exit_code == 0, done.stderr
    return str(done.stdout).strip()


def refusal(exit_code: int, *words: object, **options: Any) -> str:
    """Return the message of a command that must fail with this exit code."""
    done = typed(*words, **options)
    assert done.exit_code == exit_code, done.output
    return str(done.stderr)
