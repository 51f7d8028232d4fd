"""The command `deepstack compare DIR…`."""

from __future__ import annotations

from deepstack.cli.options import Against, Best, Folders, Json, Markdown
from deepstack.cli.progress import show_work


def compare_command(
    directories: Folders = ["results"],
    against: Against = None,
    best: Best = [],
    markdown: Markdown = False,
    json: Json = False,
) -> None:
    """Compare settings and depths: outcome, validation loss, ‖ΔF‖ and time, mean over seeds.

    val_low to val_high is the 95 % interval of the mean over n seeds. diff_low to diff_high is the
    95 % interval of the difference over pairs of runs (Student's t).
    """
    from deepstack.cli.tables import emit
    from deepstack.reports import compare as compared

    with show_work("reading runs") as work:
        table = compared(directories, against, best, say=work.note)
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.itertuples(index=False)]
    interval = ["difference", "diff_low", "diff_high", "pairs", "n", "val_low", "val_high"]
    first = ["setting", "depth", "val_loss", *interval, *best, "val_sd", "se", "outcome"]
    emit(rows, json, markdown=markdown, first=first)
