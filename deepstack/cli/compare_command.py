"""The command `deepstack compare DIR…`."""

from __future__ import annotations

from deepstack.cli.options import Against, Best, Folders, Json, Last, Markdown, Sort, Where, note


def compare_command(
    directories: Folders = ["results"],
    against: Against = None,
    best: Best = [],
    where: Where = [],
    sort: Sort = None,
    last: Last = None,
    markdown: Markdown = False,
    json: Json = False,
) -> None:
    """Compare settings and depths: outcome, validation loss, ‖ΔF‖ and time, mean over seeds.

    val_low to val_high is the 95 % interval of the mean over n seeds. diff_low to diff_high is the
    95 % interval of the difference over pairs of runs (Student's t).
    """
    from deepstack.cli.tables import emit
    from deepstack.reports import compare as compared

    table = compared(directories, against, best, say=note, where=where, sort=sort, last=last)
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.itertuples(index=False)]
    interval = ["difference", "diff_low", "diff_high", "pairs", "n", "val_low", "val_high"]
    chosen = [name for name in table.columns if "." in name]  # by --best
    first = ["setting", "depth", "val_loss", *interval, *chosen, "val_sd", "se", "outcome"]
    emit(rows, json, markdown=markdown, first=first)
