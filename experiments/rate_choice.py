"""Chooses the best learning rate of each cell of a study; a script of an experiment imports it."""

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from deepstack.records import Run
from deepstack.runs import HIGHEST, LOWEST, Best, bests_of, result_of

Cell = TypeVar("Cell")

LEAST, MOST = 5e-4, 3.2e-2  # of the rates that a best rate at the edge adds


def next_rate(best: Best) -> float | None:
    """Return the rate to try beyond the edge at which the best one lies, or None."""
    beyond = {LOWEST: best.value / 2, HIGHEST: best.value * 2}.get(best.edge)
    if beyond is None or not LEAST * 0.99 < beyond < MOST * 1.01:
        return None
    return float(f"{beyond:.3g}")


def choose_rates(
    cells: Iterable[Cell],
    rates: Iterable[float],
    train: Callable[[dict[Cell, float]], list[Run]],
    cell_of: Callable[[Run], Cell],
) -> dict[Cell, Best]:
    """Train each cell at all rates and at those beyond its edges; return the best of each.

    train: returns the runs of these cells, each at its own rate.
    """
    cells = list(cells)
    runs: list[Run] = []
    for rate in rates:
        runs += train(dict.fromkeys(cells, rate))
    while True:
        results = [result_of(run, str(cell_of(run))) for run in runs]
        bests = {cell_of(best.runs[0]): best for best in bests_of(results)}
        more = {cell: rate for cell, best in bests.items() if (rate := next_rate(best)) is not None}
        if not more:
            return bests
        runs += train(more)


def read_options(description: str | None) -> dict[str, Any]:
    """Return the options of `sweep` from the command line: --workers and --out."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--out", type=Path, default=Path("results"))
    args = parser.parse_args()
    return {"out": args.out, "workers": args.workers}
