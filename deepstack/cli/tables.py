"""Prints rows as a table, as JSON or as Markdown."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import typer

from deepstack.cli.streams import raw
from deepstack.errors import NothingMatchedError
from deepstack.records import Run
from deepstack.records.cells import one_line, plain, text

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
    if as_json:
        emit_json([{k: plain(v) for k, v in row.items()} for row in rows])
        return
    names = list(dict.fromkeys(key for row in rows for key in row))
    cells = {name: [_cell(row.get(name)) for row in rows] for name in names}
    if markdown:
        body = (
            [cell.replace("|", "\\|") for cell in row] for row in zip(*cells.values(), strict=True)
        )
        for line in (names, ["---"] * len(names), *body):
            typer.echo(f"| {' | '.join(line)} |")
        return
    from rich.console import Console

    console = Console()
    least = {name: least_width(str(name), column) for name, column in cells.items()}
    width = console.width if console.is_terminal else 10_000  # a pipe has no width
    shown = choose_columns(least, [*(n for n in first if n in least), *names], width)
    numbers = [
        all(isinstance(row.get(name), (int, float, type(None))) for row in rows) for name in shown
    ]
    lines = layout({str(n): cells[n] for n in shown}, numbers, [least[n] for n in shown], width)
    if console.is_terminal and not console.no_color:
        lines[1] = f"\x1b[1m{lines[1]}\x1b[0m"
    raw(sys.stdout).write("\n".join(lines) + "\n")
    sys.stdout.flush()
    if left_out := [str(name) for name in names if name not in shown]:
        names_left_out = ", ".join(left_out)
        typer.echo(
            f"omitted on this narrow terminal: {names_left_out}; --json or a pipe has all", err=True
        )


def study_rows(
    directories: Sequence[str],
    where: Sequence[str],
    last: int | None,
    make_table: Callable[[list[Run]], tuple[Sequence[dict[str, Any]], Sequence[str]]],
    problem: str,
) -> list[dict[str, Any]]:
    """Return the rows of all studies below some folders; print the notes on stderr.

    make_table: returns rows and notes for the runs of a study, or raises NothingMatchedError.
    problem: the message if no study has rows.
    """
    from deepstack.analysis.studies import find_studies

    studies, notes = find_studies(directories, where=where, last=last)
    rows: list[dict[str, Any]] = []
    for study, runs in studies.items():
        before = {"study": study.name} if len(studies) > 1 else {}
        try:
            table, more = make_table(runs)
        except NothingMatchedError as error:
            table, more = [], [str(error)]
        rows += [before | row for row in table]
        notes += [": ".join([*before.values(), line]) for line in more]
    if not rows:
        raise NothingMatchedError("\n".join([problem, *notes]))
    for line in notes:
        typer.echo(line, err=True)
    return rows


def emit_json(value: Any) -> None:
    """Print a value to stdout as JSON."""
    typer.echo(json.dumps(value, indent=2))


def emit_facts(facts: Mapping[str, Any], as_json: bool) -> None:
    """Print named values to stdout: one row for each, or as JSON; values of a list on lines."""
    rows = [
        {"what": key, "value": value if isinstance(value, list) else text(value)}
        for key, value in facts.items()
    ]
    emit([facts] if as_json else rows, as_json)


def _cell(value: Any) -> str:
    """Return a value as a cell; only the values of a list are on separate lines."""
    return "\n".join(one_line(text(one)) for one in (value if isinstance(value, list) else [value]))


def layout(
    cells: Mapping[str, Sequence[str]], numbers: Sequence[bool], least: Sequence[int], width: int
) -> list[str]:
    """Return the lines of a table; sentences are folded where it would be wider than `width`."""
    widths = [max(map(_width, [name, *column])) for name, column in cells.items()]
    spare = [wide - narrow for wide, narrow in zip(widths, least, strict=True)]
    for _ in range(min(sum(spare), table_width(widths) - width)):
        widest = max(range(len(spare)), key=lambda n: (spare[n] > 0, widths[n]))
        widths[widest] -= 1
        spare[widest] -= 1

    def row_lines(row: Sequence[str]) -> Iterator[str]:
        folded = [list(_fold(cell, wide)) for cell, wide in zip(row, widths, strict=True)]
        for parts in zip_longest(*folded, fillvalue=""):
            line = (" " * GAP).join(
                " " * (wide - _width(part)) + part if right else part + " " * (wide - _width(part))
                for part, wide, right in zip(parts, widths, numbers, strict=True)
            )
            yield f" {line}".rstrip()

    rule = f" {'─' * (table_width(widths) - EDGES)}"
    rows = [line for row in zip(*cells.values(), strict=True) for line in row_lines(row)]
    return ["", *row_lines(list(cells)), rule, *rows, ""]


def _fold(cell: str, width: int) -> Iterator[str]:
    for line in cell.split("\n"):
        yield from [line] if _width(line) <= width else textwrap.wrap(line, width)


def _width(cell: str) -> int:
    """Return the width of the longest line of a cell in the columns of a terminal."""
    from rich.cells import cell_len

    return max(map(cell_len, cell.split("\n")))


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


def least_width(name: str, column: Sequence[str]) -> int:
    """Return the minimal width of a column; only long cells with spaces are folded."""
    lines = [line for cell in column for line in cell.split("\n")]
    if any(" " in line and len(line) > SENTENCE for line in lines):
        longest = max(_width(word) for line in lines for word in [*line.split(), ""])
        return max(_width(name), min(SENTENCE, longest))
    return max(map(_width, [name, *lines]))
