"""The command `deepstack list KIND`: configs, settings, schemes, tasks, charts, …"""

import typer

from deepstack.base.errors import ConfigError
from deepstack.base.registry import unknown
from deepstack.cli.commands import command
from deepstack.cli.completion import starting
from deepstack.cli.listing import listings
from deepstack.cli.options import Json, Markdown, Plugins, load_plugins, option
from deepstack.cli.output import emit

DEPTH = 100  # of the coefficients in JSON and Markdown


@command("Runs", "deepstack list schemes", place=5)
def list_command(
    kind: str = typer.Argument(
        metavar="KIND",
        help="Kind of entries; a wrong one prints all kinds.",
        autocompletion=lambda incomplete: starting(listings(), incomplete),
    ),
    depth: int | None = option("Print the coefficients of schemes at this depth.", min=1),
    plugin: Plugins = [],
    json: Json = False,
    markdown: Markdown = False,
) -> None:
    """List configs, settings, schemes, tasks, diagnostics, charts, …

    Each setting has its allowed values: norms, activations, optimizers, …
    """
    if kind not in listings():
        raise ConfigError(unknown("kind", kind, listings(), most=len(listings())))
    load_plugins(plugin)
    listing = listings()[kind]
    complete = bool(plugin or json or markdown or depth)
    rows = listing.table(complete=complete, depth=depth or DEPTH)
    emit(rows if json else [listing.as_cells(row) for row in rows], json, markdown=markdown)
