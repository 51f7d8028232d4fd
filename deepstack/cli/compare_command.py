"""The command `deepstack compare DIR…`."""

from typing import Any

from deepstack.cli import options as opt
from deepstack.cli.commands import command
from deepstack.cli.output import emit, show_work, study_rows

RATES = "finished runs of two learning rates"
SIZES = "runs of two widths or depths with records of every layer"


@command("Results", "deepstack compare results/depth_sweep --against post_ln", place=2)
def compare_command(
    directories: opt.Folders = ["results"],
    against: opt.Against = None,
    best: opt.Best = [],
    where: opt.Where = [],
    sort: opt.Sort = None,
    last: opt.Last = None,
    transfer: bool = opt.flag(
        "Print the best learning rate at each depth, its exponent in N, and the loss "
        "that the smallest depth's rate costs, with 95 % intervals over three seeds or more.",
        "--transfer",
    ),
    coordinates: bool = opt.flag(
        "Print the exponents in width and in depth of the stream's size and of its change "
        "at the last record, by layer, with 95 % intervals and a verdict.",
        "--coordinates",
    ),
    markdown: opt.Markdown = False,
    json: opt.Json = False,
) -> None:
    """Compare settings and depths: outcome, validation loss, ‖ΔF‖ and time, mean over seeds.

    An outcome is learnt, at chance, worse or diverged; JSON has trained, stalled, above, diverged.

    val_low to val_high is the 95 % interval of the mean over n seeds. diff_low to diff_high is the
    95 % interval of the difference over pairs of runs (Student's t).
    """
    from deepstack.instruments.coordinates.table import coordinate_table
    from deepstack.instruments.transfer.table import transfer_table
    from deepstack.runs.comparison import compare as compared
    from deepstack.runs.outcomes import in_words

    if transfer or coordinates:
        make = transfer_table if transfer else lambda runs: (coordinate_table(runs), [])
        problem = f"no study has {RATES if transfer else SIZES}"
        rows = study_rows(directories, where, last, make, problem)
        first = [] if transfer else ["setting", "quantity", "layer", "verdict"]
        emit(rows, json, markdown=markdown, first=first)
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
