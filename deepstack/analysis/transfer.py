"""The best learning rate at each depth, its power of N, and the cost of another depth's rate."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from deepstack.analysis.fit import power_law, signed
from deepstack.analysis.settings import LR, SEED, Series, by_value, depth_of, require, split_series
from deepstack.analysis.statistics import final_value, has_diverged, loss_column
from deepstack.records import ENDED, Run

Losses = Mapping[int, Mapping[float, Mapping[int, float]]]
"""depth -> learning rate -> seed -> final validation loss, infinite for a diverged run."""

DRAWS = 1000  # bootstrap samples of the seeds


class Interval(NamedTuple):
    """An estimate from all seeds and the central 95 % of its bootstrap samples over seeds."""

    value: float
    low: float
    high: float

    def columns(self, name: str, low: str = "", high: str = "") -> dict[str, float]:
        """Return the estimate as columns of a table: name, name_low, name_high."""
        return dict(zip((name, low or f"{name}_low", high or f"{name}_high"), self, strict=True))

    def text(self, digits: int) -> str:
        """Return `−0.52 (−0.61 to −0.44)`, or the value alone without an interval."""
        value, low, high = (signed(number, digits) for number in self)
        return value if math.isnan(self.low) else f"{value} ({low} to {high})"


class BestRate(NamedTuple):
    """The best learning rate at one depth.

    rate: the vertex of a parabola in log lr through the best rate tried and its two neighbours.
    inside: whether both neighbours have a finite loss; else `rate` is the best one tried.
    """

    depth: int
    rate: Interval
    loss: float
    inside: bool
    seeds: int


class Transfer(NamedTuple):
    """The best rates of one setting over depth.

    exponent: of N in the best rate, None for one depth.  costs: depth -> the validation loss at the
    smallest depth's best rate minus the least loss, in nats; None where no such rate was tried.
    """

    best: list[BestRate]
    exponent: Interval | None
    costs: dict[int, Interval | None]


def transfer(losses: Losses, draws: int = DRAWS) -> Transfer:
    """Return best rates, exponent and costs of one setting.

    The seeds that every depth and rate share are drawn with replacement, `draws` times and equally
    at every depth, since a seed has the same random numbers at every depth.
    """
    depths = sorted(losses)
    seeds = shared_seeds(losses)
    samples = [seeds, *resample(seeds, draws)]
    curves = {n: [mean_curve(losses[n], sample) for sample in samples] for n in depths}
    rates = {n: [best_rate(curve) for curve in curves[n]] for n in depths}
    best = []
    for n in depths:
        curve = curves[n][0]
        inside = vertex(curve) is not None
        best.append(BestRate(n, interval(rates[n]), float(curve[1].min()), inside, len(seeds)))
    extra = {n: interval(list(map(cost, curves[n], rates[depths[0]]))) for n in depths}
    costs = {n: loss if math.isfinite(loss.value) else None for n, loss in extra.items()}
    fits = [power_law(depths, of_sample) for of_sample in zip(*rates.values(), strict=True)]
    exponents = [fit.exponent for fit in fits if fit is not None]
    return Transfer(best, interval(exponents) if exponents else None, costs)


def runs_by_rate(every: Sequence[Series]) -> dict[tuple[Series, int], dict[float, list[Run]]]:
    """Return the runs of each series and depth at each learning rate, one for each seed.

    Raises NothingMatchedError if no series and depth has two rates.
    """
    cells = {
        (s, n): by_value([run for run in s.runs if depth_of(run) == n], lambda run: run.get(LR))
        for s in every
        for n in s.depths
    }
    several = max(map(len, cells.values())) > 1
    require(several, "needs finished runs of two learning rates at one depth")
    return cells


def final_losses(runs: Sequence[Run], column: str) -> Losses:
    """Return the final validation losses of runs; those that are not finite are infinite."""
    losses: dict[int, dict[float, dict[int, float]]] = {}
    for run in runs:
        loss = math.inf if has_diverged(run) else final_value(run, column)
        by_seed = losses.setdefault(depth_of(run), {}).setdefault(float(run.get(LR)), {})
        by_seed[int(run.get(SEED, 0))] = loss if math.isfinite(loss) else math.inf
    return losses


def shared_seeds(losses: Losses) -> list[int]:
    """Return the seeds that were trained at every depth and rate."""
    seeds = [set(by_seed) for by_rate in losses.values() for by_seed in by_rate.values()]
    return sorted(set.intersection(*seeds)) if seeds else []


def resample(seeds: Sequence[int], draws: int) -> list[list[int]]:
    """Return so many samples of the seeds, with replacement; equal for equal seeds."""
    random = np.random.default_rng(0)
    if len(seeds) < 2:
        return []
    return [list(random.choice(seeds, len(seeds))) for _ in range(draws)]


def mean_curve(
    by_rate: Mapping[float, Mapping[int, float]], seeds: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Return log lr, rising, and the mean loss over these seeds."""
    rates = sorted(by_rate)
    means = [float(np.mean([by_rate[rate][seed] for seed in seeds])) for rate in rates]
    return np.log(np.array(rates)), np.array(means)


