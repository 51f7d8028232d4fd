"""Trains the runs of `deepstack sweep`, at once or in parts, and prints how they ended."""

from __future__ import annotations

import dataclasses
import shlex
import shutil
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from deepstack import config as conf
from deepstack import sweeps
from deepstack.base.errors import Interrupted, ResourceError
from deepstack.base.text import bytes_text, counted
from deepstack.cli import options as opt
from deepstack.cli.finding import sweep_finding
from deepstack.cli.output import emit, log
from deepstack.cli.signals import StopRequest, paused_by_ctrl_z, stop_on_signal
from deepstack.cli.sweep_output import emit_plan, plan_rows, result_rows, watch
from deepstack.records import ENDED, Run
from deepstack.records.files import LARGEST_TEXT, make_folder, read, replace
from deepstack.records.opened import followed
from deepstack.sweeps import Cell, CellProgress
from deepstack.training import device_is_here

if TYPE_CHECKING:
    from deepstack.cli.added_options import LauncherOption, SweepOrder

IN_USE = " is in use by "  # in the message on a run that another process has locked


@dataclass
class SweepTraining:
    """Trains grids of runs into one study, as the options of the sweep say.

    path, settings: the study's file, and the words after it, for messages.
    retried: states of runs that are run again.
    memory: of all runs together, as typed.
    launcher: the place for the runs, None for this machine.
    left: number of runs that other sweeps of the study still train.
    """

    order: SweepOrder
    path: Path
    settings: Sequence[str]
    retried: Collection[str]
    memory: str | None
    run_timeout: float | None
    launcher: LauncherOption | None
    began: float = field(default_factory=time.monotonic)
    signals: StopRequest = field(default_factory=StopRequest)
    out_of_time: bool = False
    left: int = 0

    @property
    def interruption(self) -> str:
        """The message after a signal."""
        return "interrupted, saved; repeat the command to continue"

    def into(self, name: str) -> SweepTraining:
        """Return the training of another study, which shares limits and signals."""
        order = dataclasses.replace(self.order, name=name)
        return dataclasses.replace(self, order=order)

    def train(self, study: conf.Study, *, part: bool = False) -> list[CellProgress]:
        """Train the runs of a study, and return how they ended; finished ones are skipped.

        part: whether others follow, so that a launcher is not asked when no run is left.

        With --dry-run prints the plan, and raises typer.Exit if a launcher takes the runs over.
        """
        order = self.order
        budget = sweeps.memory_budget(self.memory)
        with opt.located(self.path, self.settings):
            cells = sweeps.plan(study, study=order.name, out=order.out)
            if not self.launcher:  # another machine has other packages and runs
                sweeps.refuse_missing(cells, self.retried)
        if not order.quiet and (widths := fitted_widths(cells)):
            log(widths)
        workers = order.workers or sweeps.default_workers(cells)
        if order.dry_run:
            if not self.launcher and not order.quiet and (line := missing_device(cells)):
                log(line)
            emit_plan(plan_rows(study, cells, workers, self.retried), order.json)
            return []
        todo = [cell for cell in cells if sweeps.is_wanted(cell, self.retried)]
        make_study(cells, self.path, order.out / order.name)
        launcher: sweeps.Launcher | None
        if self.launcher and (todo or not part):
            if (launcher := self.launcher.launcher(order, todo)) is None:
                raise typer.Exit
        else:
            launcher = sweeps.Local(cells, order.name, order.out, workers, budget=budget)
            most = sweeps.default_workers(cells)
            if most < workers and not order.quiet:
                log(f"{workers} workers have more threads than the cores; use --workers {most}")
        return self.run_pool(cells, launcher, watch(order.quiet, cells), part=part)

    def run_pool(
        self,
        cells: Sequence[Cell],
        launcher: sweeps.Launcher,
        view: AbstractContextManager[Callable[[Sequence[CellProgress]], None]],
        *,
        part: bool,
    ) -> list[CellProgress]:
        """Run the unfinished cells within the limits of the sweep, and return how all ended.

        view: yields the function that shows the progress.
        """
        seconds = None
        if self.order.hours is not None:
            seconds = 3600 * self.order.hours - (time.monotonic() - self.began) * part
        with view as show, stop_on_signal(self.signals), paused_by_ctrl_z() as pause:
            limits = (seconds, self.run_timeout, pause, self.may_start)
            pool = sweeps.Pool(cells, launcher, self.retried, self.signals, show, *limits)
            progress = pool.run()
        self.out_of_time = pool.out_of_time
        self.left += of_other_sweeps(progress)
        return progress

    def may_start(self, progress: Sequence[CellProgress]) -> bool:
        """Return whether further runs may start, from how others have ended."""
        return True

    def finish(self, progress: Sequence[CellProgress]) -> None:
        """Print the results of all runs of the sweep; then as `end`."""
        order, cells = self.order, [entry.cell for entry in progress]
        emit(result_rows(progress, nested=order.json), order.json)
        study = shlex.quote(str(order.out / order.name))
        if not order.quiet and any(entry.state == "done" for entry in progress):
            for line in sweep_finding([Run(cell.folder.path) for cell in cells]):
                log(line)
            log(f"next: deepstack answer {study} (or report, compare, plot)")
        self.end(progress)

    def end(self, progress: Sequence[CellProgress]) -> None:
        """Print why some runs of the sweep have no results.

        Raises Interrupted after a signal, and typer.Exit(3) if a run is not done.
        """
        study = shlex.quote(str(self.order.out / self.order.name))
        for entry in progress:
            if entry.message:
                log(f"{entry.cell.folder.path}: {entry.state}: {entry.message}")
        skipped = [
            cell
            for cell in (entry.cell for entry in progress)
            if cell.state in sweeps.RUN_AGAIN and not sweeps.is_wanted(cell, self.retried)
        ]
        if self.left:
            log(
                f"{counted('{} runs', self.left)} of another sweep into {study} still to end; "
                "repeat the command when it has ended"
            )
        if skipped:
            log(
                f"skipped, because they failed before: {len(skipped)} "
                f"(reasons: deepstack ls {study}); "
                f"to run them again: --retry {','.join(sorted({c.state for c in skipped}))}"
            )
        if self.signals.signal is not None:
            raise Interrupted(self.interruption, self.signals.signal)
        if self.out_of_time:
            log("--max-hours are over; repeat the command to continue")
        if any(entry.state not in ("done", "diverged") for entry in progress):
            raise typer.Exit(3)


