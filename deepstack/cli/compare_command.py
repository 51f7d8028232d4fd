"""The command `deepstack compare DIR…`."""

from __future__ import annotations

from deepstack.cli.options import Against, Best, Folders, Json, Markdown, note


def compare_command(
    directories: Folders = ["results"],
    against: Against = None,
    best: Best = [],
    markdown: Markdown = False,
    json: Json = False,
) -> None:
    """Compare settings and depths: outcome, validation loss, ‖ΔF‖ and time, mean over seeds.

    An outcome is learnt, at chance, worse or diverged; JSON has trained, stalled, above, diverged.

    val_low to val_high is the 95 % interval of the mean over n seeds. diff_low to diff_high is the
    95 % interval of the difference over pairs of runs (Student's t).
    """
    from deepstack.analysis.outcomes import OUTCOME_WORDS
    from deepstack.cli.tables import emit
    from deepstack.reports import compare as compared

    table = compared(directories, against, best, say=note)
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.itertuples(index=False)]
    for row in () if json else rows:
        for value, word in OUTCOME_WORDS.items():
            row["outcome"] = str(row["outcome"]).replace(value, word)
    interval = ["difference", "diff_low", "diff_high", "pairs", "n", "val_low", "val_high"]
    first = ["setting", "depth", "val_loss", *interval, *best, "val_sd", "se", "outcome"]
    emit(rows, json, markdown=markdown, first=first)
