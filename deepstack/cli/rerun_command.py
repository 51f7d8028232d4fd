"""The command `deepstack rerun RUN [--check]`."""

from pathlib import Path

import typer

from deepstack.cli import options as opt
from deepstack.cli.commands import command
from deepstack.cli.signals import stop_on_signal
from deepstack.records import Run, existing_run


@command("Results", "deepstack rerun results/quick/RUN --check", place=5)
def rerun_command(
    run: opt.RunPath,
    check: bool = opt.flag(
        "Keep nothing; compare with the record; exit 6 on a difference.", "--check"
    ),
    out: opt.Out = Path("results"),
    plugin: opt.Plugins = [],
    quiet: opt.Quiet = False,
    allow_env_change: opt.AllowEnvChange = False,
) -> None:
    """Train a run again from its record, into <study>-rerun, and print the new folder.

    --check trains in a temporary folder and stops at the first row that differs from the record.
    A run that has not ended is compared up to its last step.
    """
    existing_run(run)
    opt.load_plugins(plugin)
    from deepstack.cli.display import observe
    from deepstack.training import train
    from deepstack.training.rerun import check as compare_with_record
    from deepstack.training.rerun import record_of

    with (
        opt.located(run / "config.yaml", []),
        observe(quiet) as observer,
        stop_on_signal() as stop,
    ):
        if check:
            verdict = compare_with_record(
                run, observer=observer, stop=stop, allow_env_change=allow_env_change
            )
        else:
            record = record_of(run)
            repeated = train(
                record.config,
                study=f"{Run(run).study}-rerun",
                out=out,
                observer=observer,
                stop=stop,
                allow_env_change=allow_env_change,
                command=opt.command_line(),
                parent=record,
            )
    typer.echo(verdict if check else repeated.path)
