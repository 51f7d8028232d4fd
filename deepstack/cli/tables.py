"""A table on a terminal, or the same rows as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import typer


def emit(rows: Sequence[Mapping[Any, Any]], as_json: bool, *, markdown: bool = False) -> None:
    """Print rows to stdout, as a table, as JSON or as Markdown."""
    names = list(dict.fromkeys(key for row in rows for key in row))
    if as_json:
        typer.echo(json.dumps([{k: plain(v) for k, v in row.items()} for row in rows], indent=2))
        return
    if markdown:
        cells_of = ([text(row.get(n)).replace("|", "\\|") for n in names] for row in rows)
        lines = [names, ["---"] * len(names), *cells_of]
        typer.echo("\n".join(f"| {' | '.join(cells)} |" for cells in lines))
        return
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in names:
        numbers = all(isinstance(row.get(name), (int, float, type(None))) for row in rows)
        # A name must never be cut: it is what the next command is given.
        table.add_column(name, justify="right" if numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*(text(row.get(name)) for name in names))
    console = Console(markup=False)  # E[x²] is no style
    if not console.is_terminal:  # a pipe has no width: never cut what another program reads
        console = Console(width=10_000, markup=False)
    # Written by typer, not by rich, which leaves with an error when the reader has gone.
    with console.capture() as captured:
        console.print(table)
    typer.echo(captured.get(), nl=False)


def text(value: Any) -> str:
    """A value as a cell: four significant digits, a dash for nothing."""
    value = plain(value)
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)


def plain(value: Any) -> Any:
    """A value as JSON has it: numpy scalars as numbers, NaN as None, infinities as words."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value
