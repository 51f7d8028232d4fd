"""Options that several commands share."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

from deepstack.cli.completion import complete_config, complete_setting
from deepstack.config.examples import example_or_file
from deepstack.errors import ConfigError, PluginError

Out = Annotated[Path, typer.Option("--out", help="Folder for all results.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only errors.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Plugins = Annotated[
    list[Path],
    typer.Option("--plugin", help="A Python file with your schemes, tasks, …; repeatable."),
]
ConfigFile = Annotated[
    Path,
    typer.Argument(
        metavar="CONFIG",
        help="A YAML file, a run's config.yaml, or an example: deepstack list configs.",
        callback=example_or_file,
        autocompletion=complete_config,
    ),
]
Overrides = Annotated[
    list[str],
    typer.Argument(
        metavar="KEY=VALUE",
        help="Settings to change, as in model.depth=48.",
        autocompletion=complete_setting,
    ),
]
AllowEnvChange = Annotated[
    bool,
    typer.Option(
        "--allow-env-change", help="Resume a run that started in a different environment."
    ),
]


def load_plugins(paths: list[Path]) -> None:
    """Load the files given with --plugin; import torch only if there are any.

    Their output goes to stderr, because stdout carries the command's result.
    """
    if paths:
        from deepstack import plugins

        with redirect_stdout(sys.stderr):
            plugins.load_plugins(paths)


def command_line() -> str:
    """Return the command that the user has typed, quoted for a shell."""
    return shlex.join(["deepstack", *sys.argv[1:]])


@contextmanager
def located(config: Path, overrides: Sequence[str]) -> Iterator[None]:
    """Add file and line to errors of packages that know only the key of a setting."""
    try:
        yield
    except PluginError:
        raise
    except ConfigError as error:
        if error.key is None:
            raise
        from deepstack.config import locate

        raise ConfigError(f"{locate(config, overrides, error.key)}: {error}") from None
