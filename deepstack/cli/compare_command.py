"""The command `deepstack compare DIR…`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from deepstack.cli.options import Against, Best, Folders, Json, Markdown, note


def compare_command(
    directories: Folders = ["results"],
    against: Against = None,
    best: Best = [],
    transfer: Annotated[
        bool,
        typer.Option(
            "--transfer",
            help="Print the best learning rate at each depth, its exponent in N, and the loss "
            "that the smallest depth's rate costs, with 95 % bootstrap intervals over seeds.",
        ),
    ] = False,
    markdown: Markdown = False,
    json: Json = False,
) -> None:
    """Compare settings and depths: outcome, validation loss, ‖ΔF‖ and time, mean over seeds.

    val_low to val_high is the 95 % interval of the mean over n seeds. diff_low to diff_high is the
    95 % interval of the difference over pairs of runs (Student's t).
    """
    from deepstack.cli.tables import emit
    from deepstack.reports import compare as compared

    if transfer:
        emit(transfer_rows(directories), json, markdown=markdown)
        return
    table = compared(directories, against, best, say=note)
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.itertuples(index=False)]
    interval = ["difference", "diff_low", "diff_high", "pairs", "n", "val_low", "val_high"]
    first = ["setting", "depth", "val_loss", *interval, *best, "val_sd", "se", "outcome"]
    emit(rows, json, markdown=markdown, first=first)


def transfer_rows(directories: list[str]) -> list[dict[str, Any]]:
    """Return the rows of --transfer of all studies that have several learning rates."""
    from deepstack.analysis.studies import find_studies
    from deepstack.analysis.transfer import transfer_table
    from deepstack.errors import NothingMatchedError

    studies, skipped = find_studies(directories)
    rows: list[dict[str, Any]] = []
    for study, runs in studies.items():
        try:
            table = transfer_table(runs)
        except NothingMatchedError as error:
            skipped.append(f"{study.name}: {error}")
            continue
        rows += [{"study": study.name} | row if len(studies) > 1 else row for row in table]
    for line in skipped:
        note(line)
    if not rows:
        raise NothingMatchedError("no study has finished runs of two learning rates")
    return rows
