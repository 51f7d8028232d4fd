"""Budgets of training FLOPs, and the law L = E + c x^(-a) of final losses.

x is the depth, the width or the training FLOPs.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from deepstack.base import NothingMatchedError, counted
from deepstack.records import ENDED, Run
from deepstack.runs import (
    DEPTH,
    END_QUANTILES,
    LEAST_SEEDS,
    NEVER_DEPTH_SETTINGS,
    NO_INTERVAL,
    SEED,
    STEPS,
    UNKNOWN,
    WIDTH,
    Interval,
    Runs,
    by_value,
    depth_of,
    final_value,
    has_diverged,
    interval,
    interval_ends,
    joined,
    loss_column,
    over_samples,
    require,
    training_flops,
    values_of,
)

# Runs whose FLOPs differ by less have one budget: FLOPs are rounded to whole steps.
SAME_BUDGET = 1.1
LEAST = 4  # values of x: three numbers are fitted
SMALLEST, LARGEST = 1e-3, 10.0  # limits of the exponent a
NO_FLOOR = 1e-6  # nats: E at its limit, 0
DRAWS = 400  # bootstrap samples of the seeds
GRID = 50  # values of log a that are tried at once

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
    runs = Runs(budgets)
    ignored = [STEPS, *but]
    settings = [key for key in runs.varying if key not in ignored]
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
    """L = E + c x^(-a), each with its 95 % interval over seeds, if there are three.

    residual: root of the mean square of loss minus law, in nats.
    n: values of x.
    seeds: those that every x shares.
    samples: E, c and a from all seeds and from each sample of them.
    """

    E: Interval
    c: Interval
    a: Interval
    residual: float
    n: int
    seeds: int
    samples: np.ndarray

    def curve(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the law at x, and the ends of its 95 % interval over seeds, NaN without one."""
        E, c, a = self.samples.T[:, :, None]
        curves = E + c * x**-a
        return curves[0], *interval_ends(curves, self.seeds)


Points = dict[float, list[Run]]
"""x -> the runs there."""


def fit_law(x: Sequence[float], losses: Sequence[BySeed], draws: int = DRAWS) -> Law:
    """Fit the law to the mean loss at each x by least squares, with 0 <= E and c > 0.

    Means and intervals come from the seeds that every x shares and from samples of them, equal at
    every x; there is no interval below three of them.  Without a shared seed, the means are over
    the seeds of each x.  The intervals of c and a are taken for their logarithms.  E has none where
    it is at its limit 0.  Raises NothingMatchedError for fewer than four x, or four with one seed,
    for losses that do not fall with x, and where the interval of a reaches a limit.
    """
    require(len(x) >= LEAST, f"needs {LEAST} values or more to fit three numbers; found {len(x)}")
    at = np.asarray(x, float)
    lowest = min(loss for here in losses for loss in here.values())
    require(lowest > 0, f"found a loss of {lowest:.4g}; the law needs losses above 0, for E >= 0")
    seeds = shared = sorted(set.intersection(*map(set, losses)))
    require(
        len(at) > LEAST or len(seeds) > 1,
        f"needs two seeds, or more than {LEAST} values, to fit three numbers",
    )
    if seeds:
        by_seed = {seed: np.array([here[seed] for here in losses]) for seed in seeds}
    else:
        seeds = [0]
        by_seed = {0: np.array([np.mean(list(here.values())) for here in losses])}
    samples = over_samples(
        lambda sample: np.mean([by_seed[seed] for seed in sample], axis=0), seeds, draws
    )
    distinct, places = np.unique(samples, axis=0, return_inverse=True)
    laws = solve(at, distinct)[places.ravel()]
    require(laws[0, 1] > 0, "the loss does not fall with x, as E + c x^(-a) does")
    E, c, a = laws[0].tolist()
    others = laws[1:] if len(laws) > 1 else laws
    (_, k, least), (_, _, most) = np.quantile(others, END_QUANTILES, axis=0, method="nearest")
    require(
        k > 0 and 1.01 * SMALLEST < least and most < 0.99 * LARGEST,
        f"the exponent is not determined: {a:.2g} ({least:.2g} to {most:.2g} in samples of the "
        f"seeds, limits {SMALLEST:g} and {LARGEST:g}); needs more seeds or a wider range",
    )
    residual = math.sqrt(np.mean((samples[0] - (E + c * at**-a)) ** 2))
    of_E, of_c, of_a = (
        interval(column.tolist(), len(seeds), log=positive)
        for column, positive in zip(laws.T, (False, True, True), strict=True)
    )
    require(
        not (of_a.low <= SMALLEST or of_a.high >= LARGEST),
        f"the exponent is not determined: {a:.2g} ({of_a.low:.2g} to {of_a.high:.2g}, limits "
        f"{SMALLEST:g} and {LARGEST:g}); needs more seeds or a wider range",
    )
    at_limit = UNKNOWN._replace(value=E)
    of_E = of_E._replace(low=float(np.maximum(of_E.low, 0.0))) if E > 0 else at_limit
    return Law(of_E, of_c, of_a, residual, len(at), len(shared), laws)


