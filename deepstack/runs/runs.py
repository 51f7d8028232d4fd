"""A set of runs: what varies among them, their series, labels and tables, each computed once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from deepstack.base.errors import ConfigError
from deepstack.base.text import printable_row, value_text
from deepstack.config.key import Key
from deepstack.records import ENDED, Run, Summary, find_runs, rows_of, summarize
from deepstack.records.run import path_text
from deepstack.runs.conditions import Row, Where, select_rows
from deepstack.runs.series import Series, Split, label_of, split_series, varying_settings
from deepstack.runs.settings import DEPTH, LR, require, setting_value, values_of
from deepstack.runs.tidy import tidy

if TYPE_CHECKING:
    import pandas as pd

    from deepstack.runs.best import Best
    from deepstack.runs.outcomes import Result


NO_CHOICE = "none"  # the word of `best` for charts of every learning rate


class Runs(tuple[Run, ...]):
    """An immutable sequence of runs, whose series, labels and tables are each computed once.

    `Runs.below("results/quick")` has the runs of a folder, `Runs(runs)` any others.
    """

    def __new__(cls, runs: Iterable[Run] = ()) -> Self:
        return runs if isinstance(runs, cls) else super().__new__(cls, runs)

    @classmethod
    def below(cls, path: str | os.PathLike[str]) -> Self:
        """Return the runs in a run, study or results folder, in natural order.

        Raises NothingMatchedError when there is none.
        """
        return cls(find_runs(path))

    def keep(self, holds: Callable[[Run], object], reason: str = "") -> Runs:
        """Return the runs of which something holds; the same object if it holds for all.

        With a reason, raises NothingMatchedError with it when there is none.
        """
        kept = [run for run in self if holds(run)]
        if reason:
            require(kept, reason)
        return self if len(kept) == len(self) else Runs(kept)

    def with_steps(self) -> Runs:
        """Return the runs that have made a step.  Raises NothingMatchedError for none."""
        return self.keep(lambda run: len(run.steps), "no run has a step in steps.csv yet")

    def evaluated(self) -> Runs:
        """Return the ended runs with an evaluation.  Raises NothingMatchedError for none."""
        return self.keep(
            lambda run: run.state in ENDED and len(run.evals),
            "no finished run has a validation loss",
        )

    def select(
        self,
        where: Where = (),
        sort: str | None = None,
        last: int | None = None,
        best: str | Sequence[str] = (),
    ) -> Runs:
        """Return the runs that meet all conditions, of these the `last` created, sorted by `sort`.

        best: of these runs, those that `compare` with these keys compares, study by study; a
            damaged run is none of them.

        Raises NothingMatchedError if none is left, ConfigError for a wrong key or condition.
        """
        if best := chosen_words(best):
            selected = self.select(where, sort, last).keep(lambda run: run.damage() is None)
            chosen = choose_best(selected.by_study, best).values()
            return selected.keep(lambda run: any(run in members for members in chosen))
        if not (where or sort) and last is None:
            return self
        rows = [Row(run, one) for run, one in zip(self, self.summaries, strict=True)]
        return Runs(row.run for row in select_rows(rows, where, sort, last))

    @property
    def by_study(self) -> dict[Path, Runs]:
        """The runs in each folder."""
        studies: dict[Path, list[Run]] = {}
        for run in self:
            studies.setdefault(run.path.parent, []).append(run)
        return {study: Runs(members) for study, members in studies.items()}

    @cached_property
    def varying(self) -> list[Key]:
        """The settings that vary, apart from depth and seed, in the config's order."""
        return varying_settings(self)

    def key(self, word: str, option: str = "setting", among: Sequence[Key] | None = None) -> Key:
        """Return the setting that a word names (see `Key.look_up`), of several one that varies.

        among: the settings that are allowed, if these are not all.

        Raises ConfigError, starting with the option's name, for an unknown or ambiguous word, or
        another setting.
        """
        known = dict.fromkeys([*self.varying, *(key for run in self for key in run.flat_config)])
        key = Key.look_up(word, list(known), option, prefer=[DEPTH, *self.varying])
        if among is None or key in among:
            return key
        vary = f"; these vary: {', '.join(among)}" if among else "; no setting varies"
        first, *others = dict.fromkeys(value_text(setting_value(run, key)) for run in self)
        if others:
            raise ConfigError(f"{option}: {key} is never compared here{vary}")
        value = first.replace("\u00a0", " ")
        raise ConfigError(
            f"{option}: {key} does not vary: it is {value} in all of these runs{vary}"
        )

    @cached_property
    def _splits(self) -> dict[tuple[str, ...], Split]:
        return {}

    def split(self, but: Sequence[str] = ()) -> Split:
        """Return the series of these runs and the settings that follow depth.

        but: settings that make no series.
        """
        ignored = tuple(but)
        if ignored not in self._splits:
            settings = [key for key in self.varying if key not in ignored]
            self._splits[ignored] = split_series(self, settings)
        return self._splits[ignored]

    def series(self, but: Sequence[str] = ()) -> tuple[Series, ...]:
        """Return the runs that differ in depth and seed only, together; in the order of values.

        but: settings that make no series.
        """
        return self.split(but).series

    def label(self, run: Run, keys: Sequence[Key]) -> str:
        """Return the values of one of these runs as a label: `DeepNorm, lr 0.001`."""
        return label_of(run, keys, self)

    def bests(self, best: Sequence[str] = (LR,)) -> list[Best]:
        """Return each setting and depth at its best values; best: settings that are chosen."""
        from deepstack.runs.best import best_of  # `deepstack ls` needs no numpy
        from deepstack.runs.cells import cells_of
        from deepstack.runs.outcomes import result_of

        results = [
            result_of(run, series.label.replace("\u00a0", " "))
            for series in self.series(best)
            for run in series.runs
        ]

        def value(one: Result) -> Any:
            values = values_of(one.run, best) if one.run is not None else ()
            return values[0] if len(values) == 1 else values

        return [best_of(cell) for cell in cells_of(results, value, best)]

    @cached_property
    def results(self) -> dict[Run, Result]:
        """The end of each run, in the order of the series; learning rates make no settings."""
        from deepstack.runs.outcomes import result_of  # `deepstack ls` needs no numpy

        return {
            run: result_of(run, series.label.replace("\u00a0", " "))
            for series in self.series(but=[LR])
            for run in series.runs
        }

    @cached_property
    def at_best_rates(self) -> Runs:
        """The runs at the best learning rate of each setting and depth, where it has several.

        The runs of a setting and depth without a result all stay.
        """
        from deepstack.runs.best import bests_of

        cells = bests_of(self.results.values())
        rates = {(one.label, one.depth): one.value for one in cells if one.is_chosen}

        def is_best(run: Run) -> bool:
            end = self.results[run]
            return rates.get((end.setting, end.depth), end.rate) == end.rate

        return self.keep(is_best)

    @cached_property
    def _tidy(self) -> dict[tuple[str, str], pd.DataFrame]:
        return {}

    def tidy(self, quantity: str, source: str = "steps") -> pd.DataFrame:
        """Return a table with one row per observation: scheme, depth, seed, step, value, settings.

        quantity: a column of `source`, which is `steps`, `evals` or `timing`.
        """
        if (quantity, source) not in self._tidy:
            self._tidy[quantity, source] = tidy(self, quantity, source, self.varying)
        return self._tidy[quantity, source].copy()

    @cached_property
    def summaries(self) -> tuple[Summary, ...]:
        """The values that a table shows of each run, read from the ends of its logs."""
        return tuple(summarize(run.folder) for run in self)

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """A row a run: study, run, state, the settings that vary, the last logged values."""
        return rows_of(self.summaries)

    @property
    def table(self) -> pd.DataFrame:
        """A row a run, with the columns of `deepstack.load_runs`."""
        return self.make_table()

    def make_table(
        self, settings: Callable[[Summary], dict[str, Any]] | None = None
    ) -> pd.DataFrame:
        """Return `table`.

        settings: function that gives the settings of a row, and so their columns.
        """
        import pandas as pd

        rows = self.rows if settings is None else rows_of(self.summaries, settings)
        paths = ({"path": path_text(run)} for run in self)
        return pd.DataFrame([printable_row(row | at) for row, at in zip(rows, paths, strict=True)])


