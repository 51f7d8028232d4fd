"""deepstack train CONFIG [key=value …]"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from deepstack.cli.options import (
    AllowEnvChange,
    Out,
    Overrides,
    Plugins,
    Quiet,
    load_plugins,
    located,
)


def register(app: typer.Typer) -> None:
    app.command("train")(train)


def train(
    config: Annotated[Path, typer.Argument(help="A YAML file, or a run's config.yaml.")],
    overrides: Overrides = [],
    out: Out = Path("results"),
    study: Annotated[str | None, typer.Option(help="Folder of this run under --out.")] = None,
    plugin: Plugins = [],
    quiet: Quiet = False,
    allow_env_change: AllowEnvChange = False,
    fail_on_divergence: Annotated[
        bool, typer.Option("--fail-on-divergence", help="Exit 4 when the run diverges.")
    ] = False,
) -> None:
    """Train what a config describes; print the run's folder.

    A run that is done is not trained again; an interrupted one goes on where it stopped.
    """
    from deepstack.config import load_config, study_name

    settings = load_config(config, overrides)
    load_plugins(plugin)
    from deepstack.cli.display import observe
    from deepstack.cli.signals import stop_on_signal
    from deepstack.training import train as train_run

    with (
        located(config, overrides),
        observe(quiet) as observer,
        stop_on_signal() as stop,
    ):
        run = train_run(
            settings,
            study=study or study_name(settings, config),
            out=out,
            observer=observer,
            stop=stop,
            allow_env_change=allow_env_change,
            command=shlex.join(["deepstack", *sys.argv[1:]]),
        )
    typer.echo(run.path)
    if fail_on_divergence and run.state == "diverged":
        raise typer.Exit(4)
