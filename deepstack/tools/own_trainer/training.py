"""Runs the commands of a study, at once or in parts, and prints how they ended."""

from __future__ import annotations

import dataclasses
import shlex
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import typer

from deepstack import config as conf
from deepstack.base import ConfigError, counted, number_text
from deepstack.cli import (
    SweepTraining,
    command_line,
    counts,
    emit,
    last_evaluation,
    log,
    of_other_sweeps,
)
from deepstack.records import ENDED, Run, followed, make_folder, run_rows, trouble
from deepstack.runs import Result, Runs, live_logs, result_table
from deepstack.sweeps import CellProgress, Launcher, is_wanted, visible_gpus
from deepstack.tools.own_trainer.cells import (
    CommandCell,
    changed_scripts,
    plan_cells,
    plan_rows,
    read_again,
)
from deepstack.tools.own_trainer.command_file import CommandFile
from deepstack.tools.own_trainer.launcher import CommandLauncher
from deepstack.tools.own_trainer.no_value import MetricWatch
from deepstack.tools.own_trainer.spread import NoSpreadError, no_spread

ALL = "mean ± deviation"  # the column of losses where no name of the command is the depth


@dataclass
class CommandTraining(SweepTraining):
    """Runs the commands of a study, as the options of the sweep say.

    file: the study.
    metric_watch: whether a run of the study has a value of the metric.
    ended: how each run so far has ended, by the name of its folder.
    """

    file: CommandFile = field(kw_only=True)
    metric_watch: MetricWatch | None = None
    ended: dict[str, CellProgress] = field(default_factory=dict)

    def train(self, study: conf.Study, *, part: bool = False) -> list[CellProgress]:
        """Run the commands of a study and return how they ended; finished ones are skipped."""
        order = self.order
        place = followed(order.out / order.name)
        cells = plan_cells(self.file, study, order.out / order.name)
        refuse_missing(cells)
        live_logs(self.file.trackers)
        if order.dry_run:
            emit(plan_rows(cells), order.json)
            return []
        with trouble(place):
            make_folder(place)
        for cell in cells:
            if cell.folder.exists() and cell.state != "running":
                read_again(cell)
        cells = plan_cells(self.file, study, order.out / order.name)
        if not (order.quiet or self.ended):
            for name, number in changed_scripts(cells).items():
                runs = counted("{} runs", number)
                log(f"{runs} ended with another version of {name}; deepstack rm removes runs")
        todo = [cell for cell in cells if is_wanted(cell, self.retried)]
        launcher: Launcher | None
        if self.launcher and (todo or not part):
            if (launcher := self.launcher.launcher(order, todo)) is None:
                raise typer.Exit
        else:
            workers = order.workers or 1
            gpus = [one.name for one in visible_gpus()] if workers > 1 else []
            launcher = CommandLauncher(workers, command_line(), gpus)
        metric_watch = self.metric_watch = MetricWatch(self.file, place)
        progress = self.run_pool(cells, launcher, watch(order.quiet, cells), part=part)
        self.left += of_other_sweeps(progress)
        self.ended |= {entry.cell.folder.name: entry for entry in progress}
        if self.signals.signal is None and not self.out_of_time:
            left = sum(entry.state not in (*ENDED, "failed") for entry in progress)
            metric_watch.refuse(self.path, left)
        if part and (why := no_spread(readable(self.ended.values()))):
            raise NoSpreadError(f"undecided: {why} (exit code {NoSpreadError.exit_code})")
        return progress

    def may_start(self, progress: Sequence[CellProgress]) -> bool:
        return self.metric_watch is None or self.metric_watch.may_start(progress)

    @property
    def interruption(self) -> str:
        """The message after a signal: a command without `resume` begins again."""
        again = "interrupted; repeat the command to start again what has not ended"
        return super().interruption if self.file.resume else again

    def into(self, name: str) -> CommandTraining:
        order = dataclasses.replace(self.order, name=name)
        return dataclasses.replace(self, order=order, ended={})

    def finish(self, progress: Sequence[CellProgress]) -> None:
        """Print the results of all runs; then as `end`."""
        order = self.order
        runs = [Run(entry.cell.folder.path) for entry in progress if entry.cell.folder.exists()]
        emit(run_rows(runs) if order.json else results(runs), order.json)
        if why := no_spread(readable(progress)):
            log(why)
        if not order.quiet and any(entry.state == "done" for entry in progress):
            study = shlex.quote(str(order.out / order.name))
            log(f"next: deepstack answer {study} (or compare, report, plot, ls)")
        self.end(progress)


def readable(progress: Iterable[CellProgress]) -> list[Result]:
    """Return the results of the runs that have ended and can be read."""
    runs = [Run(entry.cell.folder.path) for entry in progress if entry.state in ENDED]
    return list(Runs(run for run in runs if run.damage() is None).results.values()) if runs else []


def results(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the results of runs as a table: settings by depths, or by learning rates."""
    readable = Runs(run for run in runs if run.damage() is None)
    rows = result_table(readable.results.values()) if readable else []
    return [{ALL if key == "N = 0" else key: value for key, value in row.items()} for row in rows]


def refuse_missing(cells: Sequence[CommandCell]) -> None:
    """Raise ConfigError if a program cannot be found."""
    for cell in cells:
        program = cell.arguments[0]
        path = cell.file.environment.get("PATH")
        if shutil.which(program, path=path) is None:
            raise ConfigError(
                f"command: found the program {program!r}, which is not here; allowed one on the "
                "PATH, or its file, as in python or ./train.sh"
            )


@contextmanager
def watch(quiet: bool, cells: Sequence[CommandCell]) -> Iterator[Any]:
    """Yield the display: a line per change of state, and the number by state at the end."""
    if quiet:
        yield lambda progress: None
        return
    seen = {cell.folder.name: cell.state for cell in cells}
    states: dict[str, str] = {}

    def show(progress: Sequence[CellProgress]) -> None:
        for entry in progress:
            folder = entry.cell.folder
            states[folder.name] = entry.state
            if entry.state not in ("waiting", seen.get(folder.name)):
                seen[folder.name] = entry.state
                loss = last_evaluation(folder).get("loss") if entry.state == "done" else None
                text = "" if loss is None else f"  validation loss {number_text(loss)}"
                text += f"  {entry.message}" if entry.message else ""
                log(f"{entry.state:<12} {folder.name}{text}")

    log(counted("{} runs", len(cells)))
    yield show
    if states:
        log(counts(states.values()))
