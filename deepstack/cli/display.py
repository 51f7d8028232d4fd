"""The observer that shows the progress of one run: steps, loss, ‖ΔF‖ and time left."""

import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager

from deepstack.base.progress import LineView
from deepstack.cli.output import is_interactive, log, terminal_console
from deepstack.cli.views import run_view
from deepstack.training import Observer, PlainLines
from deepstack.training.observer import STEP_LINE


@contextmanager
def observe(quiet: bool) -> Iterator[Observer]:
    """Yield an observer: a bar on a terminal, plain lines elsewhere, silent if quiet."""
    if quiet:
        yield Observer()
    elif is_interactive(sys.stderr):
        view = run_view(terminal_console())
        with view.live, closing(PlainLines(0.0, view)) as lines:
            yield lines
    else:
        with closing(PlainLines(view=LineView(log, STEP_LINE))) as lines:
            lines.working("preparing the run")
            yield lines
