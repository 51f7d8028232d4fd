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
from deepstack.records.folder import last_rows, logged_number

# the states in the order in which a short terminal shows them, with their colours
COLOURS = {
    "running": "cyan", "damaged": "red", "failed": "red", "out_of_memory": "red",
    "diverged": "red", "interrupted": "yellow", "waiting": "dim", "new": "dim", "done": "green",
}  # fmt: skip
ENDS = ("diverged", "damaged", "failed", "out_of_memory", "interrupted")
ROWS = 40


@dataclass(frozen=True)
class RunRow:
    """The values that the table shows of a run.

    step_ms: the time of a step in milliseconds, of a running run only, as seconds_left.
    """

    name: str
    state: str
    step: int
    steps: int | None
    loss: float | None = None
    model_update: float | None = None
    step_ms: float | None = None
    seconds_left: float | None = None


def read_row(folder: RunFolder, name: str, state: str, steps: int | None) -> RunRow:
    """Read the values that the table shows of a run from the ends of its logs.

    Raises ResourceError or ValueError for a log that is damaged.
    """
    last = folder.last_row()
    step = int(last.get("step", 0))
    loss, update = (
        logged_number(folder.steps_path, last[name]) if last.get(name) else None
        for name in ("loss", "model_update")
    )
    path = folder.timing_path
    times = last_rows(path)[1] if state == "running" else []
    step_times = [logged_number(path, row[1]) for row in times if len(row) > 1 and row[1]]
    step_ms = statistics.median(step_times) if step_times else None
    left = None if step_ms is None or steps is None else (steps - step) * step_ms / 1000
    return RunRow(name, state, step, steps, loss, update, step_ms, left)


def run_table(rows: Sequence[RunRow], height: int, caption: str = "") -> Table:
    """Return the runs as a table that fits the terminal, running and failed ones first."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("run", "state", "step", "loss", "‖ΔF‖", "ms/step", "left"):
        table.add_column(name, justify="left" if name in ("run", "state") else "right")
    order = list(COLOURS)
    count = max(5, min(ROWS, height - 6))
    chosen = set(sorted(rows, key=lambda row: order.index(row.state))[:count])
    for row in [row for row in rows if row in chosen]:
        table.add_row(
            one_line(row.name),
            Text(row.state, COLOURS[row.state]),
            f"{row.step}/{row.steps or '?'}",
            *map(number_text, (row.loss, row.model_update)),
            "" if row.step_ms is None else f"{row.step_ms:.3g}",
            "" if row.seconds_left is None else clock_text(row.seconds_left),
        )
    more = f"and {len(rows) - count} more" if len(rows) > count else ""
    table.caption = "; ".join(filter(None, [more, caption]))
    return table


def changes_of_state(rows: Iterable[RunRow], seen: dict[str, str]) -> Iterator[str]:
    """Yield a line for each run whose state is not that in `seen`, and put it there."""
    for row in rows:
        if seen.get(row.name) != row.state:
            seen[row.name] = row.state
            text = f"{row.state:<12} {one_line(row.name)}  step {row.step}/{row.steps or '?'}"
            if row.loss is not None and row.model_update is not None:
                text += f"  loss {number_text(row.loss)}  ‖ΔF‖ {number_text(row.model_update)}"
            yield text


def counts(states: Iterable[str]) -> str:
    """Count states, as in '12 of 24 done, 1 failed, 2 running'."""
    number = Counter(states)
    parts = [f"{number['done']:,} of {number.total():,} done"]
    parts += [f"{number[name]:,} {name}" for name in (*ENDS, "running") if number[name]]
    return ", ".join(parts).replace("_", " ")