def missing_device(cells: Sequence[Cell]) -> str:
    """Return a line if this machine lacks the device of some runs, which it refuses to start."""
    runtimes = {cell.config.runtime for cell in cells}
    missing = {runtime.device for runtime in runtimes if not device_is_here(runtime)}
    names = ", ".join(sorted(missing))
    return f"runtime.device: {names} is not on this machine: no run starts here" if names else ""


def fitted_widths(cells: Sequence[Cell]) -> str:
    """Return a line with the widths to which model.parameters led, with their numbers; '' if none.

    The numbers count the matrices of the layers.
    """
    models = [
        one.config.model for one in cells if "model.parameters" in one.values | one.overridden
    ]
    counts = {(one.depth, one.d_model): conf.parameters_at(one, one.d_model) for one in models}
    texts = [f"N = {n}: d_model {d} ({count:,})" for (n, d), count in sorted(counts.items())]
    return f"widths by model.parameters: {', '.join(texts)}" if texts else ""


def of_other_sweeps(progress: Sequence[CellProgress]) -> int:
    """Return how many runs another sweep of this study still trains; read how its others ended."""
    theirs = [entry for entry in progress if IN_USE in entry.message]
    for entry in theirs:
        folder = entry.cell.folder
        entry.state = Run(folder.path).state if folder.exists() else "new"
        entry.message = ""
    return sum(entry.state not in ENDED for entry in theirs)


def make_study(cells: Sequence[Cell], path: Path, study: Path) -> None:
    """Make the folder of a study, with the `<file>.reference.csv` from beside the study's file.

    Charts draw these published values over the study's (see `deepstack.plots.reference`).
    Raises ResourceError if the folder cannot be made, or if weights and checkpoints do not fit.
    """
    todo = [cell for cell in cells if cell.state not in ("done", "diverged")]
    sizes = [conf.disk_estimate(cell.config) for cell in todo]
    needed = sum(final for final, _ in sizes) + max((peak for _, peak in sizes), default=0)
    try:
        existing = next(folder for folder in (study, *study.absolute().parents) if folder.exists())
        total, _, free = shutil.disk_usage(existing)
        if needed > free and total:  # /proc and its like have no size, and take no folder
            raise ResourceError(
                f"{study}: the sweep needs about {bytes_text(needed)} on the disk, "
                f"{bytes_text(free)} are free; give another folder with --out"
            )
        make_folder(followed(study))
    except OSError as error:
        raise ResourceError(
            f"{study}: no folder can be made ({error.strerror}); give another folder with --out"
        ) from error
    reference = path.with_suffix(".reference.csv")
    if reference.is_file():
        replace(followed(study) / "reference.csv", read(reference, LARGEST_TEXT) or b"")
