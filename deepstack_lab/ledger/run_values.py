"""Values of the runs of a study by seed."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepstack.records import Run
from deepstack.runs import Runs, has_diverged, vertex
from deepstack_lab.ledger.claim import UnmeasuredError
from deepstack_lab.ledger.draws import F64

DEPTH, SEED = "model.depth", "seed"


def along(
    runs: Runs, value: Callable[[Run], float], key: str = DEPTH, **where: Any
) -> tuple[list[float], Tensor]:
    """Return the values of a setting, rising, and the number of every run, (seeds, values).

    where: scheme, depth and other settings of the runs: the last word of a key and its value.
    """
    names = {name.rsplit(".", 1)[-1]: name for name in runs[0].flat_config}
    chosen = [r for r in runs if all(r.get(names[word]) == one for word, one in where.items())]
    table: dict[Any, dict[int, float]] = {}
    for run in chosen:
        table.setdefault(run.get(key), {})[run.get(SEED)] = value(run)
    points = sorted(table)
    seeds = sorted(table[points[0]])
    numbers = [[table[point][seed] for point in points] for seed in seeds]
    return [float(point) for point in points], torch.tensor(numbers, dtype=F64)


def by_seed(runs: Runs, value: Callable[[Run], float], **where: Any) -> Tensor:
    """Return the number of the one run of each seed that has these settings, (seeds,)."""
    return along(runs, value, **where)[1].flatten()


def share_learnt(run: Run) -> float:
    """Return the share of the nats below the unigram that context can give; 0 if it diverged."""
    if has_diverged(run):
        return 0.0
    last = run.evals.iloc[-1]
    loss = float(last["loss_masked"])
    share = (last["unigram_loss"] - loss) / (last["unigram_loss"] - last["optimal_loss"])
    return float(share) if math.isfinite(share) else 0.0


def layers(run: Run, diagnostic: str, record: int = -1) -> np.ndarray:
    """Return the values of a diagnostic by layer in the first (0) or last (-1) snapshot."""
    _, values = run.layers(diagnostic)
    return np.asarray(values[record], dtype=float)


def best_rate(rates: list[float], losses: Tensor) -> float:
    """Return the rate of the lowest loss, by a parabola in ln rate through it and its neighbours.

    Infinite or missing losses count as above all others.  Returns the rate of the grid if a
    neighbour's loss is one of these.  Raises UnmeasuredError at an end of the grid, because the
    best rate may lie beyond.
    """
    values = torch.nan_to_num(losses, nan=math.inf, posinf=math.inf)
    at = int(values.argmin())
    if not 0 < at < len(rates) - 1:
        raise UnmeasuredError(f"the best of the rates is {rates[at]:g}, at an end of the grid")
    lowest = vertex((np.log(rates), values.numpy()))
    return rates[at] if lowest is None else math.exp(lowest[0])
