"""Trains depths and widths at equal FLOPs, each with the rate that another seed has chosen.

    python experiments/depth_or_width/run.py [--flops 5e10,1.5e10] [--depths 1,2,4,12]
        [--widths 32,64] [--seeds 0,1,2] [--workers 2] [--out results]

Writes ordinary run folders to <out>/depth_or_width_rates (seed 10, every rate) and
<out>/depth_or_width (the other seeds, at the best of these rates).  A repeated call skips finished
runs.
"""

import argparse
import math
from pathlib import Path
from typing import Any

from deepstack import sweep
from deepstack.config import Study, load_config
from deepstack.records import Run
from deepstack.runs import final_value, has_diverged

SCHEMES = ("post_ln", "pre_ln", "deepnorm", "complete_p")
RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
CHOOSING = 10  # the seed that chooses the rate
HERE = Path(__file__).parent


def loss_of(run: Run) -> float:
    """Return the final validation loss, infinite for a diverged run."""
    loss = math.inf if has_diverged(run) else final_value(run, "loss")
    return loss if math.isfinite(loss) else math.inf


def numbers(text: str) -> list[float]:
    """Return the numbers of a text such as 1,2,4."""
    return [float(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flops", type=numbers, default=[5e10, 1.5e10])
    parser.add_argument("--depths", type=numbers, default=[1, 2, 4, 12])
    parser.add_argument("--widths", type=numbers, default=[32, 64])
    parser.add_argument("--seeds", type=numbers, default=[0, 1, 2])
    parser.add_argument("--workers", type=int)
    parser.add_argument("--out", type=Path, default=Path("results"))
    args = parser.parse_args()
    base = load_config(HERE / "study.yaml")
    common: dict[str, Any] = {"out": args.out, "workers": args.workers}
    cell = {
        "model.scheme": list(SCHEMES),
        "model.depth": [int(depth) for depth in args.depths],
        "model.d_model": [int(width) for width in args.widths],
    }
    for flops in args.flops:
        tried = {**cell, "train.flops": [flops], "train.lr": list(RATES), "seed": [CHOOSING]}
        best: dict[tuple[Any, ...], Run] = {}
        for run in sweep(base, tried, study="depth_or_width_rates", **common):
            key = tuple(run.get(name) for name in cell)
            if key not in best or loss_of(run) < loss_of(best[key]):
                best[key] = run
        columns = zip(*best, strict=True)
        rows = {name: list(values) for name, values in zip(cell, columns, strict=True)}
        rows["train.lr"] = [run.get("train.lr") for run in best.values()]
        grid = {"train.flops": [flops], "seed": [int(seed) for seed in args.seeds]}
        sweep(Study(base, grid, (rows,)), study="depth_or_width", **common)


if __name__ == "__main__":
    main()
