"""The best learning rate at each depth, its power of N, and the cost of another depth's rate."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from deepstack.records import ENDED, Run
from deepstack.runs import (
    DRAWS,
    HIGHEST,
    LEAST_SEEDS,
    LR,
    NO_INTERVAL,
    UNKNOWN,
    Cell,
    Interval,
    Result,
    Runs,
    cells_of,
    edge_of,
    failure_of,
    interval,
    joined,
    over_samples,
    power_law,
    require,
    result_of,
    vertex,
)

Losses = Mapping[int, Mapping[float, Mapping[int, float]]]
"""depth -> learning rate -> seed -> final validation loss, infinite for a diverged run."""

DIVERGED = "diverged"
NOTHING = (0.0, math.inf)


class BestRate(NamedTuple):
    """The best learning rate at one depth.

    rate: the vertex of a parabola in log lr through the best rate tried and its two neighbours.
    edge: empty if both neighbours have a finite loss.  Else `rate` is the best one tried, without
        an interval, and `edge` is `highest` or `lowest`, its place among the rates tried, or
        `diverged` if a seed of a neighbour diverged, or did not learn and would win by its mean.
    refines: whether `--refine` can add rates, as to runs that deepstack trains.
    """

    depth: int
    rate: Interval
    loss: float
    edge: str
    seeds: int
    refines: bool = True

    @property
    def inside(self) -> bool:
        """Whether both neighbours of the best rate tried have a finite loss."""
        return not self.edge

    @property
    def advice(self) -> str:
        """Where the best rate lies, and which rates to add; empty if it lies inside."""
        at = f"N = {self.depth}: best at"
        rate, refine = f"{self.rate.value:.4g}", ", or --refine train.lr" * self.refines
        if self.edge == DIVERGED:
            return (
                f"{at} {rate}, next to a rate at which a seed fails; add rates between them{refine}"
            )
        if self.edge:
            more = "higher" if self.edge == HIGHEST else "lower"
            return f"{at} the {self.edge} rate tried ({rate}); add {more} ones{refine}"
        return ""


class Transfer(NamedTuple):
    """The best rates of one setting over depth.

    exponent: of N in the best rate, None for one depth, or if a best rate lies at an edge.
    costs: depth -> the validation loss at the smallest depth's best rate minus the least loss, in
        nats; None where no such rate was tried, or where one of both best rates lies at an edge.
    predicted: the rate of the power law at another depth; None where there is no exponent.
    """

    best: list[BestRate]
    exponent: Interval | None
    costs: dict[int, Interval | None]
    predicted: Interval | None = None

    @property
    def advice(self) -> list[str]:
        """A sentence for each depth whose best rate lies at an edge of the rates tried."""
        return [best.advice for best in self.best if best.edge]


class Estimates(NamedTuple):
    """Best rate and cost at each depth, exponent and predicted rate, from means of some seeds."""

    rates: dict[int, float]
    costs: dict[int, float]
    exponent: float
    predicted: float


def transfer(
    losses: Losses, draws: int = DRAWS, at: int | None = None, refines: bool = True
) -> Transfer:
    """Return best rates, exponent and costs of one setting, with intervals over seeds.

    at: a depth whose best rate is predicted by the power law through the best rates.
    refines: see BestRate.

    The estimates come from the mean losses of the seeds that every depth and rate share, and of
    samples of these (`deepstack.runs.intervals`), equal at every depth: a seed has the same
    random numbers there.  A sample whose best rate lies at an edge counts with that rate.
    """
    depths = sorted(losses)
    seeds = shared_seeds(losses)

    def estimate(sample: Sequence[int]) -> Estimates:
        curves = {n: mean_curve(losses[n], sample) for n in depths}
        rates = {n: best_rate(curve) for n, curve in curves.items()}
        fit = power_law(depths, list(rates.values()))
        costs = {n: cost(curve, rates[depths[0]]) for n, curve in curves.items()}
        costs[depths[0]] = 0.0  # but for rounding
        if fit is None:
            return Estimates(rates, costs, math.nan, math.nan)
        there = math.exp(fit.intercept + fit.exponent * math.log(at or depths[0]))
        return Estimates(rates, costs, fit.exponent, there)

    samples = over_samples(estimate, seeds, draws)
    best = []
    for n in depths:
        curve = mean_curve(losses[n], seeds)
        edge = edge_of_curve(curve)
        rate = interval([sample.rates[n] for sample in samples], len(seeds), log=True)
        if edge:
            rate = UNKNOWN._replace(value=rate.value)
        best.append(BestRate(n, rate, float(curve[1].min()), edge, len(seeds), refines))
    costs: dict[int, Interval | None] = {}
    for one in best:
        extra = interval([sample.costs[one.depth] for sample in samples], len(seeds))
        known = math.isfinite(extra.value) and best[0].inside and one.inside
        low = 0.0 if extra.low < 0 else extra.low  # no cost lies below 0
        costs[one.depth] = extra._replace(low=low) if known else None
    exponent = interval([sample.exponent for sample in samples], len(seeds))
    if not (math.isfinite(exponent.value) and all(one.inside for one in best)):
        return Transfer(best, None, costs)
    predicted = interval([sample.predicted for sample in samples], len(seeds), log=True)
    return Transfer(best, exponent, costs, None if at is None else predicted)


def final_losses(runs: Sequence[Run]) -> Losses:
    """Return the final validation losses of the ended runs of one setting."""
    return losses_of(cells_of(map(result_of, runs)))


def losses_of(cells: Iterable[Cell]) -> Losses:
    """Return the final validation losses of the cells of one setting, without blind ones.

    Infinite where a run diverged.  A rate at which fewer seeds learn than at another one does not
    win by its mean (`deepstack.runs.best`): there the seeds that did not learn count as infinite.
    """
    losses = {}
    for cell in cells:
        if is_blind(cell):
            continue
        winning = min((failure_of(each.values()) for each in cell.tried.values()), default=NOTHING)
        losses[cell.depth] = {
            rate: losses_at(by_seed, winning) for rate, by_seed in cell.tried.items()
        }
    return losses


def is_blind(cell: Cell) -> bool:
    """Return whether no run of a cell learns at any rate: its best rate is one of noise."""
    outcomes = [one.outcome for by_seed in cell.tried.values() for one in by_seed.values()]
    return all(outcomes) and "trained" not in outcomes and {*outcomes} != {"diverged"}


def blind_note(label: str, runs: Sequence[Run]) -> str:
    """Return that depths of a setting are left out, because no rate learns there, or ''."""
    blind = [str(cell.depth) for cell in cells_of(map(result_of, runs)) if is_blind(cell)]
    return f"{label}, left out: N = {joined(blind)}, where no rate learns" if blind else ""


def losses_at(by_seed: Mapping[int, Result], winning: tuple[float, float]) -> dict[int, float]:
    """Return the final losses at a rate, infinite of seeds that fail where their mean would win.

    winning: `failure_of` the best rate.
    """
    share, mean = failure_of(by_seed.values())
    wrongly = share > winning[0] and mean < winning[1]
    return {
        seed: one.final_loss
        if math.isfinite(one.final_loss) and not (wrongly and one.outcome != "trained")
        else math.inf
        for seed, one in by_seed.items()
    }


def shared_seeds(losses: Losses) -> list[int]:
    """Return the seeds that were trained at every depth and rate."""
    seeds = [set(by_seed) for by_rate in losses.values() for by_seed in by_rate.values()]
    return sorted(set.intersection(*seeds)) if seeds else []


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


def edge_of_curve(curve: tuple[np.ndarray, np.ndarray]) -> str:
    """Return the `edge` of the rate with the least loss, see BestRate."""
    if vertex(curve) is not None:
        return ""
    rates = curve[0].tolist()
    between = DIVERGED if len(rates) > 1 else HIGHEST
    return edge_of(rates[int(curve[1].argmin())], rates) or between


def cost(curve: tuple[np.ndarray, np.ndarray], rate: float) -> float:
    """Return the loss at a rate minus the least loss, both of parabolas through three rates tried.

    At the best rate it is 0.  Infinite beside a diverged run; NaN outside of the rates tried, or
    where every rate diverged.
    """
    x, y = curve
    at = float(np.log(rate))
    if not x[0] - 1e-9 <= at <= x[-1] + 1e-9 or not np.isfinite(y.min()):
        return math.nan
    lowest = vertex(curve)
    least = float(y.min()) if lowest is None else lowest[1]
    return max(0.0, loss_at(curve, at) - least)


def loss_at(curve: tuple[np.ndarray, np.ndarray], at: float) -> float:
    """Return the loss at a logarithm of the rate: of a parabola through the three nearest rates.

    Without three finite losses there it is linear between the two rates beside it, and infinite
    beside a diverged run.
    """
    x, y = curve
    middle = min(max(int(np.abs(x - at).argmin()), 1), len(x) - 2)
    nearest = slice(middle - 1, middle + 2)
    if len(x) < 3 or not np.isfinite(y[nearest]).all():
        return float(np.interp(at, x, y))
    return float(np.polyval(np.polyfit(x[nearest] - at, y[nearest], 2), 0.0))


def transfers(runs: Runs, at: int | None = None) -> dict[str, Transfer]:
    """Return the transfer of every setting: the runs that differ in depth, rate and seed only.

    at: a depth whose best rate is predicted.

    Running and failed runs are left out.  Raises NothingMatchedError if no setting has finished
    runs of two learning rates or more with a common seed.
    """
    ended = ended_runs(runs)
    results = {}
    for series in ended.series(but=[LR]):
        losses = final_losses(series.runs)
        if any(len(by_rate) > 1 for by_rate in losses.values()) and shared_seeds(losses):
            results[series.label] = transfer(losses, at=at, refines=can_refine(series.runs))
    return require(results, "needs finished runs of two learning rates with a common seed")


def ended_runs(runs: Runs) -> Runs:
    """Return the runs that have ended.  Raises NothingMatchedError for none."""
    return runs.keep(lambda run: run.state in ENDED)


def can_refine(runs: Iterable[Run]) -> bool:
    """Return whether `--refine` can add rates to runs: not to the commands of a foreign trainer."""
    return not any(run.get("model.scheme_options.command") for run in runs)


def transfer_table(runs: Runs, at: int | None = None) -> tuple[list[dict[str, Any]], list[str]]:
    """Return a row for each setting and depth, and sentences on best rates at an edge.

    A row has the best rate, the exponent in N and the cost of the smallest depth's rate.

    at: a depth with another row for each setting, whose rate is the power law's.
    """
    results = transfers(runs, at)
    rows: list[dict[str, Any]] = [
        {"setting": label, "depth": best.depth}
        | best.rate.columns("best_lr", "lr_low", "lr_high")
        | {"inside": best.inside, "val_loss": best.loss}
        | (result.costs[best.depth] or UNKNOWN).columns("cost")
        | (result.exponent or UNKNOWN).columns("exponent")
        | {"seeds": best.seeds}
        for label, result in results.items()
        for best in result.best
    ]
    notes = [f"{label}, {advice}" for label, each in results.items() for advice in each.advice]
    blind = [blind_note(s.label, s.runs) for s in ended_runs(runs).series(but=[LR])]
    notes += filter(None, blind)
    if at is not None:
        rows = [row | {"predicted": False} for row in rows]
        rows += [
            {"setting": label, "depth": at}
            | result.predicted.columns("best_lr", "lr_low", "lr_high")
            | {"inside": None, "val_loss": None, **UNKNOWN.columns("cost")}
            | (result.exponent or UNKNOWN).columns("exponent")
            | {"seeds": result.best[0].seeds, "predicted": True}
            for label, result in results.items()
            if result.predicted is not None
        ]
        notes += [prediction_note(label, result, at) for label, result in results.items()]
    few = any(best.seeds < LEAST_SEEDS for result in results.values() for best in result.best)
    return rows, notes + [NO_INTERVAL] * few


def prediction_note(label: str, result: Transfer, at: int) -> str:
    """Return how the rate at a depth was predicted, or why it was not."""
    if result.predicted is None:
        why = "needs best rates inside of those tried at two depths or more"
        return f"{label}, N = {at}: no rate is predicted: it {why}"
    first, *_, last = (best.depth for best in result.best)
    law = f"of the power law through the best rates from N = {first} to {last}"
    return f"{label}, N = {at}: the rate {law}; its interval is of seeds, not of the law"


PUBLISHED_LAWS: dict[str, tuple[float, str]] = {
    "N^(−3/2)": (-1.5, "arXiv:2602.07494"),
    "N^(−1/2)": (-0.5, "arXiv:2310.02244"),
    "N^0": (0.0, "arXiv:2505.01618"),
}
"""Published powers of depth of the best learning rate, each under the paper's parameterisation."""
