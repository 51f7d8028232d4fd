"""Answers a study: chooses the sentence and the figure, and writes the page."""

from __future__ import annotations

import shlex
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from deepstack.base import NothingMatchedError, counted
from deepstack.plots import CHARTS, AnyRuns, Chart, render, runs_of, save, try_chart
from deepstack.records import ENDED, files
from deepstack.runs import (
    Runs,
    Where,
    growth_sentence,
    growths_of,
    of_one_validation,
    path_of,
    validation_notes,
    versions_notes,
)
from deepstack.tools.answer import pages
from deepstack.tools.answer.content import PAPER, Content
from deepstack.tools.answer.found import MOST_NAMES
from deepstack.tools.answer.looks import looks_at
from deepstack.tools.answer.pages import plain_citations
from deepstack.tools.answer.sentence import find
from deepstack.tools.answer.size import size_sentence

# The charts that show each kind of answer: the first one that these runs allow.
FIGURES = {
    "run": ("loss_vs_step",),
    "settings": ("loss_vs_lr", "loss_vs_step"),
    "depths": ("final_loss_vs_depth", "loss_vs_step"),
    "rates": ("best_lr_vs_depth", "loss_vs_lr", "final_loss_vs_depth"),
}
FORMATS = ("terminal", "html", "markdown", "latex")
NAME = "answer"  # of the folder and the files


class Answer(Content):
    """One page on a study; a notebook shows it."""

    def __str__(self) -> str:
        return self.page("terminal")

    def _repr_html_(self) -> str:
        """Return the page for a notebook."""
        return pages.html(self, whole=False)

    def page(self, format: str = "terminal", figure: str = NAME, width: int | None = 80) -> str:
        """Return the page as text for the terminal, HTML, Markdown or LaTeX.

        figure: path of the figure without its ending, as the page refers to it.
        width: of the tables of the terminal's page; None for any.
        """
        if format == "html":
            return pages.html(self, whole=True)
        if format == "markdown":
            return pages.markdown(self, figure)
        return (
            pages.latex(self, figure) if format == "latex" else pages.terminal(self, figure, width)
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the parts of the page as values for JSON."""
        text, commands = self.next_runs
        return {
            "question": self.question,
            "kind": self.found.kind,
            "sentence": self.sentence,
            "decided": self.found.decided,
            "how_sure": list(self.found.sure),
            "details": list(self.found.details),
            "next": text,
            "next_commands": commands,
            "chart": self.chart_name,
            "caption": self.caption,
            "rows": self.rows,
            "commands": self.repeat,
            "methods": plain_citations(self.methods, self.sources),
            "bibtex": self.bibtex,
        }

    def save(self, folder: Path, format: str) -> Path | None:
        """Write the figure's files into a folder, and the page; return the page's path.

        The page of the terminal is not written.
        """
        if self.chart is not None:
            save(self.chart, folder, NAME, options=PAPER)
        if format == "terminal":
            return None
        ending = {"html": "html", "markdown": "md", "latex": "tex"}[format]
        path = folder / f"{NAME}.{ending}"
        files.replace(path, self.page(format, NAME).encode("utf-8", "backslashreplace"))
        if format == "latex":
            files.replace(
                folder / f"{NAME}.bib", f"{self.bibtex}\n".encode("utf-8", "backslashreplace")
            )
            if self.chart:  # the page itself becomes answer.pdf
                figure = folder / f"{NAME}{pages.FIGURE}.pdf"
                files.replace(figure, render(self.chart, "pdf", PAPER))
        return path


def answer(
    runs: AnyRuns,
    question: str = "",
    *,
    where: Where = (),
    last: int | None = None,
) -> Answer:
    """Answer the question of a study: one sentence, its figure, table, settings, sources.

    runs: a folder, a run or several runs, or a table of `load_runs`; of one study.
    question: is printed above the answer.

    where, last: as in `deepstack.load_runs`.

    The sentence depends on the settings that vary: depth, scheme and others, learning rate.  It
    states a difference only if its 95 % interval excludes 0; else `next_runs` has the number of
    runs that would show one, and their command.  Shown by a notebook, it is the page; `sentence`,
    `figure`, `rows`, `methods` and `bibtex` are its parts.

    Raises NothingMatchedError without runs that have ended with a loss.
    """
    chosen = runs_of(runs).select(where, None, last)
    damage = {run: wrong for run in chosen if (wrong := run.damage())}
    readable = chosen.keep(lambda run: run not in damage, "none of these runs can be read")
    readable, other = of_one_validation(readable)
    found = find(readable.results.values(), looks=looks_at(readable.by_study))
    ended = readable.keep(lambda run: run.state in ENDED)
    growths = map(growth_sentence, growths_of(ended)[:MOST_NAMES])
    found = replace(found, details=(*found.details, *growths))
    if found.better and (size := size_sentence(readable)):
        found = replace(found, sure=(*found.sure, size))
    name, chart = figure_of(readable, found.kind)
    left_out = [f"run {run.name} is left out: {wrong}" for run, wrong in damage.items()]
    left_out += [*other, *unfinished(readable), *versions_notes(readable)]
    left_out += validation_notes(readable)
    return Answer(readable, " ".join(question.split()), found, name, chart, tuple(left_out))


def unfinished(runs: Runs) -> list[str]:
    """Return a sentence on the runs without a result of each state, and what shows their errors."""
    states = Counter(run.state for run in runs if run.state not in ENDED)
    studies = shlex.join(path_of(study) for study in runs.by_study)
    return [
        f"{counted('{} runs', number)} left out: {state.replace('_', ' ')} (deepstack ls {studies})"
        for state, number in states.items()
    ]


def figure_of(runs: Runs, kind: str) -> tuple[str, Chart | None]:
    """Return name and chart of the figure that shows this kind of answer."""
    ended = runs.keep(lambda run: run.state in ENDED)
    for name in FIGURES[kind]:
        if name not in CHARTS:
            continue
        result = try_chart(name, CHARTS[name], ended, PAPER)
        if isinstance(result, Chart):
            return name, result
        if not isinstance(result, NothingMatchedError):
            raise result
    return "", None
