"""The command `deepstack note RUN [TEXT]`."""

import typer

from deepstack.base.text import printable
from deepstack.cli.commands import command
from deepstack.cli.options import RunPath, option
from deepstack.records import change_labels, existing_run, read_labels


@command("Results", 'deepstack note results/quick/RUN "loss falls late" --tag good', place=4)
def note_command(
    run: RunPath,
    text: str | None = typer.Argument(
        None, metavar="TEXT", help="The note, in place of an old one; '' removes it."
    ),
    tag: list[str] = option("Add a tag, as in good; repeatable.", metavar="WORD", default=[]),
    untag: list[str] = option("Remove a tag; repeatable.", metavar="WORD", default=[]),
) -> None:
    """Label a run with a note and tags, which `ls` and `report` show; --where tag=WORD selects.

    Prints the labels of the run, which are not part of its verified files.
    """
    folder = existing_run(run)
    if tag or untag or text is not None:
        labels = change_labels(folder, tag, untag, text)
    else:
        labels = read_labels(folder)
    if labels.tags:
        typer.echo(f"tags: {', '.join(labels.tags)}")
    if labels.note:
        typer.echo(f"note: {printable(labels.note)}")
