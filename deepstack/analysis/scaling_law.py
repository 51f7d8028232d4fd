"""Budgets of training FLOPs, and the law L = E + c x^(-a) of final losses.

x is the depth, the width or the training FLOPs.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from deepstack.analysis.settings import (
    DEPTH,
    NEVER_DEPTH_SETTINGS,
    SEED,
    STEPS,
    WIDTH,
    by_value,
    depth_of,
    require,
    split_series,
    values_of,
    varying_settings,
)
from deepstack.analysis.statistics import final_value, has_diverged, loss_column, training_flops
from deepstack.analysis.transfer import Interval, interval, resample
from deepstack.errors import NothingMatchedError
from deepstack.records import ENDED, Run

# Runs whose FLOPs differ by less have one budget: FLOPs are rounded to whole steps.
SAME_BUDGET = 1.1
LEAST = 4  # values of x: three numbers are fitted
SMALLEST, LARGEST = 1e-3, 10.0  # limits of the exponent a
NO_FLOOR = 1e-6  # nats: E at its limit, 0
DRAWS = 400  # bootstrap samples

BySeed = Mapping[int, float]
"""Seed -> final loss."""

Budgets = Mapping[Run, float]
"""Run -> its budget of training FLOPs: the median of runs whose FLOPs are nearly equal."""


def budgets_of(runs: Sequence[Run]) -> Budgets:
    """Return the budget of each finished run with an evaluation and FLOPs in meta.json.

    Raises NothingMatchedError without such a run.
    """
    flops = {
        run: run.step_flops * int(run.get(STEPS, 0))
        for run in runs
        if run.state in ENDED and len(run.evals) and run.step_flops > 0
    }
    require(flops, "no finished run has a validation loss, and FLOPs in its meta.json")
    groups: list[list[Run]] = []
    for run in sorted(flops, key=lambda run: flops[run]):
        if not groups or flops[run] > SAME_BUDGET * flops[groups[-1][0]]:
            groups.append([])
        groups[-1].append(run)
    medians = [median(flops[run] for run in group) for group in groups]
    return {run: budget for group, budget in zip(groups, medians, strict=True) for run in group}


def chosen_settings(budgets: Budgets, but: Sequence[str] = ()) -> list[str]:
    """Return varying settings that make no series: `but`, steps, and settings chosen in each cell.

    A setting is chosen if depth, budget and the others determine it, such as a learning rate.
    """
    runs = list(budgets)
    ignored = [STEPS, *but]
    settings = [key for key in varying_settings(runs) if key not in ignored]
    for key in reversed([k for k in settings if not k.startswith(NEVER_DEPTH_SETTINGS)]):
        places = [DEPTH, *but, *(other for other in settings if other != key)]
        cells = {(budgets[run], values_of(run, places)) for run in runs}
        if len(cells) == len({(budgets[run], values_of(run, [*places, key])) for run in runs}):
            settings.remove(key)
            ignored.append(key)
    return ignored


def size_of_axis(runs: Sequence[Run]) -> str:
    """Return the key of the sizes that are compared: the depth, or the width if that alone varies.

    Raises NothingMatchedError if neither varies.
    """
    varying = [key for key in (DEPTH, WIDTH) if len({run.get(key) for run in runs}) > 1]
    return require(varying, "needs finished runs of two depths or two widths")[0]


def made_flops(runs: Sequence[Run]) -> float:
    """Return the mean of the training FLOPs of runs."""
    return float(np.mean([training_flops(run) for run in runs]))


class Law(NamedTuple):
    """L = E + c x^(-a), each with its 95 % bootstrap interval.

    residual: root of the mean square of loss minus law, in nats.  n: values of x.  seeds: those
    that every x shares.  samples: E, c and a of each bootstrap sample.
    """

    E: Interval
    c: Interval
    a: Interval
    residual: float
    n: int
    seeds: int
    samples: np.ndarray

    def curve(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the law at x, and the limits of the central 95 % of its bootstrap samples."""
        E, c, a = self.samples.T[:, :, None]
        low, high = np.quantile(E + c * x**-a, (0.025, 0.975), axis=0)
        return self.E.value + self.c.value * x**-self.a.value, low, high


Points = dict[float, list[Run]]
"""x -> the runs there."""


def fit_law(x: Sequence[float], losses: Sequence[BySeed], draws: int = DRAWS) -> Law:
    """Fit the law to the mean loss at each x by least squares, with 0 <= E and c > 0.

    Intervals come from samples of the seeds that every x shares, equal at every x; with fewer than
    two, from samples of the points.  Raises NothingMatchedError for fewer than four x, for losses
    that do not fall with x, and where the interval of a reaches a limit, so that it has no end.
    """
    require(len(x) >= LEAST, f"needs {LEAST} values or more to fit three numbers; found {len(x)}")
    at = np.asarray(x, float)
    seeds = sorted(set.intersection(*map(set, losses)))
    if len(seeds) > 1:
        by_seed = np.array([[here[seed] for seed in seeds] for here in losses])
        means = by_seed.mean(axis=1)
        drawn = [tuple(sorted(sample)) for sample in resample(range(len(seeds)), draws)]
        # Few seeds have few samples.
        fits = {sample: solve(at, by_seed.take(sample, 1).mean(axis=1)) for sample in set(drawn)}
        samples = [fits[sample] for sample in drawn]
    else:
        require(len(at) > LEAST, f"needs two seeds, or more than {LEAST} values, for an interval")
        means = np.array([np.mean(list(here.values())) for here in losses])
        samples = [
            solve(at[points], means[points])
            for points in resample(range(len(at)), draws)
            if len(set(points)) >= LEAST
        ]
    best = solve(at, means)
    require(best[1] > 0, "the loss does not fall with x, as E + c x^(-a) does")
    E, c, a = map(interval, zip(best, *samples, strict=True))
    require(
        c.low > 0 and 1.01 * SMALLEST < a.low and a.high < 0.99 * LARGEST,
        f"the interval of the exponent has no end: {a.value:.2g} ({a.low:.2g} to {a.high:.2g}, "
        f"limits {SMALLEST:g} and {LARGEST:g}); needs more seeds or a wider range",
    )
    error = means - (E.value + c.value * at**-a.value)
    residual = math.sqrt(np.mean(error**2))
    return Law(E, c, a, residual, len(at), max(len(seeds), 1), np.array(samples))