def chosen_words(best: str | Sequence[str]) -> list[str]:
    """Return the settings that `best` names; the word `none` names none."""
    words = [best] if isinstance(best, str) else best
    return [word for word in words if word != NO_CHOICE]


def best_keys(studies: Mapping[Path, Runs], best: str | Sequence[str]) -> dict[Path, list[Key]]:
    """Return the settings that `best` names, full, for each study in which they vary.

    Raises ConfigError for a key that varies in no study.
    """
    words = chosen_words(best)
    if not words:
        return {study: [] for study in studies}
    every = Runs(run for runs in studies.values() for run in runs)
    varying = list(dict.fromkeys(key for runs in studies.values() for key in runs.varying))
    keys = [every.key(word, "best", varying) for word in words]
    return {study: [key for key in keys if key in runs.varying] for study, runs in studies.items()}


def choose_best(studies: Mapping[Path, Runs], best: str | Sequence[str]) -> dict[Path, Runs]:
    """Return the runs of each study that `compare` with `best` compares, in their order."""
    if not chosen_words(best):
        return dict(studies)
    chosen = {}
    for study, keys in best_keys(studies, best).items():
        runs = studies[study]
        best_runs = {run for one in runs.bests(keys) for run in one.runs}
        chosen[study] = runs.keep(best_runs.__contains__)
    return chosen
