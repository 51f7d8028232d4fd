"""The application: its commands, and how an error reaches its user."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

from deepstack.errors import DeepstackError

COMMANDS = ("train", "sweep", "plot", "ls", "check", "init", "list", "theory", "bench", "export")


class Group(TyperGroup):
    """Commands whose errors are a few lines on stderr and an exit code, never a traceback."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for name in COMMANDS if name in self.commands]

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except DeepstackError as error:
            if str(error):
                typer.echo(f"deepstack: {error}", err=True)
            raise typer.Exit(error.exit_code) from None
        except BrokenPipeError:
            # The reader of stdout has gone, as after `| head`; what was to be done is done.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None


app = typer.Typer(
    cls=Group,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Depth-scaling studies of Transformers: one YAML describes a stack, deepstack trains it "
    "and measures how far each step moves it.",
)

for _name in COMMANDS:
    import_module(f"deepstack.cli.{_name}_command").register(app)


@app.callback(invoke_without_command=True)
def version(
    ctx: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
) -> None:
    if version:
        from importlib.metadata import version as installed

        typer.echo(f"deepstack {installed('deepstack')}")
        raise typer.Exit()
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())
        raise typer.Exit()


def main() -> None:
    """Entry point of the `deepstack` command."""
    app()
