"""Adds `deepstack sweep --slurm`, `--submit`, `--runs-per-job` and `--sbatch`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import typer

from deepstack.base import ResourceError, counted
from deepstack.cli import LauncherOption, SweepOrder, log, option

if TYPE_CHECKING:
    from deepstack.sweeps import Cell

clusters = partial(option, panel="Clusters")


class SlurmOption(LauncherOption):
    """Runs as a job array of Slurm, which is handed over."""

    flag, place = "--slurm", 2

    slurm: bool = clusters(
        "Write a job array for Slurm; run nothing here.", "--slurm", default=False
    )
    submit: bool = clusters(
        "As --slurm, but submit it with sbatch; print the job's number.", "--submit", default=False
    )
    runs_per_job: int = clusters(
        "Short runs that a job of Slurm runs one after the other.", default=1, min=1, max=10_000
    )
    sbatch: list[str] = clusters("An option for sbatch: '--partition=x'; repeatable.", default=[])

    @property
    def is_chosen(self) -> bool:
        return self.slurm or self.submit

    def launcher(self, order: SweepOrder, cells: Sequence[Cell]) -> None:
        limits = {"workers": order.workers, "hours": order.hours, "directives": self.sbatch}
        limits["together"] = self.runs_per_job
        hand_to_slurm(cells, self.submit, study=order.name, out=order.out, **limits)


def hand_to_slurm(todo: Sequence[Cell], submitted: bool, **order: Any) -> None:
    """Write the job arrays; print their scripts, or submit them and print the jobs' numbers.

    Several arrays with a number of workers run one after the other, so that the number holds.
    """
    from deepstack.integrations.slurm.arrays import submit, write_arrays

    if not todo:
        log("no run is left to submit")
        return
    scripts = write_arrays(todo, **order)
    runs, several = counted("{} runs", len(todo)), len(scripts) > 1
    parts = f", in {len(scripts)} arrays because of MaxArraySize" if several else ""
    in_turn = bool(order["workers"]) and several
    if not submitted:
        for script in scripts:
            typer.echo(script)
        limit = f" (each runs {order['workers']} at a time)" if in_turn else ""
        commands = " && ".join(f"sbatch {shlex.quote(str(script))}" for script in scripts)
        log(f"{runs}{parts}; submit them with: {commands}{limit}")
        return
    job: str | None = None
    for number, script in enumerate(scripts):
        try:
            job = submit(script, after=job if in_turn else None)
        except ResourceError as error:
            if not number:
                raise
            left = ", ".join(shlex.quote(str(path)) for path in scripts[number:])
            raise ResourceError(f"{error}; still to submit: {left}") from error
        typer.echo(job)
