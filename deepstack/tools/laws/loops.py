"""The law of looped stacks, L = E_T + c (n_once + r^phi n_looped)^(-a): what is a loop worth?

Source: Schwethelm, Rückert, Kaissis 2026, How Much Is One Recurrence Worth?, arXiv 2604.21106.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import least_squares

from deepstack import config as conf
from deepstack.base import NothingMatchedError
from deepstack.records import ENDED, Run
from deepstack.runs import (
    DEPTH,
    LEAST_SEEDS,
    NO_INTERVAL,
    SEED,
    STEPS,
    WIDTH,
    Interval,
    Runs,
    final_value,
    has_diverged,
    interval,
    loss_column,
    over_samples,
    require,
)
from deepstack.tools.laws.laws import chosen_settings

LOOP = ("model.unique_layers", "model.prelude_layers", "model.coda_layers")
DRAWS = 400  # bootstrap samples of the seeds
PHI, A = (-3.0, 4.0), (1e-3, 10.0)  # limits of phi and of a
STARTS = [(phi, a) for phi in (-1, -0.5, 0, 0.5, 1, 1.5, 2) for a in (0.03, 0.1, 0.3, 1, 3)]
"""Values of phi and a from which the fit may start."""
MODEL = "depth", "d_model", "d_ff", "n_heads", "n_kv_heads", "gated", "family"


class Size(NamedTuple):
    """The size of a stack: parameters in the matrices of its layers, and its training.

    once: in the layers that are run once: the prelude and the coda.
    looped: in the layers that are run `times` times; all parameters if that is once.
    """

    once: float
    looped: float
    times: int
    steps: int


class LoopLaw(NamedTuple):
    """The law of one setting.

    phi: the exponent of a loop's worth, with its 95 % interval over seeds.
    a: the exponent of the parameters.
    residual: root of the mean square of loss minus law, in nats.
    n: sizes.
    seeds: those that every size shares.
    """

    phi: Interval
    a: float
    residual: float
    n: int
    seeds: int


def fit_loops(losses: Mapping[Size, Mapping[int, float]], draws: int = DRAWS) -> LoopLaw:
    """Fit the law to the mean loss at each size by least squares, with a level E for each T.

    losses: size -> seed -> final loss.  T is the number of steps.

    The interval of phi is over samples of the seeds that every size shares, as `fit_law` has them.
    Raises NothingMatchedError for too few sizes, for losses that do not fall with the parameters,
    and where phi reaches a limit in all seeds or in 2.5 % of the samples.
    """
    sizes = list(losses)
    steps = sorted({size.steps for size in sizes})
    unknown = len(steps) + 3
    require(len({s.times for s in sizes}) > 1, "needs stacks with two numbers of loops or more")
    widths = len({s.once + s.looped for s in sizes if s.times == sizes[0].times})
    require(widths > 1, "needs stacks of two sizes or more with the same number of loops")
    require(
        len(sizes) > unknown,
        f"needs more than {unknown} sizes for {unknown} unknown numbers; found {len(sizes)}",
    )
    seeds = sorted(set.intersection(*(set(here) for here in losses.values())))
    require(seeds, "no seed has a loss at every size")
    table = np.array([[losses[size][seed] for size in sizes] for seed in seeds])
    levels = np.array([[size.steps == one for one in steps] for size in sizes], float)
    place = {seed: i for i, seed in enumerate(seeds)}

    whole = solve(sizes, levels, table.mean(axis=0))

    def estimate(sample: tuple[int, ...]) -> tuple[float, float, float]:
        loss = table[[place[seed] for seed in sample]].mean(axis=0)
        return solve(sizes, levels, loss, [whole[:2]])

    (phi, a, residual), *others = samples = over_samples(estimate, seeds, draws)
    phis = [one[0] for one in samples]
    low, high = np.quantile([one[0] for one in others] or [phi], (0.025, 0.975), method="nearest")
    require(
        PHI[0] + 0.01 < low and high < PHI[1] - 0.01,
        f"phi is not determined: {phi:.2g} ({low:.2g} to {high:.2g} in samples of the seeds); "
        "needs more seeds, more sizes or more loops",
    )
    return LoopLaw(interval(phis, len(seeds)), a, residual, len(sizes), len(seeds))


def solve(
    sizes: Sequence[Size],
    levels: np.ndarray,
    loss: np.ndarray,
    starts: Sequence[tuple[float, float]] = STARTS,
) -> tuple[float, float, float]:
    """Return phi, a and the residual of least squares.

    levels: (sizes, numbers of steps), 1 where a size was trained for so many steps.
    loss: (sizes,).
    starts: values of phi and a; the fit goes on from the best.

    The levels and c are linear, so they are solved for at each phi and a.
    """
    once, looped, times = (
        np.array([getattr(size, key) for size in sizes], float)
        for key in ("once", "looped", "times")
    )
    scale = np.exp(np.log(once + looped).mean())

    def linear(phi: float, a: float) -> tuple[np.ndarray, float]:
        """Return law minus loss at each size, and c in units of its basis."""
        z = np.log((once + times**phi * looped) / scale)
        basis = np.column_stack([levels, np.expm1(-a * z) / a])  # for a -> 0 it becomes -z
        solution, *_ = np.linalg.lstsq(basis, loss, rcond=None)
        return basis @ solution - loss, float(solution[-1])

    first = min(starts, key=lambda one: float(np.square(linear(*one)[0]).sum()))
    best = least_squares(
        lambda point: linear(point[0], math.exp(point[1]))[0],
        [first[0], math.log(first[1])],
        bounds=np.array([PHI, np.log(A)]).T,
        xtol=1e-10,
        ftol=1e-10,
    )
    phi, a = float(best.x[0]), math.exp(best.x[1])
    require(linear(phi, a)[1] > 0, "the loss does not fall with the parameters")
    return phi, a, math.sqrt(np.square(best.fun).mean())


def size_of(run: Run) -> Size:
    """Return the size of a run's stack."""
    given = {key: run.get(f"model.{key}") for key in (*MODEL, "decoder_depth")}
    given |= {key.removeprefix("model."): run.get(key) for key in LOOP}
    given = {key: value for key, value in given.items() if value is not None}
    require(WIDTH.removeprefix("model.") in given, f"{run.name}: has no {WIDTH}")
    model = conf.Model.model_construct(**given)
    owners = model.depth if model.unique_layers is None else model.unique_layers
    around = model.prelude_layers + model.coda_layers
    times = 1 if model.unique_layers is None else (model.depth - around) // owners
    total = conf.parameters_at(model, model.d_model)
    looped = total * owners / (owners + around) if times > 1 else total
    return Size(total - looped, looped, times, int(run.get(STEPS, 0)))


def loop_table(runs: Sequence[Run]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return a row for each setting whose losses have a law, and sentences on the others.

    Diverged runs are left out.
    """
    ended = [run for run in runs if run.state in ENDED and len(run.evals) and not has_diverged(run)]
    require(ended, "no finished run that did not diverge has a validation loss")
    budgets = {run: float(run.get(STEPS, 0)) for run in ended}
    sizes = [DEPTH, WIDTH, *LOOP]
    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    for series in Runs(ended).series([*chosen_settings(budgets, sizes), *sizes]):
        label, column = series.label.replace("\u00a0", " "), loss_column(series.runs)
        losses: dict[Size, dict[int, float]] = {}
        try:
            for run in series.runs:
                here = losses.setdefault(size_of(run), {})
                here[int(run.get(SEED, 0))] = final_value(run, column)
            law = fit_loops(losses)
        except NothingMatchedError as error:
            notes.append(f"{label}: {error}")
            continue
        numbers = {"a": law.a, "residual": law.residual, "n": law.n, "seeds": law.seeds}
        rows.append({"setting": label} | law.phi.columns("phi") | numbers)
    if any(row["seeds"] < LEAST_SEEDS for row in rows):
        notes.append(NO_INTERVAL)
    return rows, notes
