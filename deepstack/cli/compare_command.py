"""The command `deepstack compare DIR…`."""

from typing import Any

from deepstack.base.errors import ConfigError
from deepstack.cli import options as opt
from deepstack.cli.added_options import CompareTable, with_added
from deepstack.cli.commands import command
from deepstack.cli.output import emit, print_latex, refuse_two_forms, show_work


@command("Results", "deepstack compare results/depth_sweep --against post_ln", place=2)
@with_added(CompareTable, before="markdown")
def compare_command(
    directories: opt.Folders = ["results"],
    against: opt.Against = None,
    best: opt.Best = [],
    where: opt.Where = [],
    sort: opt.Sort = None,
    last: opt.Last = None,
    markdown: opt.Markdown = False,
    latex: opt.Latex = False,
    json: opt.Json = False,
    **added: Any,
) -> None:
    """Compare settings and depths: outcome, validation loss, ‖ΔF‖ and time, mean over seeds.

    An outcome is learnt, at chance, worse or diverged; JSON has trained, stalled, above, diverged.

    val_low to val_high is the 95 % interval of the mean over n seeds. diff_low to diff_high is the
    95 % interval of the difference over pairs of runs (Student's t).
    """
    from deepstack.runs.comparison import compare as compared
    from deepstack.runs.outcomes import outcome_words
    from deepstack.runs.paper_table import NUMBER_COLUMNS, paper_table

    for name, needed in CompareTable.idle(added).items():
        others = " or ".join(f"--{one}" for one in needed)
        raise ConfigError(f"--{name.replace('_', '-')}: found without {others}, which it needs")
    refuse_two_forms(json, markdown, latex)
    for one in CompareTable.chosen(added):
        unused = {"--against": against, "--best": best, "--sort": sort}
        for name in [name for name, value in unused.items() if value]:
            raise ConfigError(f"{name}: found with --{one.name}, whose table does not use it")
        rows = one.rows(directories, where, last)
        if rows or json:
            emit(rows, json, markdown=markdown, latex=latex, answer=one.answer)
        return
    selection: dict[str, Any] = {"where": where, "sort": sort, "last": last}
    with show_work("reading runs") as work:
        table = compared(directories, against, best, say=work.note, **selection)
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.itertuples(index=False)]
    chosen = [name for name in table.columns if "." in name]  # by --best
    if latex and not json:
        paper = paper_table(rows, against, chosen, table.attrs["several_tasks"])
        print_latex(paper.rows, paper.caption, paper.bold, NUMBER_COLUMNS)
        return
    for row in () if json else rows:
        row["outcome"] = outcome_words(str(row["outcome"]))
    interval = ["pairs", "n", "val_low", "val_high"]
    gap = ["difference", "diff_low", "diff_high"] if against else []
    edge = ["edge"] if chosen else []
    answer = ["depth", "val_loss", *gap, *chosen, *edge]
    first = [*interval, "val_sd", "se", "outcome"]
    emit(rows, json, markdown=markdown, answer=answer, first=first)
