"""deepstack sweep [CONFIG] [key=a,b …]"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deepstack.cli.options import Json, Out, Plugins, Quiet, load_plugins, located
from deepstack.errors import ConfigError, Interrupted

if TYPE_CHECKING:
    from deepstack.sweeps import Cell, Launcher

BUILT_IN = "depth_sweep"


def register(app: typer.Typer) -> None:
    app.command("sweep")(sweep)


def sweep(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="CONFIG|KEY=A,B",
            help="A run's or a sweep's YAML (default: the built-in depth study), then settings; "
            "several values make a grid.",
        ),
    ] = [],
    depths: Annotated[str | None, typer.Option(help="model.depth: 6,48,200,1000.")] = None,
    schemes: Annotated[str | None, typer.Option(help="model.scheme: post_ln,deepnorm.")] = None,
    seeds: Annotated[str | None, typer.Option(help="seed: 0,1,2.")] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Runs at a time (default: by cores, memory, GPUs).")
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(help="For all runs together: 8GB, or a share of what is free (default: 0.9)."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan; run nothing.")
    ] = False,
    retry: Annotated[
        str | None,
        typer.Option(help="Run again what ended so: failed, out_of_memory or all; with commas."),
    ] = None,
    max_hours: Annotated[
        float | None,
        typer.Option(
            min=0, help="Then start nothing more, save what runs and exit 3; the command goes on."
        ),
    ] = None,
    run_timeout: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Wall-clock seconds for each start of a run; then it saves within 30 s or is "
            "killed, and has failed.",
        ),
    ] = None,
    ray: Annotated[
        bool,
        typer.Option(
            "--ray",
            help="On the Ray cluster of this host, of RAY_ADDRESS, or, --ray HOST:PORT, of that "
            "address.",
        ),
    ] = False,
    slurm: Annotated[
        bool, typer.Option("--slurm", help="Write a job array for Slurm; run nothing here.")
    ] = False,
    submit: Annotated[
        bool, typer.Option("--submit", help="The same, handed to sbatch; print the job's number.")
    ] = False,
    sbatch: Annotated[
        list[str], typer.Option(help="An option for sbatch: '--partition=x'; repeatable.")
    ] = [],
    out: Out = Path("results"),
    study: Annotated[str | None, typer.Option(help="Folder of the sweep under --out.")] = None,
    plugin: Plugins = [],
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Train a grid of runs, several at once; print a table of scheme by depth.

    What is done already is skipped, what was interrupted goes on, what failed is left alone.
    """
    from deepstack import config as conf
    from deepstack.config.examples import example

    if ray and (slurm or submit):
        raise ConfigError("found --ray and --slurm; allowed one of them")
    address, words = (ray_address(words) if ray else None), list(words)
    if address is not None:
        words.remove(address)
    named = bool(words) and "=" not in words[0]
    path = Path(words[0]) if named else example(BUILT_IN)
    settings = words[1:] if named else list(words)
    lists = {"model.depth": depths, "model.scheme": schemes, "seed": seeds}
    settings += [f"{key}={values}" for key, values in lists.items() if values is not None]
    described = conf.load_study(path, settings)
    name = conf.study_name(described.base, path) if study is None else conf.checked_study(study)
    load_plugins(plugin)

    from deepstack.cli.signals import stop_on_signal
    from deepstack.cli.sweep_display import watch
    from deepstack.cli.sweep_tables import emit_plan, plan_notes, plan_rows, result_rows
    from deepstack.cli.tables import emit
    from deepstack.sweeps import (
        RUN_AGAIN,
        Local,
        Pool,
        default_workers,
        is_wanted,
        memory_budget,
        plan,
        retry_states,
        room_here,
    )
    from deepstack.training import device_is_here

    again, budget = retry_states(retry), memory_budget(memory)
    with located(path, settings):
        cells = plan(described, study=name, out=out)
    count = workers or default_workers(cells)
    if dry_run:
        emit_plan(plan_rows(described, cells, count, again), json)
        here = [cell for cell in cells if device_is_here(cell.config.runtime)]
        for note in plan_notes(cells, again, room_here(here, count, budget=budget)):
            typer.echo(note, err=True)
        return
    todo = [cell for cell in cells if is_wanted(cell, again)]
    refuse_full_disk(cells, out)
    bring_reference(path, out / name)
    if slurm or submit:
        hand_to_slurm(todo, name, out, workers, max_hours, sbatch, submit)
        return
    launcher: Launcher
    if ray:
        from deepstack.sweeps.ray import OnRay

        launcher = OnRay(todo, name, out, workers, address)
        workers, count = None, launcher.workers
    else:
        launcher = Local(cells, name, out, count, budget=budget)
    if workers is not None and not quiet:
        warn_of_threads(cells, workers)
    seconds = None if max_hours is None else 3600 * max_hours
    with watch(quiet, cells, count) as show, stop_on_signal() as stop:
        pool = Pool(cells, launcher, again, stop, show, seconds, run_timeout)
        progress = pool.run()
    emit(result_rows(progress, nested=json), json)
    if not quiet and any(entry.state == "done" for entry in progress):
        folder = shlex.quote(str(out / name))
        typer.echo(
            f"as one page: deepstack report {folder}; compare and plot take it too", err=True
        )
    for entry in progress:
        if entry.message:
            typer.echo(f"{entry.cell.folder.path}: {entry.state}: {entry.message}", err=True)
    alone = [c for c in cells if c.state in RUN_AGAIN and not is_wanted(c, again)]
    if alone:
        typer.echo(
            f"left alone, having failed before: {len(alone)} (deepstack ls {out / name} says why); "
            f"to run them again: --retry {','.join(sorted({c.state for c in alone}))}",
            err=True,
        )
    if stop.signal is not None:
        raise Interrupted("interrupted, saved; the same command goes on", stop.signal)
    if pool.out_of_time:
        typer.echo("--max-hours are over; the same command goes on", err=True)
    if any(entry.state not in ("done", "diverged") for entry in progress):
        raise typer.Exit(3)


