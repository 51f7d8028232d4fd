"""The view of progress on a terminal: a bar, a table below it, and lines above them that stay."""

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import (
    BarColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from deepstack.base.progress import View
from deepstack.base.text import fold_lines, one_line, printable


class TerminalView(View):
    """Draws the latest state in place while `live` is open.

    bar: rich's bar of the work, or None for a table alone.
    text, count: the text and the count before the first state.
    """

    def __init__(
        self, live: Live, bar: Progress | None = None, text: str = "", count: str = ""
    ) -> None:
        self.live, self.bar = live, bar
        if bar is not None:
            self.task = bar.add_task(one_line(text), total=None, count=count)
            live.update(bar)

    def begin(self, done: int, total: int) -> None:
        self.show(done, total, "")

    def show(self, done: int, total: int, text: str) -> None:
        if self.bar is not None:
            self.bar.update(
                self.task,
                completed=done,
                total=total,
                description=one_line(text),
                count=f"{done}/{total}",
            )

    def wait(self, text: str) -> None:
        if self.bar is not None:
            self.bar.update(self.task, description=one_line(text))

    def show_table(self, table: RenderableType, *, refresh: bool = False) -> None:
        """Show a table below the bar, in place of the last one.  refresh: draw it at once."""
        self.live.update(Group(self.bar, table) if self.bar else table, refresh=refresh)

    def line(self, text: str) -> None:
        console = self.live.console
        console.print(fold_lines(printable(text), console.width), highlight=False, soft_wrap=True)


def run_view(console: Console) -> TerminalView:
    """Return the view of one run: its step, a bar, and the values of the step."""
    bar = Progress(
        TextColumn("{task.fields[count]}"),  # a narrow terminal cuts the bar first
        BarColumn(bar_width=None),
        TextColumn("{task.description}", markup=False),
        console=console,
        expand=True,
    )
    live = Live(console=console, refresh_per_second=4, transient=True)
    return TerminalView(live, bar, count="building …")


def work_view(console: Console, text: str) -> TerminalView:
    """Return the view of a command's work: a bar, a text and the time."""
    bar = Progress(
        BarColumn(24),
        TextColumn("{task.description}", markup=False),
        TimeElapsedColumn(),
        console=console,
    )
    live = Live(
        console=console,
        refresh_per_second=10,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    return TerminalView(live, bar, text)


def sweep_view(console: Console) -> TerminalView:
    """Return the view of a sweep: a bar with the time left, and below it a table of the runs."""
    bar = Progress(
        BarColumn(bar_width=None),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        expand=True,
        speed_estimate_period=600,  # seconds: runs differ in the time of a step
    )
    return TerminalView(Live(console=console, refresh_per_second=2), bar)


def table_view(console: Console) -> TerminalView:
    """Return the view of a table alone, which is drawn whenever it changes."""
    return TerminalView(Live(console=console, auto_refresh=False, redirect_stdout=False))
