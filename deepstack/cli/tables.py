"""Prints rows as a table, as JSON or as Markdown."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import typer
from rich.cells import cell_len
from rich.console import Console

from deepstack.cli.terminal import log, raw
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
    columns = {str(name): [cell_of(row.get(name)) for row in rows] for name in names}
    if markdown:
        body = zip(*columns.values(), strict=True)
        for line in (columns, ["---"] * len(columns), *body):
            escaped = [cell.replace("|", "\\|") for cell in line]
            typer.echo(f"| {' | '.join(escaped)} |")
        return
    console = Console()
    width = console.width if console.is_terminal else 10_000  # a pipe has no width
    shown = columns_that_fit(columns, first, width)
    numbers = {
        str(name)
        for name in names
        if all(isinstance(row.get(name), int | float | None) for row in rows)
    }
    lines = table_lines(shown, numbers, width)
    if console.is_terminal and not console.no_color:
        lines[1] = f"\x1b[1m{lines[1]}\x1b[0m"
    raw(sys.stdout).write("\n".join(lines) + "\n")
    sys.stdout.flush()
    if omitted := ", ".join(name for name in columns if name not in shown):
        log(f"omitted on this narrow terminal: {omitted}; --json or a pipe has all")


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
        log(line)
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


def cell_of(value: Any) -> str:
    """Return a value as a cell; only the values of a list are on separate lines."""
    return "\n".join(one_line(text(one)) for one in (value if isinstance(value, list) else [value]))


def columns_that_fit(
    columns: Mapping[str, Sequence[str]], first: Sequence[str], width: int
) -> dict[str, Sequence[str]]:
    """Return the columns that fit in table order: one, then those of `first`, then the others."""
    least = {name: least_width(name, column) for name, column in columns.items()}
    chosen: list[str] = []
    for name in dict.fromkeys([*first, *columns]):
        if name in columns:
            if not chosen or table_width(least[each] for each in [*chosen, name]) <= width:
                chosen.append(name)
    return {name: column for name, column in columns.items() if name in chosen}


def table_lines(
    columns: Mapping[str, Sequence[str]], numbers: Iterable[str], width: int
) -> list[str]:
    """Return the lines of a table; sentences are folded where it would be wider than `width`.

    numbers: the columns that are aligned on the right.
    """
    widths = {name: least_width(name, column) for name, column in columns.items()}
    missing = {name: full_width(name, column) - widths[name] for name, column in columns.items()}
    spare = max(0, width - table_width(widths.values()))
    folded = sorted(filter(missing.__getitem__, missing), key=missing.__getitem__)
    for position, name in enumerate(folded):
        share = min(missing[name], spare // (len(folded) - position))
        widths[name] += share
        spare -= share

    def lines_of(row: Sequence[str]) -> list[str]:
        cells = [fold(cell, widths[name]) for cell, name in zip(row, columns, strict=True)]
        lines = []
        for parts in zip_longest(*cells, fillvalue=""):
            padded = []
            for part, name in zip(parts, columns, strict=True):
                blank = " " * (widths[name] - cell_len(part))
                padded.append(blank + part if name in numbers else part + blank)
            lines.append(" " + (" " * GAP).join(padded).rstrip())
        return lines

    rule = f" {'─' * (table_width(widths.values()) - EDGES)}"
    rows = [line for row in zip(*columns.values(), strict=True) for line in lines_of(row)]
    return ["", *lines_of(list(columns)), rule, *rows, ""]


def fold(cell: str, width: int) -> list[str]:
    """Return the lines of a cell, folded at words where they are wider."""
    lines: list[str] = []
    for line in cell.split("\n"):
        lines += [line] if cell_len(line) <= width else textwrap.wrap(line, width)
    return lines


def table_width(widths: Iterable[int]) -> int:
    """Return the width of a table with columns of these widths."""
    columns = list(widths)
    return sum(columns) + GAP * (len(columns) - 1) + EDGES


def full_width(name: str, column: Sequence[str]) -> int:
    """Return the width of a column without folding, in the columns of a terminal."""
    return max(cell_len(line) for cell in [name, *column] for line in cell.split("\n"))


def least_width(name: str, column: Sequence[str]) -> int:
    """Return the minimal width of a column; only cells with spaces are folded."""
    words = [word for cell in column for word in cell.split()]
    if not any(" " in cell for cell in column):
        return full_width(name, column)
    return min(full_width(name, column), max(SENTENCE, full_width(name, words)))