def best_rate(curve: tuple[np.ndarray, np.ndarray]) -> float:
    """Return the vertex of the parabola around the least loss, or the rate with the least loss."""
    lowest = vertex(curve)
    return float(np.exp(curve[0][curve[1].argmin()] if lowest is None else lowest[0]))


def vertex(curve: tuple[np.ndarray, np.ndarray]) -> tuple[float, float] | None:
    """Return the lowest point of the parabola through the point of least y and its neighbours.

    None if that point has no neighbour with a finite y on both sides.
    """
    x, y = curve
    i = int(y.argmin())
    if not 0 < i < len(y) - 1 or not np.isfinite(y[i - 1 : i + 2]).all():
        return None
    bend, tilt, least = np.polyfit(x[i - 1 : i + 2] - x[i], y[i - 1 : i + 2], 2)
    shift = -tilt / (2 * bend) if bend > 0 else 0.0
    at = float(np.clip(x[i] + shift, x[i - 1], x[i + 1]))
    return at, float(np.polyval([bend, tilt, least], at - x[i]))


def cost(curve: tuple[np.ndarray, np.ndarray], rate: float) -> float:
    """Return the loss at a rate, linear in log lr between those tried, minus the least loss.

    Infinite beside a diverged run; NaN outside of the rates tried.
    """
    x, y = curve
    at = np.log(rate)
    if not x[0] - 1e-9 <= at <= x[-1] + 1e-9:
        return math.nan
    return float(np.interp(at, x, y) - y.min())


def interval(samples: Sequence[float]) -> Interval:
    """Return the first value with the 2.5 % and 97.5 % quantiles of the others; NaN without any."""
    others = [value for value in samples[1:] if not np.isnan(value)]
    limits = np.quantile(others or [math.nan], (0.025, 0.975), method="nearest")
    return Interval(samples[0], *limits.tolist())


def transfers(runs: Sequence[Run]) -> dict[str, Transfer]:
    """Return the transfer of every setting: the runs that differ in depth, rate and seed only.

    Running and failed runs are left out.  Raises NothingMatchedError if no setting has finished
    runs of two learning rates or more with a common seed.
    """
    ended = [run for run in runs if run.state in ENDED]
    column = loss_column(ended)
    results = {}
    for series in split_series(ended, but=[LR])[0]:
        losses = final_losses(series.runs, column)
        if any(len(by_rate) > 1 for by_rate in losses.values()) and shared_seeds(losses):
            results[series.label] = transfer(losses)
    return require(results, "needs finished runs of two learning rates with a common seed")


def transfer_table(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return a row for each setting and depth: best rate, exponent in N, cost of the first rate."""
    unknown = Interval(math.nan, math.nan, math.nan)
    return [
        {"setting": label, "depth": best.depth}
        | best.rate.columns("best_lr", "lr_low", "lr_high")
        | {"inside": best.inside, "val_loss": best.loss}
        | (result.costs[best.depth] or unknown).columns("cost")
        | (result.exponent or unknown).columns("exponent")
        | {"seeds": best.seeds}
        for label, result in transfers(runs).items()
        for best in result.best
    ]


PUBLISHED_LAWS: dict[str, tuple[float, str]] = {
    "N^(−3/2)": (-1.5, "arXiv:2602.07494"),
    "N^(−1/2)": (-0.5, "arXiv:2310.02244"),
    "N^0": (0.0, "arXiv:2505.01618"),
}
"""Published powers of depth of the best learning rate, each under the paper's parameterisation."""