def solve(x: np.ndarray, y: np.ndarray) -> tuple[float, float, float]:
    """Return E, c and a of least squares; c is 0 if y does not fall with x."""
    from scipy.optimize import minimize_scalar

    middle = math.exp(np.log(x).mean())  # k = c middle^(-a) is as large as the losses
    z = np.log(x / middle)

    def error(log_a: float) -> float:
        E, k = linear(z, y, math.exp(log_a))
        return float(np.square(E + k * np.exp(-math.exp(log_a) * z) - y).sum())

    grid = np.linspace(math.log(SMALLEST), math.log(LARGEST), 50)
    near = int(np.argmin([error(log_a) for log_a in grid]))
    bounds = grid[max(near - 1, 0)], grid[min(near + 1, len(grid) - 1)]
    a = math.exp(minimize_scalar(error, bounds=bounds, options={"xatol": 1e-9}).x)
    E, k = linear(z, y, a)
    return (E if E > NO_FLOOR else 0.0), k * middle**a, a


def linear(z: np.ndarray, y: np.ndarray, a: float) -> tuple[float, float]:
    """Return E >= 0 and k >= 0 of the least squares of E + k exp(-a z)."""
    basis = np.exp(-a * z)
    away = basis - basis.mean()
    k = max(float(away @ y / (away @ away)), 0.0)
    E = float(y.mean() - k * basis.mean())
    return (E, k) if E >= 0 else (0.0, float(basis @ y / (basis @ basis)))


def law_table(runs: Sequence[Run], law: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Return a row for each setting whose losses have a law, and sentences on others and limits.

    law: depth, width or compute.  Where four depths or widths have one budget of FLOPs, each budget
    has a separate law; `compute` has one for each depth.  Diverged runs are left out.
    """
    laws, notes = laws_by_setting(runs, law)
    rows = [
        {"setting": label}
        | fit.a.columns("a")
        | fit.E.columns("E")
        | fit.c.columns("c")
        | {"residual": fit.residual, "n": fit.n, "seeds": fit.seeds}
        for label, _, fit in laws
    ]
    return rows, notes


def laws_by_setting(
    runs: Sequence[Run], law: str
) -> tuple[list[tuple[str, Points, Law]], list[str]]:
    """Return label, runs at each x and law of each setting that has one, and sentences."""
    laws, notes = [], []
    for label, members in points_by_setting(runs, law):
        column = loss_column([run for there in members.values() for run in there])
        losses = [
            {int(run.get(SEED, 0)): final_value(run, column) for run in there}
            for there in members.values()
        ]
        try:
            laws.append((label, members, fit_law(list(members), losses)))
        except NothingMatchedError as error:
            notes.append(f"{label}: {error}")
            continue
        if laws[-1][2].E.value == 0:
            notes.append(f"{label}: E is at its limit 0: these losses show no floor")
    return laws, notes


def points_by_setting(runs: Sequence[Run], law: str) -> list[tuple[str, Points]]:
    """Return label and runs at each x of every setting, without diverged and unfinished runs."""
    ended = [run for run in runs if run.state in ENDED and len(run.evals) and not has_diverged(run)]
    require(ended, "no finished run that did not diverge has a validation loss")
    compute, size = law == "compute", WIDTH if law == "width" else DEPTH
    has_flops = any(run.step_flops > 0 for run in ended)
    budgets = budgets_of(ended) if has_flops or compute else dict.fromkeys(ended, 0.0)
    cells = {(budget, run.get(size)) for run, budget in budgets.items()}
    sizes = Counter(budget for budget, _ in cells)
    each_budget = not compute and len(sizes) > 1 and max(sizes.values()) >= LEAST
    by_flops = compute or each_budget
    if not by_flops:
        budgets = dict.fromkeys(budgets, 0.0)
    but = chosen_settings(budgets, [WIDTH] if size == WIDTH else [])
    groups: list[tuple[str, Points]] = []
    for series in split_series(list(budgets), [k for k in but if by_flops or k != STEPS])[0]:
        parts: dict[str, list[Run]] = {}
        for run in series.runs:
            label = series.label.replace("\u00a0", " ")
            label += "" if law == "depth" else f", N = {depth_of(run)}"
            label += f", {budgets[run]:.2g} FLOPs" if each_budget else ""
            parts.setdefault(label, []).append(run)
        for label, here in parts.items():
            x_of = training_flops if compute else lambda run: run.get(size)
            groups.append((label, by_value(here, x_of)))
    return groups
