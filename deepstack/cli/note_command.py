"""The command `deepstack note RUN TEXT`."""

import typer

from deepstack.base.errors import ConfigError
from deepstack.base.text import printable
from deepstack.cli.commands import command
from deepstack.cli.options import RunPath, flag
from deepstack.records import change_note, existing_run, read_labels


@command("Results", 'deepstack note results/quick/RUN "loss falls late"', place=5)
def note_command(
    run: RunPath,
    text: str | None = typer.Argument(None, metavar="TEXT", help="The note (default: print it)."),
    remove: bool = flag("Remove the note.", "--remove"),
) -> None:
    """Write a note on a run, which `ls` and `report` show; a new note replaces the old one.

    Prints the note of the run. It is not part of its verified files.
    """
    folder = existing_run(run)
    if remove and text is not None:
        raise ConfigError("note: found --remove and a text; allowed one of them")
    change = remove or text is not None
    labels = change_note(folder, text or "") if change else read_labels(folder)
    if labels.note:
        typer.echo(printable(labels.note))
