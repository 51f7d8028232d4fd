"""The command `deepstack train CONFIG [key=value …]`."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Annotated

import typer

from deepstack.cli import options as opt
from deepstack.gc_control import gc_paused


def train_command(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG", help="A YAML file, or a run's config.yaml.")
    ],
    overrides: opt.Overrides = [],
    out: opt.Out = Path("results"),
    study: opt.StudyName = None,
    plugin: opt.Plugins = [],
    quiet: opt.Quiet = False,
    allow_env_change: opt.AllowEnvChange = False,
    fail_on_divergence: Annotated[
        bool, typer.Option("--fail-on-divergence", help="Exit 4 when the run diverges.")
    ] = False,
) -> None:
    """Train the run of a config; print the run's folder.

    A finished run is not trained again; an interrupted one continues at its last checkpoint.
    Several processes train one run under torchrun: torchrun --nproc-per-node=2 -m deepstack train.
    """
    from deepstack.config import checked_study, load_config, study_name

    is_rank0 = os.environ.get("RANK", "0") == "0"
    settings = load_config(config, overrides)
    study = study_name(settings, config) if study is None else checked_study(study)
    opt.load_plugins(plugin)
    from deepstack.cli.display import observe
    from deepstack.cli.signals import stop_on_signal

    with gc_paused():
        from deepstack.training import train as train_run

        gc.freeze()  # imported modules stay: the collector can skip them

    with (
        opt.located(config, overrides),
        observe(quiet or not is_rank0) as observer,
        stop_on_signal() as stop,
    ):
        run = train_run(
            settings,
            study=study,
            out=out,
            observer=observer,
            stop=stop,
            allow_env_change=allow_env_change,
            command=opt.command_line(),
        )
    if not is_rank0:
        return
    typer.echo(run.path)
    if fail_on_divergence and run.state == "diverged":
        raise typer.Exit(4)
