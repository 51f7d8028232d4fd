"""Judges runs as trained, stalled, above or diverged, and places them in maps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from deepstack.analysis.series import one_run_per_seed
from deepstack.analysis.settings import (
    DATA,
    DEPTH,
    SCHEME,
    TASK,
    determines,
    owners_to_label,
    scheme_label,
    setting_label,
    setting_value,
    varying_settings,
)
from deepstack.analysis.statistics import last_row
from deepstack.errors import NothingMatchedError
from deepstack.records import Run

OUTCOMES = ("trained", "stalled", "above", "diverged")
# Nats between a loss and the unigram's on the same positions that count as a difference.
CLEAR = 0.1


OPTION = "model.scheme_options."


def margin(run: Run) -> float | None:
    """Return L - L_0, the final validation loss minus the unigram's loss, in nats.

    None without an evaluation or anything to compare with.
    """
    loss, floor = loss_and_floor(run)
    return None if loss is None or floor is None else loss - floor


def loss_and_floor(run: Run) -> tuple[float | None, float | None]:
    """Return L and L_0, the final validation loss and the unigram's loss, in nats.

    L is taken where [MASK] is shown, L_0 is the unigram's loss on the same positions, of the same
    row of evals.csv.  A run that has no such column, or no [MASK], is compared with the entropies
    that it states.  A missing value is None.
    """
    if not len(run.evals):
        return None, None
    row = run.evals.iloc[[-1]]
    stated = run.columns.get("references", {})
    loss = last_row(row, ["loss_masked"])
    if loss is not None:
        floor = last_row(row, ["unigram_loss"]) or stated.get("unigram_entropy")
    else:
        loss = last_row(row, ["loss"])
        floor = stated.get("context_free_entropy") or stated.get("uniform_entropy")
    return loss, None if floor is None else float(floor)


def outcome(run: Run) -> str | None:
    """Return one of OUTCOMES for a finished run with a known floor, or None."""
    if run.state == "diverged":
        return "diverged"
    difference = margin(run) if run.state == "done" else None
    if difference is None:
        return None
    if difference < -CLEAR:
        return "trained"
    return "stalled" if difference <= CLEAR else "above"


class MapCell(NamedTuple):
    """Position of a run in a map: names of its panel and row, and the sort key of the panel."""

    panel: str
    row: str
    order: tuple[tuple[bool, float, str], ...]

    @property
    def name(self) -> str:
        """Row and panel in one label."""
        return ", ".join(part for part in (self.row, self.panel) if part)


@dataclass(frozen=True)
class Cell:
    """The seeds of one cell: their outcomes, and their distances from the unigram in nats.

    A seed that diverged has no distance: its last evaluation was before it did.
    """

    outcomes: tuple[str, ...]
    margins: tuple[float | None, ...]

    @property
    def counts(self) -> dict[str, int]:
        """How many seeds have each outcome, in the order of OUTCOMES; zeros left out."""
        counter = Counter(self.outcomes)
        return {name: counter[name] for name in OUTCOMES if counter[name]}

    @property
    def all_trained(self) -> bool:
        return set(self.outcomes) == {"trained"}


def cell_of(runs: Sequence[Run]) -> Cell:
    """Return the cell of runs that each have an outcome."""
    runs = one_run_per_seed(runs)
    return Cell(
        tuple(outcome(run) or "" for run in runs),
        tuple(margin(run) if run.state == "done" else None for run in runs),
    )


def runs_with_outcome(runs: Sequence[Run]) -> list[Run]:
    """Return the runs that have an outcome. Raises NothingMatchedError when there is none."""
    finished = [run for run in runs if outcome(run)]
    if not finished:
        raise NothingMatchedError(
            "no finished run has a validation loss that can be compared with a unigram's"
        )
    return finished


def map_cells(runs: Sequence[Run], but: Sequence[str] = ()) -> dict[str, MapCell]:
    """Return panel and row of each run, by the path of its folder.

    A row is a scheme with its options, if these vary.  Every other setting that varies makes
    panels, apart from depth, seed, the keys in `but` and settings that scheme, depth and these
    determine, such as a learning rate chosen for each scheme.  Task and data always make panels.
    """
    names = [key for key in varying_settings(runs) if key not in (SCHEME, *but)]
    options = [key for key in names if key.startswith(OPTION)]
    panels: list[str] = []
    for key in names:
        known = [DEPTH, SCHEME, *but, *options, *panels]
        if key not in options and (key in (TASK, DATA) or not determines(known, key, runs)):
            panels.append(key)
    owners = {key: owners_to_label(key, runs) for key in options}
    cells = {}
    for run in runs:
        labelled = [key for key in options if run.get(SCHEME) in owners[key]]
        cells[str(run.path)] = MapCell(
            ", ".join(setting_label(run, key) for key in panels),
            ", ".join([scheme_label(run), *(setting_label(run, key) for key in labelled)]),
            tuple(_order(setting_value(run, key)) for key in panels),
        )
    return cells


def _order(value: object) -> tuple[bool, float, str]:
    """Return a key that sorts numbers by size, in front of everything else."""
    if isinstance(value, int | float):
        return (False, float(value), "")
    return (True, 0.0, str(value))
