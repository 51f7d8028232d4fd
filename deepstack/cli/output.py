"""Prints a table or JSON on stdout, and lines, status lines and bars on stderr.

Control characters, as from a hostile file name, appear as escapes on both streams.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

from rich.console import Console

from deepstack.base.errors import ConfigError, NothingMatchedError
from deepstack.base.latex import HEAD, Rows, table, tabular
from deepstack.base.markdown import table as markdown_table
from deepstack.base.progress import LineView, View
from deepstack.base.text import plain
from deepstack.cli.streams import Terminal, raw, width_of
from deepstack.cli.streams import log as log
from deepstack.cli.table import cell_of, lay_out

if TYPE_CHECKING:
    from deepstack import sweeps
    from deepstack.runs import Runs

DELAY_SECONDS = 0.5  # a command that ends before shows nothing
LINE_SECONDS = 30  # between two lines of progress in a log


def terminal_console(stream: TextIO | None = None) -> Console:
    """Return rich's console on stderr, or on another stream, that ignores a closed one."""
    terminal = cast(TextIO, Terminal(raw(stream or sys.stderr)))
    return Console(file=terminal, markup=False, emoji=False)


def is_interactive(stream: TextIO) -> bool:
    """Return whether a stream is a terminal that moves its cursor, so that a display may change.

    FORCE_COLOR asks for colours in a pipe and not for a display; TERM=dumb has neither.
    """
    dumb = os.environ.get("TERM", "").lower() in ("dumb", "unknown")
    return raw(stream).isatty() and not dumb


class Work:
    """The progress of a command: a text, and the part that is done if the total is known."""

    def __init__(self, view: View) -> None:
        self.view = view
        self.begun = 0

    def step(self, text: str, total: int) -> None:
        """Begin the next of `total` parts; `text` names it."""
        self.show(text, self.begun, total)
        self.begun += 1

    def show(self, text: str, done: int, total: int) -> None:
        """Show a text, and that `done` of `total` parts are done."""
        self.view.show(done, total, text)

    def note(self, line: str) -> None:
        """Print a line on stderr, above the bar."""
        self.view.line(line)


@contextmanager
def show_work(text: str, quiet: bool = False) -> Iterator[Work]:
    """Show a bar or a status line on stderr while the block runs, if it takes half a second.

    It is gone after the block.  Elsewhere than on a terminal the text is printed every half minute;
    with quiet nothing is.
    """
    if quiet or not is_interactive(sys.stderr):
        yield Work(LineView(log, "" if quiet else "{text}", LINE_SECONDS))
        return
    from deepstack.cli.views import work_view

    view = work_view(terminal_console(), text)
    timer = threading.Timer(DELAY_SECONDS, view.live.start)
    timer.daemon = True
    timer.start()
    try:
        yield Work(view)
    finally:
        timer.cancel()
        timer.join()
        view.live.stop()


@contextmanager
def show_runs(text: str, quiet: bool) -> Iterator[Callable[[Sequence[sweeps.CellProgress]], None]]:
    """Yield a function that shows how many of the given runs have ended."""
    with show_work(text, quiet) as work:

        def show(progress: Sequence[sweeps.CellProgress]) -> None:
            ended = sum(run.state not in ("waiting", "running") for run in progress)
            work.show(f"{text}: {ended} of {len(progress)} runs", ended, len(progress))

        yield show


def log_figures(paths: Iterable[Path]) -> None:
    """Print the paths of PNG files on stderr."""
    for path in paths:
        if path.suffix == ".png":
            log(f"figure: {path}")


