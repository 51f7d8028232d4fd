"""A sweep that finds the best value of one setting, for each combination of the others."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from deepstack import config as conf
from deepstack.base import ConfigError
from deepstack.records import Run
from deepstack.runs import Result, failure_of, has_result, result_of
from deepstack.sweeps import CellProgress, as_study, sweep

SEED = "seed"
TOLERANCE = 1.26
# The first values lie this power of the tolerance apart; each halving takes its square root.
FIRST_STEP = 4
LARGEST_TOLERANCE = 10
# Values that a search may need: three, a pair for each halving, and growth to one side.
FEWEST = 3 + 2 * int(math.log2(FIRST_STEP))
MOST = 4 * FEWEST


class Optimum(NamedTuple):
    """The best value of a setting among those that a search has tried.

    settled: whether greater and smaller neighbours at the final ratio are worse.
    losses: value -> mean final validation loss over the choosing seeds, infinite if one of their
        runs is not done.
    reported: the same at the best value over the reported seeds; None without `select_seeds`.
    """

    setting: dict[str, Any]
    value: float | None
    loss: float
    settled: bool
    losses: dict[float, float]
    reported: float | None = None


@dataclass
class Search:
    """The values start * tolerance^i that one search has tried, i being whole numbers.

    failures: i -> less for a better value (`deepstack.runs.best.failure_of`).
    losses: i -> mean final loss.

    The grid grows until the best value lies inside; then its step is halved around it, until
    neighbours differ by one factor `tolerance`.
    """

    start: float
    tolerance: float
    limit: int
    failures: dict[int, tuple[float, float]] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)
    step: int = FIRST_STEP

    def wanted(self) -> list[int]:
        """Return the indices to measure next; none when the search has ended."""
        while True:
            around = (self.best - self.step, self.best, self.best + self.step)
            missing = [index for index in around if index not in self.failures]
            if missing or self.step == 1:
                return missing[: self.limit - len(self.failures)]
            self.step //= 2

    @property
    def best(self) -> int:
        """The index of the best value; the smallest without a finite loss, and 0 at first."""
        return min(sorted(self.failures), key=self.failures.__getitem__, default=0)

    def value(self, index: int) -> float:
        """Return the value of an index with six digits."""
        return float(f"{self.start * self.tolerance**index:.6g}")

    def optimum(self, setting: dict[str, Any]) -> Optimum:
        """Return the best value so far."""
        losses = {self.value(i): loss for i, loss in sorted(self.losses.items())}
        loss = self.losses[self.best]
        value = self.value(self.best) if math.isfinite(loss) else None
        settled = {self.best - 1, self.best + 1} <= self.failures.keys()
        return Optimum(setting, value, loss, settled, losses)


def refine(
    study: conf.Study | conf.Config,
    key: str,
    *,
    tolerance: float = TOLERANCE,
    max_runs: int | None = None,
    select_seeds: Sequence[int] | None = None,
    name: str = "sweep",
    out: str | Path = "results",
    workers: int | None = None,
    show: Callable[[Sequence[CellProgress]], None] = lambda progress: None,
) -> list[Optimum]:
    """Find the value of `key` with the least validation loss for every setting of a study.

    The search of a setting begins at the base's value, or at the middle one of the values that the
    study gives it, times tolerance^±4.  The grid grows until the best value lies inside, then it is
    halved around it until neighbours have the ratio `tolerance`.  Runs are ordinary run folders in
    `<out>/<name>`; a repeated call skips them.

    max_runs: an upper limit of all choosing runs, shared equally by the settings.
    select_seeds: the seeds that choose.  If given, the study's own seeds train once more at each
        chosen value, in `<out>/<name>_reported`: their losses are not biased by the choice.

    Rules of the study (`sweep.overrides`) do not set `key`.

    Raises ConfigError for a key that is not a positive number with decimals, or a tolerance that is
    not above 1.
    """

    def train(batch: conf.Study, reported: bool) -> list[Run]:
        place = f"{name}_reported" if reported else name
        return sweep(batch, study=place, out=out, workers=workers, show=show)

    return find_optima(
        as_study(study), key, train, tolerance=tolerance, max_runs=max_runs, select=select_seeds
    )


def find_optima(
    study: conf.Study,
    key: str,
    train: Callable[[conf.Study, bool], list[Run]],
    *,
    tolerance: float,
    max_runs: int | None,
    select: Sequence[int] | None,
) -> list[Optimum]:
    """Search as `refine` does, with runs from anywhere.

    train: trains a batch and returns its runs; its second argument says whether they are those
        with the reported seeds.
    select: the seeds that choose, None for the study's own.
    """
    key = whole_key(study, key)
    study = without_overrides(study, key)
    if not 1 < tolerance <= LARGEST_TOLERANCE:
        raise ConfigError(
            f"--tolerance: found {tolerance:g}; allowed a ratio above 1, as in 1.26, and at most "
            f"{LARGEST_TOLERANCE}"
        )
    settings = settings_of(study, key)
    own_seeds = study.grid.get(SEED, [study.base.seed])
    seeds = list(dict.fromkeys(select or own_seeds))
    _, most = count_runs(study, key, seeds, max_runs)
    limit = most // len(settings) // len(seeds)
    searches = [Search(start_of(study, key, one), tolerance, limit) for one in settings]
    while wanted := [
        (setting, search, index)
        for setting, search in zip(settings, searches, strict=True)
        for index in search.wanted()
    ]:
        cells = [setting | {key: search.value(index)} for setting, search, index in wanted]
        runs = train(batch_of(study, cells, seeds), False)
        for cell, (_, search, index) in zip(cells, wanted, strict=True):
            of_cell = [run for run in runs if matches(run, cell)]
            search.failures[index], search.losses[index] = failure(of_cell), mean_loss(of_cell)
    optima = [search.optimum(setting) for setting, search in zip(settings, searches, strict=True)]
    if select is not None:
        chosen = [one.setting | {key: one.value} for one in optima if one.value is not None]
        runs = train(batch_of(study, chosen, own_seeds), True) if chosen else []
        optima = [
            one._replace(reported=mean_loss([run for run in runs if matches(run, one.setting)]))
            for one in optima
        ]
    return optima


def count_runs(
    study: conf.Study, key: str, seeds: Sequence[int], max_runs: int | None
) -> tuple[int, int]:
    """Return the least and the largest number of choosing runs.

    Raises ConfigError for a key that cannot be refined, or a `max_runs` below the least.
    """
    key = whole_key(study, key)
    study = without_overrides(study, key)
    start_value(study, key)
    searches = len(settings_of(study, key)) * len({*seeds})
    fewest, most = FEWEST * searches, MOST * searches
    if max_runs is not None and max_runs < fewest:
        raise ConfigError(
            f"--max-runs: found {max_runs}; allowed {fewest} or more: {FEWEST} values for each of "
            f"{searches} settings and seeds"
        )
    return fewest, most if max_runs is None else min(most, max_runs)


def whole_key(study: conf.Study, key: str) -> str:
    """Return the dotted key of a setting, also of its last word alone: train.lr of lr."""
    values = conf.values(study.base)
    numbers = [one for one, value in values.items() if isinstance(value, float) and value > 0]
    return conf.Key.look_up(key, values, "--refine", prefer=numbers)


def without_overrides(study: conf.Study, key: str) -> conf.Study:
    """Return a study none of whose rules sets this key: the search sets it in every cell."""
    others = (
        replace(rule, settings={k: v for k, v in rule.settings.items() if k != key})
        for rule in study.overrides
    )
    return replace(study, overrides=tuple(others))


def start_value(study: conf.Study, key: str) -> float:
    """Return the value of the base, from which every search begins."""
    value = conf.values(study.base)[key]
    if not isinstance(value, float) or value <= 0:
        raise ConfigError(
            f"--refine: found {key}, whose value is {value!r}; allowed a setting that is a "
            "positive number with decimals, as in train.lr"
        )
    return value


def start_of(study: conf.Study, key: str, setting: Mapping[str, Any]) -> float:
    """Return the middle one of the values that a study gives a key in a setting, or the base's."""
    cells = [one.values for one in study.combinations() if key in one.values]
    values = {one[key] for one in cells if setting.items() <= one.items()}
    return sorted(values)[len(values) // 2] if values else start_value(study, key)


def settings_of(study: conf.Study, key: str) -> list[dict[str, Any]]:
    """Return every distinct combination of the swept values besides `key` and the seed."""
    settings: list[dict[str, Any]] = []
    for combination in study.combinations():
        setting = {k: v for k, v in combination.values.items() if k not in (key, SEED)}
        if setting not in settings:
            settings.append(setting)
    return settings


def batch_of(
    study: conf.Study, cells: Sequence[dict[str, Any]], seeds: Sequence[int]
) -> conf.Study:
    """Return the study of these settings with each seed, with the rules of the whole one."""
    group = {key: [cell[key] for cell in cells] for key in cells[0]}
    return replace(study, grid={SEED: list(seeds)}, zips=(group,))


def matches(run: Run, cell: dict[str, Any]) -> bool:
    """Return whether a run has all values of a cell."""
    return all(run.get(key) == value for key, value in cell.items())


def failure(runs: Sequence[Run]) -> tuple[float, float]:
    """Return a key, less for a better value; its second number is infinite if a run is not done."""
    ends = ends_of(runs)
    share, above_floor = failure_of(ends) if ends else (0.0, math.inf)
    return share, above_floor if len(ends) == len(runs) else math.inf


def mean_loss(runs: Sequence[Run]) -> float:
    """Return the mean final loss, infinite without runs, or if one is not done or has diverged."""
    losses = [one.final_loss for one in ends_of(runs)]
    is_whole = bool(losses) and len(losses) == len(runs) and all(map(math.isfinite, losses))
    return fmean(losses) if is_whole else math.inf


def ends_of(runs: Sequence[Run]) -> list[Result]:
    """Return the results of the runs that have one."""
    return [one for run in runs if has_result(one := result_of(run))]
