"""Budgets of training FLOPs, and the law L = E + c x^(-a) of final losses.

x is the depth, the width or the training FLOPs.
"""

import math
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
    setting_value,
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
LAWS = {"depth": DEPTH, "width": WIDTH, "compute": "train.flops"}
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
    planned = {
        run: run.meta.get("flops", {}).get("step", math.nan) * int(run.get(STEPS, 0))
        for run in runs
        if run.state in ENDED and len(run.evals)
    }
    known = {run: flops for run, flops in planned.items() if flops > 0}
    require(known, "no finished run has a validation loss, and FLOPs in its meta.json")
    groups: list[list[Run]] = []
    for run in sorted(known, key=lambda run: known[run]):
        if not groups or known[run] > SAME_BUDGET * known[groups[-1][0]]:
            groups.append([])
        groups[-1].append(run)
    middle = [float(median(known[run] for run in group)) for group in groups]
    return {run: budget for group, budget in zip(groups, middle, strict=True) for run in group}


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
    if len({depth_of(run) for run in runs}) > 1:
        return DEPTH
    if len({setting_value(run, WIDTH) for run in runs}) > 1:
        return WIDTH
    raise NothingMatchedError("needs finished runs of two depths or two widths")


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
    require(
        len(set(x)) >= LEAST,
        f"needs {LEAST} values or more to fit three numbers; found {len(set(x))}",
    )
    at = np.asarray(x, float)
    shared = sorted(set.intersection(*(set(by_seed) for by_seed in losses)))
    means = np.array([np.mean(list(by_seed.values())) for by_seed in losses])
    if len(shared) > 1:
        means = mean_of_seeds(losses, shared)
    best = solve(at, means)
    require(best[1] > 0, "the loss does not fall with x, as E + c x^(-a) does")
    samples = [best]
    if len(shared) > 1:
        drawn = [tuple(sorted(seeds)) for seeds in resample(shared, draws)]
        # Few seeds have few samples.
        fits = {seeds: solve(at, mean_of_seeds(losses, seeds)) for seeds in set(drawn)}
        samples += [fits[seeds] for seeds in drawn]
    else:
        for points in resample(range(len(at)), draws):
            if len(set(at[points])) >= LEAST:
                samples.append(solve(at[points], means[points]))
    E, c, a = (interval(values) for values in np.array(samples).T.tolist())
    require(math.isfinite(a.low), f"needs two seeds, or more than {LEAST} values, for an interval")
    if c.low == 0 or a.low <= 1.01 * SMALLEST or a.high >= 0.99 * LARGEST:
        raise NothingMatchedError(
            f"the interval of the exponent has no end: {a.value:.2g} ({a.low:.2g} to {a.high:.2g}, "
            f"limits {SMALLEST:g} and {LARGEST:g}); needs more seeds or a wider range"
        )
    error = means - (best[0] + best[1] * at ** -best[2])
    residual = float(np.sqrt(np.mean(error**2)))
    return Law(E, c, a, residual, len(at), max(len(shared), 1), np.array(samples[1:]))


def mean_of_seeds(losses: Sequence[BySeed], seeds: Sequence[int]) -> np.ndarray:
    """Return the mean loss over these seeds at each x."""
    return np.array([np.mean([by_seed[seed] for seed in seeds]) for by_seed in losses])


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

    law: depth, width or compute.  Where several depths or widths have one budget of FLOPs, each
    budget has a separate law; `compute` has one for each depth.  Diverged runs are left out.
    """
    laws, notes = laws_by_setting(runs, law)
    rows = []
    for label, _, fitted in laws:
        row: dict[str, Any] = {"setting": label}
        for name in ("a", "E", "c"):
            row |= getattr(fitted, name).columns(name)
        rows.append(row | {"residual": fitted.residual, "n": fitted.n, "seeds": fitted.seeds})
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
    size = LAWS[law]
    x_key = STEPS if law == "compute" else size
    has_flops = any("flops" in run.meta for run in ended)
    budgets = budgets_of(ended) if has_flops or law == "compute" else dict.fromkeys(ended, 0.0)
    at_budget: dict[float, set[Any]] = {}
    for run, budget in budgets.items():
        at_budget.setdefault(budget, set()).add(run.get(size))
    apart = law != "compute" and max(map(len, at_budget.values())) > 1 and len(at_budget) > 1
    by_flops = apart or law == "compute"
    cells = budgets if by_flops else dict.fromkeys(ended, 0.0)
    but = chosen_settings(cells, [WIDTH] * (law == "width"))
    but = [key for key in but if by_flops or key != STEPS]
    groups: list[tuple[str, Points]] = []
    for series in split_series(list(budgets), but)[0]:
        parts: dict[str, list[Run]] = {}
        for run in series.runs:
            words = [series.label]
            words += [f"N = {depth_of(run)}"] * (law != "depth")
            words += [f"{budgets[run]:.2g} FLOPs"] * apart
            parts.setdefault(", ".join(words), []).append(run)
        for label, members in parts.items():
            points = by_value(members, lambda run: run.get(x_key))
            if law == "compute":
                points = {made_flops(there): there for there in points.values()}
            groups.append((label.replace("\u00a0", " "), dict(sorted(points.items()))))
    return groups
