"""Prints rows as a table, as JSON or as Markdown."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import typer

from deepstack.cli.streams import raw
from deepstack.records.cells import one_line, plain, text

# Above this number of rows, rich needs seconds for the layout.
LONG = 500
# Minimal width of a column of sentences, which is folded at words; it takes the remaining width.
SENTENCE = 30
# Characters between two columns, and at both edges together.
GAP, EDGES = 3, 2


def emit(
    rows: Sequence[Mapping[Any, Any]],
    as_json: bool,
    *,
    markdown: bool = False,
    first: Sequence[str] = (),
) -> None:
    """Print rows to stdout, as a table, as JSON or as Markdown.

    A terminal gets the columns that fit, `first` before the others; stderr names omitted columns.
    A cell shows the values of a list on separate lines.
    """
    names = list(dict.fromkeys(key for row in rows for key in row))
    if as_json:
        typer.echo(json.dumps([{k: plain(v) for k, v in row.items()} for row in rows], indent=2))
        return
    if markdown:
        cells_of = ([_cell(row.get(n)).replace("|", "\\|") for n in names] for row in rows)
        lines = [names, ["---"] * len(names), *cells_of]
        typer.echo("\n".join(f"| {' | '.join(cells)} |" for cells in lines))
        return
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    cells = {name: [_cell(row.get(name)) for row in rows] for name in names}
    least = {name: least_width(str(name), column) for name, column in cells.items()}
    console = Console(markup=False, emoji=False)  # E[x²] is not a style
    shown = names
    if console.is_terminal:
        shown = choose_columns(least, [*(n for n in first if n in least), *names], console.width)
    numbers = {
        name: all(isinstance(row.get(name), (int, float, type(None))) for row in rows)
        for name in shown
    }
    if len(rows) > LONG:
        for line in plain_lines({name: cells[name] for name in shown}, numbers):
            typer.echo(line)
    else:
        # A pipe has no width. A terminal wraps long names, so nothing is cut here.
        width = max(console.width, table_width(least[name] for name in shown))
        width = width if console.is_terminal else 10_000
        console = Console(width=width, markup=False, emoji=False)
        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        for name in shown:
            table.add_column(
                str(name),
                justify="right" if numbers[name] else "left",
                overflow="fold",
                no_wrap=not has_sentences(cells[name]),
                min_width=least[name],
            )
        for number in range(len(rows)):
            table.add_row(*(cells[name][number] for name in shown))
        # rich itself would fail if the reader has closed the pipe.
        with console.capture() as captured:
            console.print(table)
        raw(sys.stdout).write(captured.get())
        sys.stdout.flush()
    if left_out := [str(name) for name in names if name not in shown]:
        names_left_out = ", ".join(left_out)
        typer.echo(
            f"omitted on this narrow terminal: {names_left_out}; --json or a pipe has all", err=True
        )


def emit_facts(facts: Mapping[str, Any], as_json: bool) -> None:
    """Print named values to stdout: one row for each, or as JSON."""
    rows = [{"what": key, "value": text(value)} for key, value in facts.items()]
    emit([facts] if as_json else rows, as_json)


def _cell(value: Any) -> str:
    """Return a value as a cell; only the values of a list are on separate lines."""
    return "\n".join(one_line(text(one)) for one in (value if isinstance(value, list) else [value]))


def plain_lines(cells: Mapping[Any, Sequence[str]], numbers: Mapping[Any, bool]) -> Iterator[str]:
    """Yield the lines of a table without colours and folded cells."""
    from rich.cells import cell_len

    columns = []
    for name, column in cells.items():
        flat = [str(name), *(cell.replace("\n", "; ") for cell in column)]
        width = max(map(cell_len, flat))
        pads = (" " * (width - cell_len(cell)) for cell in flat)
        pairs = zip(flat, pads, strict=True)
        columns.append([pad + cell if numbers[name] else cell + pad for cell, pad in pairs])
    for line in zip(*columns, strict=True):
        yield "  ".join(line).rstrip()


def choose_columns(least: Mapping[Any, int], wanted: Sequence[Any], width: int) -> list[Any]:
    """Return the columns that fit, in table order: the first wanted one, then others with space."""
    chosen: list[Any] = []
    for name in dict.fromkeys(wanted):
        if not chosen or table_width(least[n] for n in [*chosen, name]) <= width:
            chosen.append(name)
    return [name for name in least if name in chosen]


def table_width(widths: Iterable[int]) -> int:
    """Return the width of a table with columns of these widths."""
    columns = list(widths)
    return sum(columns) + GAP * (len(columns) - 1) + EDGES


def has_sentences(column: Sequence[str]) -> bool:
    """Return whether a column has long cells with spaces, at which they may be folded."""
    return any(" " in line and len(line) > SENTENCE for cell in column for line in cell.split("\n"))


def least_width(name: str, column: Sequence[str]) -> int:
    """Return the minimal width of a column; only sentences are folded."""
    from rich.cells import cell_len

    lines = [line for cell in column for line in cell.split("\n")]
    if has_sentences(column):
        words = (word for line in lines for word in line.split())
        longest = min(SENTENCE, max(map(cell_len, words), default=0))
    else:
        longest = max(map(cell_len, lines), default=0)
    return max(cell_len(name), longest)
