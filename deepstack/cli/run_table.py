"""The runs of a study as a live table, or as a line for each change of state."""

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from deepstack.base.text import clock_text, number_text, one_line
from deepstack.records import RunFolder
from deepstack.records.file_values import last_rows, logged_number
from deepstack.runs.loss_text import compared_losses, loss_text

# the states in the order in which a short terminal shows them, with their colours
COLOURS = {
    "running": "cyan", "damaged": "red", "failed": "red", "out_of_memory": "red",
    "diverged": "red", "interrupted": "yellow", "waiting": "dim", "new": "dim", "done": "green",
}  # fmt: skip
ENDS = ("diverged", "damaged", "failed", "out_of_memory", "interrupted")
ROWS = 40
WIDE = 92  # cells of a terminal on which all columns fit


@dataclass(frozen=True)
class RunRow:
    """The values that the table shows of a run.

    loss: the latest validation loss, where [MASK] is shown if anywhere.
    loss_text: the same with its reference: '3.067 ± 0.059 nats (unigram 3.263)', '' without one.
    step_ms: the time of a step in milliseconds, of a running run only, as seconds_left.
    """

    name: str
    state: str
    step: int
    steps: int | None
    loss: float | None = None
    loss_text: str = ""
    model_update: float | None = None
    step_ms: float | None = None
    seconds_left: float | None = None


def read_row(folder: RunFolder, name: str, state: str, steps: int | None) -> RunRow:
    """Read the values that the table shows of a run from the ends of its logs.

    Raises ResourceError or ValueError for a log that is damaged.
    """
    last = folder.last_row()
    step = int(last.get("step", 0))
    cell = last.get("model_update")
    update = logged_number(folder.steps_path, cell) if cell else None
    row = last_evaluation(folder)
    column, _ = compared_losses(row, {})
    loss = row.get(column)
    text = "" if loss is None else loss_text(row, folder.read_columns().get("references", {}))
    if text and row.get("step", step) < step:
        text += f" at step {row['step']:.0f}"
    path = folder.timing_path
    times = last_rows(path)[1] if state == "running" else []
    step_times = [logged_number(path, row[1]) for row in times if len(row) > 1 and row[1]]
    step_ms = statistics.median(step_times) if step_times else None
    left = None if step_ms is None or steps is None else (steps - step) * step_ms / 1000
    return RunRow(name, state, step, steps, loss, text, update, step_ms, left)


def last_evaluation(folder: RunFolder) -> dict[str, float]:
    """Return the values of the last whole row of evals.csv; empty without rows.

    Raises ResourceError for a cell that no run writes.
    """
    path = folder.evals_path
    names, rows = last_rows(path)
    cells = rows[-1] if rows else []
    return {name: logged_number(path, cell) for name, cell in zip(names, cells, strict=False)}


def live_table(rows: Sequence[RunRow], width: int, height: int, caption: str = "") -> Table:
    """Return the runs as a table that fits the terminal, running and failed ones first.

    A narrow terminal has no column of the time of a step, so that it has the whole names.
    """
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    names = ("run", "state", "step", "val. loss", "‖ΔF‖", "left", "ms/step")
    for name in names if width >= WIDE else names[:-1]:
        table.add_column(name, justify="left" if name in ("run", "state") else "right")
    order = list(COLOURS)
    count = max(5, min(ROWS, height - 6))
    chosen = set(sorted(rows, key=lambda row: order.index(row.state))[:count])
    for row in [row for row in rows if row in chosen]:
        cells: tuple[str | Text, ...] = (
            one_line(row.name),
            Text(row.state, COLOURS[row.state]),
            f"{row.step}/{row.steps or '?'}",
            *map(number_text, (row.loss, row.model_update)),
            "" if row.seconds_left is None else clock_text(row.seconds_left),
            "" if row.step_ms is None else f"{row.step_ms:.3g}",
        )
        table.add_row(*cells[: len(table.columns)])
    more = f"and {len(rows) - count} more" if len(rows) > count else ""
    table.caption = "; ".join(filter(None, [more, caption]))
    return table


def changes_of_state(rows: Iterable[RunRow], seen: dict[str, str]) -> Iterator[str]:
    """Yield a line for each run whose state is not that in `seen`, and put it there."""
    for row in rows:
        if seen.get(row.name) != row.state:
            seen[row.name] = row.state
            text = f"{row.state:<12} {one_line(row.name)}  step {row.step}/{row.steps or '?'}"
            if row.loss_text and row.model_update is not None:
                text += f"  validation loss {row.loss_text}  ‖ΔF‖ {number_text(row.model_update)}"
            yield text


def counts(states: Iterable[str]) -> str:
    """Count states, as in '12 of 24 done, 1 failed, 2 running'."""
    number = Counter(states)
    parts = [f"{number['done']:,} of {number.total():,} done"]
    parts += [f"{number[name]:,} {name}" for name in (*ENDS, "running") if number[name]]
    return ", ".join(parts).replace("_", " ")