def solve(x: np.ndarray, losses: np.ndarray) -> np.ndarray:
    """Return E, c and a of least squares for each row of losses, (rows, 3).

    c is 0 if the losses do not fall with x.

    losses: (rows, len(x)).  A grid of log a between its limits is divided again around the best
        value of each row, until its spacing is below 1e-9.
    """
    middle = math.exp(np.log(x).mean())  # k = c middle^(-a) is as large as the losses
    z = np.log(x / middle)
    low, high = (np.full(len(losses), math.log(end)) for end in (SMALLEST, LARGEST))
    rows = np.arange(len(losses))
    while True:
        grid = np.linspace(low, high, GRID, axis=1)  # (rows, GRID)
        basis = np.exp(-np.exp(grid)[:, :, None] * z)
        E, k = linear(basis, losses[:, None])
        error = np.square(E[..., None] + k[..., None] * basis - losses[:, None]).sum(axis=-1)
        best = error.argmin(axis=1)
        spacing = float((grid[:, 1] - grid[:, 0]).max())
        if spacing < 1e-9:
            break
        low, high = (grid[rows, np.clip(best + side, 0, GRID - 1)] for side in (-1, 1))
    E, k, a = E[rows, best], k[rows, best], np.exp(grid[rows, best])
    return np.stack([np.where(E > NO_FLOOR, E, 0.0), k * middle**a, a], axis=1)


def linear(basis: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return E >= 0 and k >= 0 of the least squares of E + k basis = y, over the last axis."""
    away = basis - basis.mean(axis=-1, keepdims=True)
    k = np.maximum((away * y).sum(axis=-1) / np.square(away).sum(axis=-1), 0.0)
    E = y.mean(axis=-1) - k * basis.mean(axis=-1)
    without = (basis * y).sum(axis=-1) / np.square(basis).sum(axis=-1)
    return np.where(E >= 0, E, 0.0), np.where(E >= 0, k, without)


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
        shared, every = set.intersection(*map(set, losses)), set().union(*losses)
        if shared:
            members = {x: [r for r in t if r.get(SEED, 0) in shared] for x, t in members.items()}
        try:
            laws.append((label, members, fit_law(list(members), losses)))
        except NothingMatchedError as error:
            notes.append(f"{label}: {error}")
            continue
        if laws[-1][2].E.value == 0:
            notes.append(f"{label}: E is at its limit 0: these losses determine no floor")
        notes += seeds_notes(label, shared, every)
    size, sign = (WIDTH, "d_model") if law == "width" else (DEPTH, "N")
    left = Counter(run.get(size) for run in runs if run.state in ENDED and has_diverged(run))
    notes += [
        f"{counted('{} diverged runs', number)} at {sign} = {value} left out"
        for value, number in sorted(left.items())
    ]
    if any(law.seeds < LEAST_SEEDS for _, _, law in laws):
        notes.append(NO_INTERVAL)
    return laws, notes


def seeds_notes(label: str, shared: Set[int], every: Set[int]) -> list[str]:
    """Return a sentence if some seeds are not at every point of a setting.

    shared: the seeds that are.
    """
    if shared == every:
        return []
    if not shared:
        return [f"{label}: no seed is at every point; the means are of other seeds each"]
    lacking = joined(list(map(str, sorted(every - shared))))
    return [f"{label}: some point lacks seed {lacking}; the law is of the other seeds"]


def points_by_setting(runs: Sequence[Run], law: str) -> list[tuple[str, Points]]:
    """Return label and runs at each x of every setting, without diverged and unfinished runs."""
    ended = [run for run in runs if run.state in ENDED and len(run.evals) and not has_diverged(run)]
    require(ended, "no finished run that did not diverge has a validation loss")
    compute, size = law == "compute", WIDTH if law == "width" else DEPTH
    if not compute:
        ended = [run for run in ended if run.get(size) is not None]
        require(ended, f"no finished run has {size}, the x of --law {law}")
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
    for series in Runs(budgets).series([k for k in but if by_flops or k != STEPS]):
        parts: dict[str, list[Run]] = {}
        for run in sorted(series.runs, key=depth_of):
            label = series.label.replace("\u00a0", " ")
            label += f", N = {depth_of(run)}" if law != "depth" and depth_of(run) else ""
            label += f", {budgets[run]:.2g} FLOPs" if each_budget else ""
            parts.setdefault(label, []).append(run)
        for label, here in parts.items():
            x_of = training_flops if compute else lambda run: run.get(size)
            groups.append((label, by_value(here, x_of)))
    return groups
