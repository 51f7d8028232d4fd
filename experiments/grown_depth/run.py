"""Trains a stack of 32 layers, and three that grow from 8 over 16 and 24 to 32 layers.

    python experiments/grown_depth/run.py [--workers 1] [--out results]

Writes run folders to <out>/grown_depth_rates (seed 10, all rates) and <out>/grown_depth (seeds 0 to
4, the best rate of each way).  Runs of 8, 16 and 24 layers go to <out>/grown_depth_8, _16 and _24.
A repeated call skips finished runs.
"""

import sys
from pathlib import Path
from typing import Any

from deepstack import sweep
from deepstack.config import Study, load_config
from deepstack.records import Run

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent))
from rate_choice import choose_rates, read_options  # noqa: E402  (lies beside the experiments)

BASE = load_config(HERE / "study.yaml")
NAME = BASE.name
NEVER = "not grown"
WAYS = (NEVER, "stack", "interleave", "middle")
STAGES, STEPS = (8, 16, 24, 32), 112
RATES = (2e-3, 4e-3, 8e-3)
CHOOSING, REPORTED = 10, (0, 1, 2, 3, 4)


def way_of(run: Run) -> str:
    """Return how the last stage of a run was grown."""
    return str(run.get("model.grow") or NEVER)


def grow(way: str, rate: float, seed: int, study: str, **options: Any) -> list[Run]:
    """Return the run of 32 layers that grew in a way, after the runs of fewer layers."""
    before: Run | None = None
    for depth in STAGES:
        last = depth == STAGES[-1]
        values: dict[str, Any] = {"model.depth": depth, "train.lr": rate, "seed": seed}
        values |= {"train.steps": STEPS, "train.schedule": "linear" if last else "constant"}
        if before is not None:
            values |= {"model.start": str(before.path), "model.grow": way}
        grid = {key: [value] for key, value in values.items()}
        (before,) = sweep(Study(BASE, grid), study=study if last else f"{NAME}_{depth}", **options)
    assert before is not None
    return [before]


def train(rates: dict[str, float], seed: int, study: str, **options: Any) -> list[Run]:
    """Return the runs of these ways with a seed, each at its own rate."""
    runs: list[Run] = []
    for way, rate in rates.items():
        if way == NEVER:
            grid = {"train.lr": [rate], "seed": [seed]}
            runs += sweep(Study(BASE, grid), study=study, **options)
        else:
            runs += grow(way, rate, seed, study, **options)
    return runs


def main() -> None:
    options = read_options(__doc__)
    bests = choose_rates(
        WAYS,
        RATES,
        lambda rates: train(rates, CHOOSING, f"{NAME}_rates", **options),
        way_of,
    )
    for way, best in bests.items():
        print(way, best.value_text, flush=True)
    chosen = {way: best.value for way, best in bests.items()}
    for seed in REPORTED:
        train(chosen, seed, NAME, **options)


if __name__ == "__main__":
    main()
