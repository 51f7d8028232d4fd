"""The command `deepstack list KIND`: configs, settings, schemes, tasks, charts, …"""

import typer

from deepstack.base.errors import ConfigError
from deepstack.base.registry import unknown
from deepstack.cli.commands import command
from deepstack.cli.completion import starting
from deepstack.cli.listing import Rows, listings, short_table
from deepstack.cli.options import Json, Markdown, Plugins, load_plugins, option
from deepstack.cli.output import emit

PLURALS = {kind.removesuffix("s"): kind for kind in listings()} | {"analysis": "analyses"}
"""The kinds as one entry of them is called."""
DEPTH = 100  # of the coefficients in JSON and Markdown


@command("Runs", "deepstack list schemes", place=5)
def list_command(
    kind: str = typer.Argument(
        metavar="KIND",
        help="Kind of entries; a wrong one prints all kinds.",
        autocompletion=lambda incomplete: starting(listings(), incomplete),
    ),
    section: str | None = typer.Argument(
        None, metavar="SECTION", help="With settings: only those of a section, such as train."
    ),
    depth: int | None = option("Print the coefficients of schemes at this depth.", min=1),
    plugin: Plugins = [],
    json: Json = False,
    markdown: Markdown = False,
) -> None:
    """List configs, settings, schemes, tasks, diagnostics, charts, …

    Each setting has its allowed values: norms, activations, optimizers, …
    """
    kind = PLURALS.get(kind, kind)
    if kind not in listings():
        raise ConfigError(unknown("kind", kind, listings(), most=len(listings())))
    load_plugins(plugin)
    listing = listings()[kind]
    if plugin or json or markdown or depth or not listing.in_index:
        rows = listing.table(depth or DEPTH)
    else:
        rows = short_table(kind)
    if section is not None:
        rows = of_section(rows, kind, section)
    emit(rows if json else [listing.as_cells(row) for row in rows], json, markdown=markdown)


def of_section(rows: Rows, kind: str, section: str) -> Rows:
    """Return the settings of a section.  Raises ConfigError for another kind, or no section."""
    if kind != "settings":
        raise ConfigError(f"found {section!r} after {kind}; allowed: deepstack list {kind}")
    sections = dict.fromkeys(row["name"].rpartition(".")[0] for row in rows)
    inside = [row for row in rows if f"{row['name']}.".startswith(f"{section}.")]
    if not inside:
        raise ConfigError(unknown("section", section, filter(None, sections)))
    return inside
