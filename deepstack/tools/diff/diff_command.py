"""The command `deepstack diff RUN RUN`."""

from pathlib import Path

import typer

from deepstack.cli import Json, Markdown, command, emit, log
from deepstack.records import Run, existing_run


@command("Tools", "deepstack diff results/quick/RUN1 results/quick/RUN2")
def diff_command(
    first: Path = typer.Argument(metavar="RUN", help="The folder of a run."),
    second: Path = typer.Argument(metavar="RUN", help="The folder of another run."),
    markdown: Markdown = False,
    json: Json = False,
) -> None:
    """Print how two runs differ: settings, environment, results, and the first other row of a log.

    Parts that are equal are named below the table. It exits 0.
    """
    from deepstack.tools.diff.diff import differences

    rows, equal = differences(*(Run(existing_run(path).path) for path in (first, second)))
    if rows or json:
        emit(rows, json, markdown=markdown)
    for line in equal:
        log(line)
