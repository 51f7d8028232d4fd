"""The tables of a report as LaTeX, for a paper."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from deepstack.base import HEAD, ResourceError, table, tex
from deepstack.runs import (
    INTERVAL_COLUMN,
    LOSS_COLUMN,
    NUMBER_COLUMNS,
    Folders,
    Where,
    best_keys,
    comparisons,
    find_studies,
    has_one_task,
    interval_cell,
    list_folders,
    nats_cell,
    paper_table,
)
from deepstack.tools.report.finding import best_of_depths
from deepstack.tools.report.page import file_of, write


def report_tables(
    directory: Folders,
    to: str | os.PathLike[str] | None = None,
    against: str | None = None,
    best: str | Sequence[str] = (),
    say: Callable[[str], None] = lambda _: None,
    *,
    where: Where = (),
    sort: str | None = None,
    last: int | None = None,
) -> Path:
    """Write the tables of `report` as LaTeX: report.tex in the folder, or `to`; return the file.

    Each study has two tables: settings and depths compared, and the best setting of each depth with
    its margin.  `say` gets a sentence for each run that cannot be read.  Errors: as in `report`.
    """
    folders = list_folders(directory)
    path = file_of(folders, to, "report.tex")
    all_studies, skipped = find_studies(folders, where=where, sort=sort, last=last)
    studies = {study: runs for study, runs in all_studies.items() if runs}
    if not studies:
        raise ResourceError("\n".join(skipped))
    keys = best_keys(studies, best)
    parts = [HEAD]
    for study, rows in comparisons(studies, against, keys).items():
        runs, chosen = studies[study], list(map(str, keys[study]))
        several_tasks = [] if has_one_task(runs) else [""]
        parts += [f"% {tex(study.name)}", tables_of(rows, against, chosen, several_tasks)]
        if depths := best_of_depths(runs, chosen):
            parts.append(table(list(map(margin_cells, depths)), MARGINS, right=("N", "seeds")))
    write(path, "\n".join(parts) + "\n")
    for line in skipped:
        say(line)
    return path


MARGINS = (
    "Setting with the least mean validation loss (nats) of each depth, and its margin to the "
    f"nearest of the others, each at its best learning rate: mean and {INTERVAL_COLUMN} "
    "(Student's t) of the differences seed by seed. The same losses choose and compare."
)


def tables_of(
    rows: Sequence[Mapping[str, Any]],
    against: str | None,
    best: Sequence[str],
    several_tasks: Sequence[str],
) -> str:
    """Return the rows of a comparison as LaTeX."""
    paper = paper_table(rows, against, best, several_tasks)
    return table(paper.rows, paper.caption, paper.bold, NUMBER_COLUMNS)


def margin_cells(row: Mapping[str, Any]) -> dict[str, str]:
    """Return a row of `best_of_depths` as texts."""
    return {
        "N": str(row["depth"]),
        "best": str(row["leader"]),
        LOSS_COLUMN: nats_cell(row["loss"]),
        "next": str(row["second"]),
        "margin": nats_cell(row["margin"], row["digits"]),
        INTERVAL_COLUMN: interval_cell(row["low"], row["high"], row["digits"]),
        "seeds": str(row["pairs"]),
        "verdict": str(row["verdict"]).partition(":")[0],
    }