def ray_address(words: Sequence[str]) -> str | None:
    """The word that is the address of a cluster: neither a file nor a setting looks like one."""
    return next((word for word in words if re.fullmatch(r"(ray://)?[^=/\s]+:\d+|auto", word)), None)


def hand_to_slurm(
    todo: Sequence[Cell],
    study: str,
    out: Path,
    workers: int | None,
    hours: float | None,
    directives: Sequence[str],
    submitted: bool,
) -> None:
    """Write the job array; print its script, or the number of the job that it has become."""
    from deepstack.records.cells import counted
    from deepstack.sweeps.slurm import submit, write_array

    if not todo:
        typer.echo("nothing is left to run", err=True)
        return
    script = write_array(todo, study, out, workers=workers, hours=hours, directives=directives)
    if submitted:
        typer.echo(submit(script))
        return
    typer.echo(script)
    typer.echo(
        f"{counted('{} runs', len(todo))}; submit them with: sbatch {shlex.quote(str(script))}",
        err=True,
    )


def warn_of_threads(cells: Sequence[Cell], workers: int) -> None:
    """Say so when the runs together have more threads than there are cores."""
    from deepstack.sweeps import most_threads
    from deepstack.training import cores

    threads = most_threads(cells)
    if workers * threads > cores():
        fits = max(1, cores() // threads)
        typer.echo(
            f"{workers} workers with {threads} threads each, and {cores()} cores: they will wait "
            f"for each other; --workers {fits} fits, and so may runtime.threads=1",
            err=True,
        )


def bring_reference(path: Path, study: Path) -> None:
    """Copy `<file>.reference.csv` beside a study's file to where its charts look for it.

    They draw these published values over the study's own (see `deepstack.plots.draw`).
    """
    reference = path.with_suffix(".reference.csv")
    if reference.is_file():
        study.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(reference, study / "reference.csv")


def refuse_full_disk(cells: Sequence[Cell], out: Path) -> None:
    """Raise ResourceError when the sweep's weights and checkpoints cannot fit on the disk."""
    from deepstack import config as conf
    from deepstack.errors import ResourceError

    todo = [cell for cell in cells if cell.state not in ("done", "diverged")]
    sizes = [conf.disk_estimate(cell.config) for cell in todo]
    needed = sum(kept for kept, _ in sizes) + max((most for _, most in sizes), default=0)
    where = next(folder for folder in (out.absolute(), *out.absolute().parents) if folder.exists())
    if not where.is_dir():
        raise ResourceError(f"{where} is no folder; give another with --out")
    free = shutil.disk_usage(where).free
    if needed > free:
        raise ResourceError(
            f"{out}: the sweep needs about {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free; "
            "give another folder with --out"
        )
