"""The command `deepstack compare DIR…`."""

from __future__ import annotations

from typing import Annotated

import typer

from deepstack.cli.completion import complete_key
from deepstack.cli.options import Json


def compare_command(
    directories: Annotated[
        list[str], typer.Argument(metavar="DIR", help="Results folders, studies or runs.")
    ] = ["results"],
    against: Annotated[
        str | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="A baseline, or a scheme's name: print val_loss minus that of the baseline's run "
            "with the same other settings, seed by seed.",
        ),
    ] = None,
    best: Annotated[
        list[str],
        typer.Option(
            metavar="KEY",
            autocompletion=complete_key,
            help="For each setting and depth, use only the best value of KEY, such as train.lr; "
            "repeatable.",
        ),
    ] = [],
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a Markdown table.")] = False,
    json: Json = False,
) -> None:
    """Compare settings and depths: outcome, validation loss, ‖ΔF‖ and time, mean over seeds.

    val_low to val_high is the 95 % interval of the mean over n seeds. diff_low to diff_high is the
    95 % interval of the difference over pairs of runs (Student's t).
    """
    from deepstack.cli.tables import emit
    from deepstack.reports import compare as compared

    table = compared(directories, against, best, say=lambda line: typer.echo(line, err=True))
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.itertuples(index=False)]
    interval = ["difference", "diff_low", "diff_high", "pairs", "n", "val_low", "val_high"]
    first = ["setting", "depth", "val_loss", *interval, *best, "val_sd", "se", "outcome"]
    emit(rows, json, markdown=markdown, first=first)