def study_rows(
    directories: Sequence[str],
    where: Sequence[str],
    last: int | None,
    make_table: Callable[[Runs], tuple[Sequence[dict[str, Any]], Sequence[str]]],
    problem: str,
) -> list[dict[str, Any]]:
    """Return the rows of all studies below some folders; print the notes on stderr.

    make_table: returns rows and notes for the runs of a study, or raises NothingMatchedError.
    problem: the message if no study has rows.
    """
    from deepstack.runs.studies import find_studies

    studies, notes = find_studies(directories, where=where, last=last)
    several = len(studies) > 1
    rows: list[dict[str, Any]] = []
    for study, runs in studies.items():
        try:
            table, sentences = make_table(runs)
        except NothingMatchedError as error:
            table, sentences = [], [str(error)]
        rows += [{"study": study.name, **row} if several else row for row in table]
        notes += [f"{study.name}: {line}" if several else line for line in sentences]
    if not rows:
        raise NothingMatchedError("\n".join([problem, *notes]))
    for line in notes:
        log(line)
    return rows


def emit_json(value: Any) -> None:
    """Print a value to stdout as JSON, NaN as null and infinity as text."""
    print(json.dumps(json_value(value), indent=2, allow_nan=False))


def json_value(value: Any) -> Any:
    """Return nested values as JSON holds them."""
    if isinstance(value, Mapping):
        return {name: json_value(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(one) for one in value]
    return plain(value)


def emit_facts(facts: Mapping[str, Any], as_json: bool) -> None:
    """Print named values to stdout: one row for each, or as JSON; values of a list on lines."""
    rows = [{"what": name, "value": value} for name, value in facts.items()]
    emit([facts] if as_json else rows, as_json)


def refuse_two_forms(json: bool, markdown: bool = False, latex: bool = False) -> None:
    """Raise ConfigError if rows are asked for in more than one form."""
    forms = {"--json": json, "--markdown": markdown, "--latex": latex}
    given = [form for form, is_given in forms.items() if is_given]
    if len(given) > 1:
        raise ConfigError(f"{given[1]}: found with {given[0]}; allowed one of them")


def emit(
    rows: Sequence[Mapping[Any, Any]],
    as_json: bool,
    *,
    markdown: bool = False,
    latex: bool = False,
    answer: Sequence[str] | None = None,
    first: Sequence[str] = (),
) -> None:
    """Print rows to stdout, as a table, as JSON, as Markdown or as LaTeX.

    A terminal gets the columns that fit, `answer` always and `first` before the others, or records
    (`deepstack.cli.table`); stderr names omitted columns.  A cell shows the values of a list on
    separate lines.  Raises ConfigError for two forms.
    """
    refuse_two_forms(as_json, markdown, latex)
    if as_json:
        emit_json(list(rows))
        return
    if latex:
        print_latex(in_cells(rows))
        return
    if markdown:
        print(markdown_table(in_cells(rows)))
        return
    console = Console()
    layout = lay_out(rows, terminal_width(), answer, first)
    lines = layout.lines
    if layout.has_title and console.is_terminal and has_style(console):
        lines[1] = f"\x1b[1m{lines[1]}\x1b[0m"
    print(*lines, sep="\n", file=raw(sys.stdout), flush=True)
    if layout.omitted:
        titles = ", ".join(layout.omitted)
        log(f"omitted on this narrow terminal: {titles}; --json or a pipe has all")


def in_cells(rows: Sequence[Mapping[Any, Any]]) -> list[dict[str, str]]:
    """Return rows as texts, the values of a list in one line."""
    return [{str(k): cell_of(v).replace("\n", "; ") for k, v in row.items()} for row in rows]


def print_latex(
    rows: Rows,
    caption: str = "",
    bold: Collection[tuple[int, str]] = (),
    right: Collection[str] = (),
) -> None:
    """Print a table of LaTeX to stdout: a float if it has a caption; see `deepstack.base.latex`."""
    lines = [table(rows, caption, bold, right) if caption else tabular(rows, bold, right)]
    print(HEAD, *lines, sep="\n", file=raw(sys.stdout))


def terminal_width() -> int | None:
    """Return the width of the terminal on stdout, None for a pipe or a file."""
    return width_of(sys.stdout)


def has_style(console: Console) -> bool:
    """Return whether a console takes bold text."""
    return not console.is_dumb_terminal and not console.no_color
