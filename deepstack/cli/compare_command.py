"""The command `deepstack compare DIR…`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deepstack.cli.options import (
    Against,
    Best,
    Folders,
    Json,
    Last,
    Markdown,
    Sort,
    Where,
    flag,
    note,
)
from deepstack.cli.progress import show_work
from deepstack.cli.tables import emit
from deepstack.errors import NothingMatchedError
from deepstack.records import Run

RATES = "finished runs of two learning rates"
SIZES = "runs of two widths or depths with records of every layer"


def compare_command(
    directories: Folders = ["results"],
    against: Against = None,
    best: Best = [],
    where: Where = [],
    sort: Sort = None,
    last: Last = None,
    transfer: bool = flag(
        "Print the best learning rate at each depth, its exponent in N, and the loss "
        "that the smallest depth's rate costs, with 95 % bootstrap intervals over seeds.",
        "--transfer",
    ),
    coordinates: bool = flag(
        "Print the exponents in width and in depth of the stream's size and of its change "
        "at the last record, by layer, with 95 % intervals and a verdict.",
        "--coordinates",
    ),
    markdown: Markdown = False,
    json: Json = False,
) -> None:
    """Compare settings and depths: outcome, validation loss, ‖ΔF‖ and time, mean over seeds.

    An outcome is learnt, at chance, worse or diverged; JSON has trained, stalled, above, diverged.

    val_low to val_high is the 95 % interval of the mean over n seeds. diff_low to diff_high is the
    95 % interval of the difference over pairs of runs (Student's t).
    """
    from deepstack.analysis.coordinates import coordinate_table
    from deepstack.analysis.outcomes import in_words
    from deepstack.analysis.transfer import transfer_table
    from deepstack.reports import compare as compared

    if transfer:
        emit(study_rows(directories, where, last, transfer_table, RATES), json, markdown=markdown)
        return
    if coordinates:
        rows = study_rows(directories, where, last, coordinate_table, SIZES)
        emit(rows, json, markdown=markdown, first=["setting", "quantity", "layer", "verdict"])
        return
    selection: dict[str, Any] = {"where": where, "sort": sort, "last": last}
    with show_work("reading runs") as work:
        table = compared(directories, against, best, say=work.note, **selection)
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.itertuples(index=False)]
    for row in () if json else rows:
        row["outcome"] = in_words(str(row["outcome"]))
    interval = ["difference", "diff_low", "diff_high", "pairs", "n", "val_low", "val_high"]
    chosen = [name for name in table.columns if "." in name]  # by --best
    first = ["setting", "depth", "val_loss", *interval, *chosen, "val_sd", "se", "outcome"]
    emit(rows, json, markdown=markdown, first=first)


def study_rows(
    directories: list[str],
    where: list[str],
    last: int | None,
    make_table: Callable[[list[Run]], list[dict[str, Any]]],
    needs: str,
) -> list[dict[str, Any]]:
    """Return the rows of --transfer or --coordinates of all studies that have some."""
    from deepstack.analysis.studies import find_studies

    studies, skipped = find_studies(directories, where=where, last=last)
    rows: list[dict[str, Any]] = []
    for study, runs in studies.items():
        try:
            table = make_table(runs)
        except NothingMatchedError as error:
            skipped.append(f"{study.name}: {error}")
            continue
        rows += [{"study": study.name} | row if len(studies) > 1 else row for row in table]
    for line in skipped:
        note(line)
    if not rows:
        raise NothingMatchedError(f"no study has {needs}")
    return rows
