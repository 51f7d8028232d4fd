"""The parts of an answer: sentence, figure, table, settings, commands, methods and sources."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import TYPE_CHECKING, Any

from deepstack.base import counted
from deepstack.config import yaml_of
from deepstack.plots import Chart, Options
from deepstack.records import Run
from deepstack.runs import (
    OUTCOME_WORDS,
    Result,
    Runs,
    bests_of,
    further_commands,
    loss_of,
    new_seeds,
    path_of,
    repeat_commands,
    result_table,
    shared_settings,
    title_of,
)
from deepstack.tools.answer.citations import bibtex_of, keys_of, sources_of
from deepstack.tools.answer.found import Found, More
from deepstack.tools.answer.methods import methods_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAPER = Options(style="paper")


@dataclass(frozen=True)
class Content:
    """The parts of one page on a study.

    runs: the runs, in one study.
    question: the user's, or ''.
    found: sentence, how sure it is, and the runs that would decide it.
    chart_name: name of the chart that shows it, or ''.
    chart: figure and table of it, or None.
    left_out: a sentence for each run that cannot be read.
    """

    runs: Runs
    question: str
    found: Found
    chart_name: str
    chart: Chart | None
    left_out: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """Schemes, task, depths and seeds in one line."""
        return title_of(self.runs, self.runs.series()).replace("\u00a0", " ")

    @property
    def sources(self) -> dict[str, str]:
        """The source of each key of `bibtex`: 'arXiv:2203.00555'."""
        papers = sources_of(self.runs)
        return {key: papers[label] for label, key in keys_of(self.runs).items()}

    @property
    def sentence(self) -> str:
        """What was found, in one sentence."""
        return self.found.sentence

    @property
    def figure(self) -> Figure | None:
        """The matplotlib Figure that shows it, which a notebook shows."""
        return self.chart.figure if self.chart else None

    @property
    def caption(self) -> str:
        """The caption of the figure, in one paragraph."""
        first, *others = self.chart.caption.split("\n") if self.chart else [""]
        notes = "; ".join(filter(None, others))
        return f"{first.removesuffix('.')} ({notes})." if notes else first

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """A row for each setting and depth, at its best learning rate of several."""
        cells = bests_of(self.runs.results.values())
        several_rates = any(cell.is_chosen for cell in cells)
        rows = []
        for cell in cells:
            ends = list(cell.by_seed.values())
            loss = loss_of([one.loss for one in ends if one.state == "done"])
            margins = [one.margin for one in ends if one.state == "done"]
            gain = loss_of([None if one is None else -one for one in margins])
            outcomes = [OUTCOME_WORDS.get(one.outcome or "", one.state) for one in ends]
            counts = {word: outcomes.count(word) for word in dict.fromkeys(outcomes)}
            row: dict[str, Any] = {"setting": cell.label, "N": cell.depth}
            if several_rates:
                row["best lr"] = cell.value if cell.is_chosen else None
                row["edge"] = cell.edge
            row |= {"outcome": ", ".join(f"{n} {word}" for word, n in counts.items())}
            row |= {"n": loss.n, "val_loss": loss.value, "sd": loss.sd}
            row |= {"low": loss.low, "high": loss.high, "below": gain.value}
            rows.append({key: None if v != v else v for key, v in row.items()})
        return rows

    @cached_property
    def rate_rows(self) -> list[dict[str, Any]]:
        """The losses of settings by learning rates, if rates vary; else nothing."""
        if not any(cell.is_chosen for cell in bests_of(self.runs.results.values())):
            return []
        return result_table(self.runs.results.values())

    @property
    def settings(self) -> str:
        """The settings that all runs share, as YAML."""
        return yaml_of(shared_settings(self.runs))

    @cached_property
    def repeat(self) -> list[str]:
        """The commands that train the runs again, check their files and make this page."""
        studies = shlex.join(path_of(study) for study in self.runs.by_study)
        page = f"deepstack answer {studies}"
        page += f" --question {shlex.quote(self.question)}" if self.question else ""
        draw = f"deepstack plot {self.chart_name} {studies} --style paper"
        checks = [f"deepstack verify {path_of(study)}" for study in self.runs.by_study]
        return [*repeat_commands(self.runs), *checks, page, *([draw] if self.chart_name else [])]

    @cached_property
    def next_runs(self) -> tuple[str, list[str]]:
        """A sentence on the runs that would decide the question, and their commands."""
        more = self.found.more
        if more is None:
            return "", []
        of_cells = cell_runs(self.runs, more)
        seeds = [] if more.rates else new_seeds(of_cells, more.seeds)
        commands = further_commands(of_cells, seeds, more.rates)
        number = more.runs
        text = f"{counted('{} more runs', number)}{cost_text(of_cells, number)} {more.reason}"
        if not commands and any(run.get("model.start") for run in of_cells):
            text += "; the runs that they start with come first, and their time"
        return f"{text}.", commands

    @cached_property
    def bibtex(self) -> str:
        """BibTeX of the sources of the schemes and of deepstack."""
        return bibtex_of(self.runs)

    @cached_property
    def methods(self) -> str:
        """The methods paragraph, with citations as `[@key]`."""
        return methods_of(self.runs, self.found, keys_of(self.runs))


def cell_runs(runs: Runs, more: More) -> list[Run]:
    """Return the runs of the cells that need further ones, at the rates that need them."""
    wanted: set[Result] = set()
    for cell in more.cells:
        tried = cell.tried.values() if more.all_rates or more.rates else [cell.by_seed]
        wanted |= {one for by_seed in tried for one in by_seed.values()}
    return [run for run, result in runs.results.items() if result in wanted]


def cost_text(runs: Sequence[Run], number: int) -> str:
    """Return the time of so many runs, by the measured times of these: ', about 14 minutes,'."""
    times = [float(run.timing["step_ms"].sum()) / 1000 for run in runs if len(run.timing)]
    if not times:
        return ""
    seconds = fmean(times) * number
    text = f"{seconds / 3600:.1f} hours"
    if seconds < 90:
        text = counted("{} seconds", max(round(seconds), 1))
    elif seconds < 90 * 60:
        text = f"{round(seconds / 60)} minutes"
    return f", about {text} of steps one after another,"
