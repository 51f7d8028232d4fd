"""Lays out rows as a table of a given width, or as records where the table does not fit.

This is the one rule for every table that a command prints: a row's name and the answer are never
left out.  Where they do not fit, each row is a block with a line for each value.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, zip_longest
from typing import Any, NamedTuple

from rich.cells import cell_len

from deepstack.base.text import one_line, short_text, words_of, wrap

SENTENCE = 30  # minimal width of a column of sentences, which is folded at words
NARROWEST = 20  # letters of a value in a record
GAP = 2  # between the name of a value and the value


class Layout(NamedTuple):
    """Rows as lines of text, the first one a title to emphasise if `has_title`, and what they omit.

    omitted: titles of the columns that are left out.
    """

    lines: list[str]
    has_title: bool
    omitted: list[str]


def cell_of(value: Any) -> str:
    """Return a value as a cell; only the values of a list are on separate lines."""
    values = value if isinstance(value, list) else [value]
    return "\n".join(one_line(short_text(one)) for one in values)


class Column:
    """A column of a table, with lists of lines as cells; widths count the cells of a terminal.

    is_number: whether it is aligned on the right.
    least: the width to which it can shrink; only cells of several words are folded.
    """

    def __init__(self, name: Any, values: Sequence[Any]) -> None:
        self.name, self.title = name, one_line(str(name))
        self.is_number = all(isinstance(value, int | float | None) for value in values)
        self.cells = [cell_of(value).split("\n") for value in values]
        lines = [self.title, *chain(*self.cells)]
        self.width = self.least = max(map(cell_len, lines))
        words = [word for line in lines[1:] for word in words_of(line)]
        if len(words) > len(lines) - 1:
            widths = [cell_len(word.strip()) for word in (self.title, *words)]
            self.least = min(self.width, max(SENTENCE, *widths))

    def align(self, line: str) -> str:
        """Return a line of a cell with spaces up to the column's width."""
        spaces = " " * (self.width - cell_len(line))
        return spaces + line if self.is_number else line + spaces


def table_width(widths: Iterable[int]) -> int:
    """Return the width of a table with columns of these widths, gaps of three and two edges."""
    return sum(width + 3 for width in widths) - 1


def lay_out(
    rows: Sequence[Mapping[Any, Any]],
    width: int | None,
    answer: Sequence[str] | None = None,
    first: Sequence[str] = (),
) -> Layout:
    """Return rows as a table of at most this width, or as records.

    width: in cells of a terminal; None for any.
    answer: columns that are never left out, beside those of the row's name: the first column, and
        `study` before it.  None: no column is left out.
    first: the order in which other columns are chosen.
    """
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = [Column(name, [row.get(name) for row in rows]) for name in names]
    if width is None:
        return Layout(table_lines(columns), True, [])
    needed = names if answer is None else [*name_columns(names, rows), *answer]
    required = [column for column in columns if column.name in needed]
    if table_width(column.least for column in required) > width:
        return Layout(record_lines(names, rows, width), False, [])
    shown = columns_that_fit(columns, [*needed, *first], width)
    shrink(shown, width)
    omitted = [column.title for column in columns if column not in shown]
    return Layout(table_lines(shown), True, omitted)


def name_columns(names: Sequence[Any], rows: Sequence[Mapping[Any, Any]]) -> list[Any]:
    """Return the columns that name a row: the first one, or `study` if it differs and the next."""
    if names[:1] != ["study"]:
        return list(names[:1])
    return list(names[:2] if len({row.get("study") for row in rows}) > 1 else names[1:2])


def record_lines(names: Sequence[str], rows: Sequence[Mapping[Any, Any]], width: int) -> list[str]:
    """Return each row as a block: a line for each value, after the name of its column."""
    titles = {name: one_line(str(name)) for name in names}
    beside = max(map(cell_len, titles.values()), default=0) + GAP
    lines = [""]
    for row in rows:
        for name in names:
            if name not in row:
                continue
            label = titles[name] + " " * (beside - cell_len(titles[name]))
            room = max(width - beside - 1, NARROWEST)
            parts = [part for line in cell_of(row[name]).split("\n") for part in fold(line, room)]
            lines += [f" {label}{parts[0]}" if parts else f" {label}".rstrip()]
            lines += [" " * (beside + 1) + part for part in parts[1:]]
        lines.append("")
    return lines


def columns_that_fit(columns: Sequence[Column], first: Sequence[str], width: int) -> list[Column]:
    """Return the columns that fit, in table order; the ones of `first` are chosen before others."""
    by_name = {column.name: column for column in columns}
    shown: list[Column] = []
    for name in dict.fromkeys([*first, *by_name]):
        if name in by_name:
            wider = [*shown, by_name[name]]
            if not shown or table_width(column.least for column in wider) <= width:
                shown = wider
    return [column for column in columns if column in shown]


def shrink(columns: Sequence[Column], width: int) -> None:
    """Shrink the widest columns of sentences until a table has this width, and fold their cells."""
    while table_width(column.width for column in columns) > width:
        foldable = [column for column in columns if column.width > column.least]
        if not foldable:
            break
        max(foldable, key=lambda column: column.width).width -= 1
    for column in columns:
        column.cells = [
            [part for line in lines for part in fold(line, column.width)] for lines in column.cells
        ]


def fold(line: str, width: int) -> list[str]:
    """Return the lines of a line of a cell, folded at words where it is wider."""
    return [line] if cell_len(line) <= width else wrap(line, width)


def table_lines(columns: Sequence[Column]) -> list[str]:
    """Return columns below their titles: an empty line, the titles, a rule, and the rows."""
    titles = "   ".join(column.align(column.title) for column in columns).rstrip()
    rule = "─" * (table_width(column.width for column in columns) - 2)
    lines = ["", f" {titles}", f" {rule}"]
    for row in zip(*(column.cells for column in columns), strict=True):
        for parts in zip_longest(*row, fillvalue=""):
            aligned = map(Column.align, columns, parts)
            lines.append(f" {'   '.join(aligned)}".rstrip())
    return [*lines, ""]
