"""The command `deepstack sweep [CONFIG] [key=a,b …]`."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from deepstack import config as conf
from deepstack.base.errors import ConfigError, Interrupted, ResourceError
from deepstack.cli import options as opt
from deepstack.cli.added_options import LauncherOption, SweepOption, SweepOrder, with_added
from deepstack.cli.commands import command
from deepstack.cli.completion import complete_config_or_setting, complete_names
from deepstack.cli.output import emit, log
from deepstack.cli.signals import stop_on_signal
from deepstack.config.load import example, example_or_file
from deepstack.records import Run
from deepstack.records.files import LARGEST_TEXT, make_folder, read, replace
from deepstack.records.opened import followed

if TYPE_CHECKING:
    from deepstack.sweeps import Cell, Launcher

BUILT_IN = "depth_sweep"
grid, resources = (partial(opt.option, panel=heading) for heading in ("Grid", "Resources"))


@command("Runs", "deepstack sweep --depths 6,48 --seeds 0,1,2", place=2)
@with_added(SweepOption, before="out")
@with_added(LauncherOption, before="out")
def sweep_command(
    words: list[str] = typer.Argument(
        [],
        metavar="CONFIG|KEY=A,B",
        help="YAML file or example of a run or sweep (default: the built-in depth study), then "
        "settings; several values make a grid.",
        autocompletion=complete_config_or_setting,
    ),
    depths: str | None = grid("Values of model.depth, as in 6,48,200,1000."),
    schemes: str | None = grid(
        "Values of model.scheme, as in post_ln,deepnorm.",
        autocompletion=complete_names("schemes", ""),
    ),
    seeds: str | None = grid("Values of seed, as in 0,1,2."),
    widths: str | None = grid("Values of model.d_model, as in 32,64."),
    flops: str | None = grid("Values of train.flops instead of train.steps, as in 1e12,1e13."),
    workers: int | None = resources("Runs at a time (default: by cores, memory, GPUs).", min=1),
    memory: str | None = resources(
        "Memory for all runs together: 8GB, or a share of the free memory (default: 0.9)."
    ),
    dry_run: bool = opt.flag("Print the plan; run nothing.", "--dry-run"),
    retry: str | None = opt.option(
        "Run failed, out_of_memory or all of these again; several with commas."
    ),
    max_hours: float | None = resources(
        "Then start no further run, save running ones and exit 3; repeat to continue.", min=0
    ),
    run_timeout: float | None = resources(
        "Wall-clock seconds for each start of a run; then it saves within 30 s or is "
        "killed, and counts as failed.",
        min=0,
    ),
    out: opt.Out = Path("results"),
    study: opt.StudyName = None,
    plugin: opt.Plugins = [],
    quiet: opt.Quiet = False,
    json: opt.Json = False,
    **added: Any,
) -> None:
    """Train a grid of runs, several at once; print a table of scheme by depth.

    Finished runs are skipped, and failed ones without --retry. Interrupted runs continue.
    """
    launchers = LauncherOption.chosen(added)
    if len(launchers) > 1:
        flags = " and ".join(one.flag for one in launchers)
        raise ConfigError(f"found {flags}; allowed one of them")
    taken = [word for one in launchers for word in one.own_words(words)]
    settings = [word for word in words if word not in taken]
    if settings and "=" not in settings[0]:
        path = example_or_file(Path(settings.pop(0)))
    else:
        path = example(BUILT_IN)
    lists = {"model.depth": depths, "model.scheme": schemes, "seed": seeds}
    lists |= {"model.d_model": widths, "train.flops": flops}
    settings += [f"{key}={values}" for key, values in lists.items() if values is not None]
    described = conf.load_study(path, settings)
    name = conf.study_name(described.base, path, study)
    opt.load_plugins(plugin)
    order = SweepOrder(described, name, out, workers, max_hours, dry_run, quiet, json)
    for task in SweepOption.chosen(added):
        with opt.located(path, settings):
            task.run(order)
        return

    from deepstack import sweeps
    from deepstack.cli.finding import sweep_finding
    from deepstack.cli.sweep_output import emit_plan, plan_rows, result_rows, watch

    retried, budget = sweeps.retry_states(retry), sweeps.memory_budget(memory)
    with opt.located(path, settings):
        cells = sweeps.plan(described, study=name, out=out)
    count = workers or sweeps.default_workers(cells)
    if dry_run:
        emit_plan(plan_rows(described, cells, count, retried), json)
        return
    todo = [cell for cell in cells if sweeps.is_wanted(cell, retried)]
    make_study(cells, path, out / name)
    launcher: Launcher | None
    if launchers:
        if (launcher := launchers[0].launcher(order, todo)) is None:
            return
    else:
        launcher = sweeps.Local(cells, name, out, count, budget=budget)
        if (most := sweeps.default_workers(cells)) < count and not quiet:
            log(f"{count} workers have more threads than the cores; use --workers {most}")
    seconds = None if max_hours is None else 3600 * max_hours
    with watch(quiet, cells) as show, stop_on_signal() as stop:
        pool = sweeps.Pool(cells, launcher, retried, stop, show, seconds, run_timeout)
        progress = pool.run()
    emit(result_rows(progress, nested=json), json)
    if not quiet and any(entry.state == "done" for entry in progress):
        for line in sweep_finding([Run(entry.cell.folder.path) for entry in progress]):
            log(line)
        folder = shlex.quote(str(out / name))
        log(f"for one page: deepstack report {folder}; compare and plot also accept the folder")
    for entry in progress:
        if entry.message:
            log(f"{entry.cell.folder.path}: {entry.state}: {entry.message}")
    skipped = [c for c in cells if c.state in sweeps.RUN_AGAIN and not sweeps.is_wanted(c, retried)]
    if skipped:
        log(
            f"skipped, because they failed before: {len(skipped)} "
            f"(reasons: deepstack ls {shlex.quote(str(out / name))}); "
            f"to run them again: --retry {','.join(sorted({c.state for c in skipped}))}"
        )
    if stop.signal is not None:
        raise Interrupted("interrupted, saved; repeat the command to continue", stop.signal)
    if pool.out_of_time:
        log("--max-hours are over; repeat the command to continue")
    if any(entry.state not in ("done", "diverged") for entry in progress):
        raise typer.Exit(3)


def make_study(cells: Sequence[Cell], path: Path, study: Path) -> None:
    """Make the folder of a study, with the `<file>.reference.csv` from beside the study's file.

    Charts draw these published values over the study's (see `deepstack.plots.files`).
    Raises ResourceError if the folder cannot be made, or if weights and checkpoints do not fit.
    """
    todo = [cell for cell in cells if cell.state not in ("done", "diverged")]
    sizes = [conf.disk_estimate(cell.config) for cell in todo]
    needed = sum(final for final, _ in sizes) + max((peak for _, peak in sizes), default=0)
    try:
        existing = next(folder for folder in (study, *study.absolute().parents) if folder.exists())
        free = shutil.disk_usage(existing).free
        if needed > free:
            raise ResourceError(
                f"{study}: the sweep needs about {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are "
                "free; give another folder with --out"
            )
        make_folder(followed(study))
    except OSError as error:
        raise ResourceError(
            f"{study}: no folder can be made ({error.strerror}); give another one with --out"
        ) from error
    reference = path.with_suffix(".reference.csv")
    if reference.is_file():
        replace(followed(study) / "reference.csv", read(reference, LARGEST_TEXT) or b"")
