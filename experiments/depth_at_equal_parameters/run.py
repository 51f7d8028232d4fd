"""Trains three schemes at equal parameters: first the rates, then the reported seeds at the best.

    python experiments/depth_at_equal_parameters/run.py [--workers 1] [--out results]

Writes run folders to <out>/depth_at_equal_parameters_rates (seed 10, all rates) and
<out>/depth_at_equal_parameters (seeds 0 to 4, the best rate of each cell).  A repeated call skips
finished runs.
"""

import argparse
from pathlib import Path
from typing import Any

from deepstack import sweep
from deepstack.config import Study, load_study
from deepstack.records import Run
from deepstack.runs import HIGHEST, LOWEST, Best, Runs

Cell = tuple[str, int]

HERE = Path(__file__).parent
STUDY = load_study(HERE / "study.yaml")
NAME = STUDY.base.name
RATES = (2e-3, 4e-3, 8e-3)
LEAST, MOST = 5e-4, 3.2e-2  # of the rates that a best rate at the edge adds
CHOOSING, REPORTED = 10, (0, 1, 2, 3, 4)


def cell_of(run: Run) -> Cell:
    """Return scheme and depth of a run."""
    return str(run.get("model.scheme")), int(run.get("model.depth"))


def train(rates: dict[Cell, float], seed: int, study: str, **options: Any) -> list[Run]:
    """Return the runs of these cells with a seed, each at its own rate."""
    schemes, depths = zip(*rates, strict=True)
    rows = {"model.scheme": list(schemes), "model.depth": list(depths)}
    rows["train.lr"] = list(rates.values())
    grid = {"model.parameters": STUDY.grid["model.parameters"], "seed": [seed]}
    return sweep(Study(STUDY.base, grid, (rows,)), study=study, **options)


def next_rate(best: Best) -> float | None:
    """Return the rate to try beyond the edge at which the best one lies, or None."""
    beyond = {LOWEST: best.value / 2, HIGHEST: best.value * 2}.get(best.edge)
    if beyond is None or not LEAST * 0.99 < beyond < MOST * 1.01:
        return None
    return float(f"{beyond:.3g}")


def choose_rates(**options: Any) -> dict[Cell, float]:
    """Return the best rate of each cell on the choosing seed; add rates beyond the edges."""
    grid = STUDY.grid
    cells = [(s, n) for s in grid["model.scheme"] for n in grid["model.depth"]]
    runs: list[Run] = []
    for rate in RATES:
        runs += train(dict.fromkeys(cells, rate), CHOOSING, f"{NAME}_rates", **options)
    while True:
        bests = {cell_of(best.runs[0]): best for best in Runs(runs).bests()}
        more = {cell: rate for cell, best in bests.items() if (rate := next_rate(best)) is not None}
        if not more:
            break
        runs += train(more, CHOOSING, f"{NAME}_rates", **options)
    for cell, best in bests.items():
        print(*cell, best.value_text, flush=True)
    return {cell: best.value for cell, best in bests.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--out", type=Path, default=Path("results"))
    args = parser.parse_args()
    options: dict[str, Any] = {"out": args.out, "workers": args.workers}
    best = choose_rates(**options)
    for seed in REPORTED:  # seed by seed: whole seeds are left when the time is up
        train(best, seed, NAME, **options)


if __name__ == "__main__":
    main()
