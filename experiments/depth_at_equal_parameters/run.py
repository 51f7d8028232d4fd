"""Trains three schemes at equal parameters: first the rates, then the reported seeds at the best.

    python experiments/depth_at_equal_parameters/run.py [--workers 1] [--out results]

Writes run folders to <out>/depth_at_equal_parameters_rates (seed 10, all rates) and
<out>/depth_at_equal_parameters (seeds 0 to 4, the best rate of each cell).  A repeated call skips
finished runs.
"""

import sys
from pathlib import Path
from typing import Any

from deepstack import sweep
from deepstack.config import Study, load_study
from deepstack.records import Run

Cell = tuple[str, int]

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent))
from rate_choice import choose_rates, read_options  # noqa: E402  (lies beside the experiments)

STUDY = load_study(HERE / "study.yaml")
NAME = STUDY.base.name
RATES = (2e-3, 4e-3, 8e-3)
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


def main() -> None:
    options = read_options(__doc__)
    grid = STUDY.grid
    bests = choose_rates(
        [(s, n) for s in grid["model.scheme"] for n in grid["model.depth"]],
        RATES,
        lambda rates: train(rates, CHOOSING, f"{NAME}_rates", **options),
        cell_of,
    )
    for cell, best in bests.items():
        print(*cell, best.value_text, flush=True)
    chosen = {cell: best.value for cell, best in bests.items()}
    for seed in REPORTED:  # seed by seed: whole seeds are left when the time is up
        train(chosen, seed, NAME, **options)


if __name__ == "__main__":
    main()
