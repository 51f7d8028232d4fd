"""Options that several commands share, spelled once."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

from deepstack.errors import ConfigError, PluginError

Out = Annotated[Path, typer.Option("--out", help="Folder of all results.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing but errors.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Plugins = Annotated[
    list[Path],
    typer.Option("--plugin", help="A Python file with schemes, tasks, … of your own; repeatable."),
]
Overrides = Annotated[
    list[str],
    typer.Argument(metavar="KEY=VALUE", help="Settings to change, as in model.depth=48."),
]
AllowEnvChange = Annotated[
    bool,
    typer.Option("--allow-env-change", help="Go on with a run that another environment began."),
]


def load_plugins(paths: list[Path]) -> None:
    """Load the files given with --plugin; torch is imported only when there are any.

    What they print goes to stderr: stdout is for the answer.
    """
    if paths:
        from deepstack import plugins

        with redirect_stdout(sys.stderr):
            plugins.load_plugins(paths)


@contextmanager
def located(config: Path, overrides: Sequence[str]) -> Iterator[None]:
    """Add file and line to the errors of rooms that know the key and not where it stands."""
    try:
        yield
    except PluginError:
        raise
    except ConfigError as error:
        if error.key is None:
            raise
        from deepstack.config import locate

        raise ConfigError(f"{locate(config, overrides, error.key)}: {error}") from None
