"""The command `deepstack tag RUN WORD…`."""

import typer

from deepstack.base.errors import ConfigError
from deepstack.cli.commands import command
from deepstack.cli.options import RunPath, flag
from deepstack.records import change_tags, existing_run, read_labels


@command("Results", "deepstack tag results/quick/RUN good", place=4)
def tag_command(
    run: RunPath,
    words: list[str] = typer.Argument([], metavar="WORD", help="Tags, as in good."),
    remove: bool = flag("Remove these tags.", "--remove"),
) -> None:
    """Give a run tags, which `ls` and `report` show and --where tag=WORD selects.

    Prints the tags of the run. They are not part of its verified files.
    """
    folder = existing_run(run)
    if remove and not words:
        raise ConfigError("tag: found --remove without a word; allowed the tags to remove")
    labels = change_tags(folder, words, remove=remove) if words else read_labels(folder)
    for tag in labels.tags:
        typer.echo(tag)
