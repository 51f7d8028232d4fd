"""A table on a terminal, or the same rows as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import typer

from deepstack.records.cells import plain, text

# Columns of sentences are folded at words; they ask for this much and take what is left.
SENTENCE = 30
# What stands between two columns, and at both edges together.
GAP, EDGES = 3, 2


def emit(
    rows: Sequence[Mapping[Any, Any]],
    as_json: bool,
    *,
    markdown: bool = False,
    first: Sequence[str] = (),
) -> None:
    """Print rows to stdout, as a table, as JSON or as Markdown.

    A terminal gets the columns that fit, `first` before the others; stderr names what is left out.
    """
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

    cells = {name: [text(row.get(name)) for row in rows] for name in names}
    least = {name: least_width(str(name), column) for name, column in cells.items()}
    console = Console(markup=False)  # E[x²] is no style
    shown = names
    if console.is_terminal:
        shown = fitting(least, [*(n for n in first if n in least), *names], console.width)
    # A pipe has no width; on a terminal a name is rather wrapped by it than cut by us.
    width = max(console.width, total(least[name] for name in shown))
    console = Console(width=width if console.is_terminal else 10_000, markup=False)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in shown:
        numbers = all(isinstance(row.get(name), (int, float, type(None))) for row in rows)
        table.add_column(
            str(name),
            justify="right" if numbers else "left",
            overflow="fold",
            no_wrap=not has_sentences(cells[name]),
            min_width=least[name],
        )
    for number in range(len(rows)):
        table.add_row(*(cells[name][number] for name in shown))
    # Written by typer, not by rich, which leaves with an error when the reader has gone.
    with console.capture() as captured:
        console.print(table)
    typer.echo(captured.get(), nl=False)
    if left_out := [str(name) for name in names if name not in shown]:
        said = f"left out, as the terminal is narrow: {', '.join(left_out)}"
        typer.echo(f"{said}; --json or a pipe has all", err=True)


def fitting(least: Mapping[Any, int], wanted: Sequence[Any], width: int) -> list[Any]:
    """The columns that fit, in their own order: the first one wanted, and then what still does."""
    chosen: list[Any] = []
    for name in dict.fromkeys(wanted):
        if not chosen or total(least[n] for n in [*chosen, name]) <= width:
            chosen.append(name)
    return [name for name in least if name in chosen]


def total(widths: Iterable[int]) -> int:
    """The width of a table whose columns are so wide."""
    every = list(widths)
    return sum(every) + GAP * (len(every) - 1) + EDGES


def has_sentences(column: Sequence[str]) -> bool:
    """Whether cells of a column may be folded at their spaces: they are long and have some."""
    return any(" " in line and len(line) > SENTENCE for cell in column for line in cell.split("\n"))


def least_width(name: str, column: Sequence[str]) -> int:
    """What a column needs at least: nothing is folded in it but sentences."""
    from rich.cells import cell_len

    lines = [line for cell in column for line in cell.split("\n")]
    if has_sentences(column):
        words = (word for line in lines for word in line.split())
        longest = min(SENTENCE, max(map(cell_len, words), default=0))
    else:
        longest = max(map(cell_len, lines), default=0)
    return max(cell_len(name), longest)
