"""Prints a table or JSON on stdout, and lines, status lines and bars on stderr.

Control characters, as from a hostile file name, appear as escapes on both streams.
"""

from __future__ import annotations

import json
import sys
import textwrap
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import zip_longest
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TextIO, cast

import typer
from rich.cells import cell_len
from rich.console import Console

from deepstack.errors import NothingMatchedError
from deepstack.records import ENDED, Run
from deepstack.records.cells import one_line, plain, printable, text

if TYPE_CHECKING:
    from rich.progress import Progress

    from deepstack import sweeps

DELAY_SECONDS = 0.5  # a command that ends before shows nothing
# Minimal width of a column of sentences, which is folded at words; it takes the remaining width.
SENTENCE = 30
# Characters between two columns, and at both edges together.
GAP, EDGES = 3, 2


class PrintableStream:
    """A text stream that writes control characters as escapes.

    rich_proxied_file: the stream below; rich writes its own styles and cursor moves there.
    """

    encoding = "utf-8"  # click would bypass an ASCII stream and write to its buffer

    def __init__(self, stream: TextIO) -> None:
        self.rich_proxied_file = stream

    def write(self, text: str) -> int:
        self.rich_proxied_file.write(printable(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)


@contextmanager
def printable_streams() -> Iterator[None]:
    """Make stdout and stderr write control characters as escapes within the context."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast(TextIO, PrintableStream(stream)) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def log(line: str) -> None:
    """Print a line on stderr; ignore a closed stderr, so that the work continues."""
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def raw(stream: TextIO) -> TextIO:
    """Return the stream below a PrintableStream, for texts with intended control characters."""
    return getattr(stream, "rich_proxied_file", stream)


class Terminal:
    """The stderr or stdout that rich writes to; it ignores a closed one, so that work continues.

    Required by test_a_terminal_that_goes_away_does_not_stop_the_run.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = raw(stream or sys.stderr)  # a live display replaces sys.stderr

    def write(self, text: str) -> int:
        with suppress(OSError):
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self.stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def terminal_console(stream: TextIO | None = None) -> Console:
    """Return rich's console on stderr, or on another stream, that ignores a closed one."""
    return Console(file=cast(IO[str], Terminal(stream)), markup=False, emoji=False)


class Work:
    """The progress of a command: a text, and the part that is done if the total is known."""

    def __init__(self, progress: Progress, text: str) -> None:
        self.progress, self.done = progress, 0
        self.task = progress.add_task(one_line(text), total=None)

    def step(self, text: str, total: int) -> None:
        """Begin the next of `total` parts; `text` names it."""
        self.show(text, self.done, total)
        self.done += 1

    def show(self, text: str, done: int, total: int) -> None:
        """Show a text, and that `done` of `total` parts are done."""
        self.progress.update(self.task, description=one_line(text), completed=done, total=total)

    def note(self, line: str) -> None:
        """Print a line on stderr, above the bar."""
        self.progress.console.print(printable(line), soft_wrap=True)


@contextmanager
def show_work(text: str, quiet: bool = False) -> Iterator[Work]:
    """Show a bar or a status line on stderr while the block runs, if it takes half a second.

    It is shown on a terminal only, and not if quiet; it is gone after the block.
    """
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    progress = Progress(
        BarColumn(bar_width=24),
        TextColumn("{task.description}", markup=False),
        TimeElapsedColumn(),
        console=terminal_console(),
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    work = Work(progress, text)
    if quiet or not raw(sys.stderr).isatty():
        yield work
        return
    timer = threading.Timer(DELAY_SECONDS, progress.start)
    timer.daemon = True
    timer.start()
    try:
        yield work
    finally:
        timer.cancel()
        timer.join()
        progress.stop()


@contextmanager
def show_runs(text: str, quiet: bool) -> Iterator[Callable[[Sequence[sweeps.Progress]], None]]:
    """Yield a function that shows how many of the given runs have ended."""
    with show_work(text, quiet) as work:

        def show(progress: Sequence[sweeps.Progress]) -> None:
            ended = sum(entry.state in ENDED for entry in progress)
            work.show(f"{text}: {ended} of {len(progress)} runs", ended, len(progress))

        yield show


def log_figures(paths: Iterable[Path]) -> None:
    """Print the paths of PNG files on stderr."""
    for path in paths:
        if path.suffix == ".png":
            log(f"figure: {path}")


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
