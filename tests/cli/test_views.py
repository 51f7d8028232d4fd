"""Progress of work: the same events in each view."""

import io
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from rich.console import Console

from deepstack.base.progress import LineView, NotebookView, View
from deepstack.cli.views import run_view


def report(view: View) -> None:
    """Send the events of a short piece of work."""
    view.begin(1, 3)
    view.line("it begins")
    view.show(2, 3, "loss 2.5")
    view.line("it ends")


def test_lines_are_written_and_states_in_their_form_alone() -> None:
    plain: list[str] = []
    report(LineView(plain.append))
    assert plain == ["it begins", "it ends"]
    steps: list[str] = []
    report(LineView(steps.append, "step {done}/{total}  {text}"))
    assert steps == ["it begins", "step 2/3  loss 2.5", "it ends"]


def test_states_come_no_more_often_than_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([0, 10, 31, 31, 40, 62, 62])  # made, then each state, twice if it is written
    monkeypatch.setattr("deepstack.base.progress.time.monotonic", lambda: next(seconds))
    lines: list[str] = []
    view = LineView(lines.append, "{text}", every=30)
    for text in ("at 10", "at 31", "at 40", "at 62"):
        view.show(0, 1, text)
    assert lines == ["at 31", "at 62"]


def test_a_notebook_draws_the_latest_state_beside_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    display = Mock()
    monkeypatch.setitem(
        sys.modules, "IPython", SimpleNamespace(display=SimpleNamespace(display=display))
    )
    view = NotebookView()
    report(view)
    display.assert_called_once_with(view, display_id=True)
    assert repr(view) == "[################--------] 2/3  it ends"
    view.line("<b>")
    assert "&lt;b&gt;" in view._repr_html_()


def test_a_terminal_keeps_lines_above_a_bar_that_goes() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80, record=True)
    view = run_view(console)
    with view.live:
        report(view)
        view.live.refresh()
        shown = console.export_text(clear=False)
    assert "it begins" in shown and "2/3" in shown and "loss 2.5" in shown
