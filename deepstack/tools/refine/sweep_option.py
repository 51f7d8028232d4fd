"""Adds `deepstack sweep --refine`."""

from __future__ import annotations

import shlex
from functools import partial
from typing import TYPE_CHECKING

from deepstack.base import counted
from deepstack.cli import (
    SweepOption,
    SweepOrder,
    Training,
    emit,
    emit_facts,
    log,
    option,
    whole_numbers,
)

if TYPE_CHECKING:
    from deepstack.config import Study
    from deepstack.records import Run
    from deepstack.sweeps import CellProgress

best = partial(option, panel="Best value of a setting")


class RefineOption(SweepOption):
    """A search for the best value of a setting, with a row for each cell of the others."""

    refine: str | None = best(
        "Find the best value of a setting, as in train.lr, for each cell of the others.",
        metavar="KEY",
    )
    tolerance: float = best("With --refine: the final ratio of neighbouring values.", default=1.26)
    max_runs: int | None = best("With --refine: the largest number of runs.", min=1)
    select_seeds: str | None = best(
        "With --refine: seeds that choose the value; --seeds are trained at it, in STUDY_reported."
    )

    def run(self, order: SweepOrder, training: Training) -> None:
        from deepstack.records import Run
        from deepstack.tools.refine.search import SEED, count_runs, find_optima

        key, study, seeds = str(self.refine), order.study, self.select_seeds
        chosen = None if seeds is None else whole_numbers("--select-seeds", seeds)
        if order.dry_run:
            usual = study.grid.get(SEED, [study.base.seed])
            fewest, most = count_runs(study, key, chosen or usual, self.max_runs)
            counts = {"least number of runs": fewest, "largest number of runs": most}
            emit_facts(counts, order.json)
            return
        places = (training, training.into(f"{order.name}_reported"))
        entries: tuple[list[CellProgress], ...] = ([], [])

        def train(batch: Study, reported: bool) -> list[Run]:
            progress = places[reported].train(batch, part=True)
            entries[reported].extend(progress)
            if not all(map(has_ended, progress)):
                places[reported].end(entries[reported])
            return [Run(entry.cell.folder.path) for entry in progress]

        optima = find_optima(
            study, key, train, tolerance=self.tolerance, max_runs=self.max_runs, select=chosen
        )
        rows = [
            one.setting
            | {key: one.value, "val_loss": one.loss}
            | ({} if one.reported is None else {"reported_loss": one.reported})
            | {"settled": one.settled, "tried": len(one.losses)}
            for one in optima
        ]
        emit(rows, order.json)
        if early := sum(not one.settled for one in optima):
            more = "give more --max-runs" if self.max_runs else f"start elsewhere: {key}=VALUE"
            cells, ratio = counted("{} settings", early), f"the ratio {self.tolerance:g}"
            log(f"the search of {cells} ended before neighbours at {ratio} were worse: {more}")
        if not order.quiet:
            folder = shlex.quote(str(order.out / order.name))
            log(f"next: deepstack compare {folder} --transfer")
        for place, progress in zip(places, entries, strict=True):
            place.end(progress)


def has_ended(entry: CellProgress) -> bool:
    """Return whether a run is done, or its folder says why it cannot be: it then has no loss."""
    from deepstack.records import ENDED, Run
    from deepstack.sweeps import RUN_AGAIN

    folder = entry.cell.folder
    return folder.exists() and Run(folder.path).state in (*ENDED, *RUN_AGAIN)
