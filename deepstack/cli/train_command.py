"""The command `deepstack train CONFIG [key=value …]`."""

import gc
import sys
from pathlib import Path

import typer

from deepstack.base import torchrun
from deepstack.base.gc_control import gc_paused
from deepstack.cli import options as opt
from deepstack.cli.commands import command
from deepstack.cli.output import log, show_work
from deepstack.cli.signals import stop_on_signal
from deepstack.cli.study_kinds import naming_other_kinds
from deepstack.config import load_config, study_name
from deepstack.records import RunFolder


@command("Runs", "deepstack train quick model.scheme=post_ln", place=1)
def train_command(
    config: opt.ConfigFile,
    overrides: opt.Overrides = [],
    out: opt.Out = Path("results"),
    study: opt.StudyName = None,
    plugin: opt.Plugins = [],
    quiet: opt.Quiet = False,
    allow_env_change: opt.AllowEnvChange = False,
    extend: int | None = opt.option(
        "Train the finished run CONFIG N steps further, as a new run that names its "
        "parent; the run must have runtime.keep_optimizer=true.",
        metavar="N",
    ),
    fail_on_divergence: bool = opt.flag("Exit 4 when the run diverges.", "--fail-on-divergence"),
) -> None:
    """Train the run of a config; print the run's folder.

    A finished run is not trained again; an interrupted one continues at its last checkpoint.
    Several processes train one run under torchrun: torchrun --nproc-per-node=2 -m deepstack train.
    """
    is_rank0 = torchrun.is_rank0()
    if extend is not None and RunFolder(config).exists():
        config = RunFolder(config).config_path
    with naming_other_kinds(config):
        settings = load_config(config, overrides)
    if is_rank0 and not quiet:
        opt.note_empty(config)
    study = study_name(settings, config, study)
    opt.load_plugins(plugin)
    with gc_paused(), show_work("loading PyTorch", quiet or not is_rank0):
        from deepstack.cli.display import observe
        from deepstack.cli.finding import next_command, run_finding
        from deepstack.runs.spikes import spike_sentence
        from deepstack.training import parent_of
        from deepstack.training import train as train_run

        gc.freeze()  # imported modules stay: the collector can skip them

    with (
        opt.located(config, overrides),
        observe(quiet or not is_rank0) as observer,
        stop_on_signal() as stop,
    ):
        parent = None if extend is None else parent_of(config, extend, overrides)
        run = train_run(
            parent.config if parent else settings,
            study=study,
            out=out,
            observer=observer,
            stop=stop,
            allow_env_change=allow_env_change,
            command=opt.command_line(),
            parent=parent,
        )
    if not is_rank0:
        return
    typer.echo(run.path)
    sentences = list(filter(None, [run_finding(run), spike_sentence(run)]))
    if sentences and not quiet:
        log("\n".join([*sentences, f"next: {next_command(run, sys.argv[1:])}"]))
    if fail_on_divergence and run.state == "diverged":
        raise typer.Exit(4)
