"""Writes the loss of every run, and prints paired differences with 95 % intervals (Student's t).

    python experiments/depth_or_width/pairs.py [results/depth_or_width]

With a folder of runs it first writes runs.csv beside this file.
"""

import sys
from pathlib import Path

import pandas as pd

from deepstack.records import Run, find_runs
from deepstack.runs import final_value, mean_of

RUNS = Path(__file__).parent / "runs.csv"
CELL = ["gflops", "scheme", "width", "depth"]


def row_of(run: Run) -> dict[str, object]:
    """Return cell, rate, seed and final validation loss of a run."""
    flops = float(run.meta["flops"]["step"]) * int(run.get("train.steps"))
    return {
        "gflops": 15 if flops < 3e10 else 50,
        "scheme": run.get("model.scheme"),
        "width": run.get("model.d_model"),
        "depth": run.get("model.depth"),
        "lr": run.get("train.lr"),
        "seed": run.get("seed"),
        "val_loss": round(final_value(run, "loss"), 6),
    }


def show(name: str, more: pd.Series, less: pd.Series) -> bool:
    """Print the mean difference by seed with its interval; return whether it lies above 0."""
    gap = mean_of((more - less).tolist())
    print(f"{name}: {gap.value:+.2f} ({gap.low:.2f} to {gap.high:.2f})")
    return gap.low > 0


def main() -> None:
    if len(sys.argv) > 1:
        table = pd.DataFrame([row_of(run) for run in find_runs(sys.argv[1])])
        table.sort_values([*CELL, "seed"]).to_csv(RUNS, index=False)
    table = pd.read_csv(RUNS)
    losses = table.pivot_table(index=CELL, columns="seed", values="val_loss")
    above: dict[str, list[bool]] = {}
    for gflops, scheme, width, depth in losses.index:
        cell = losses.loc[(gflops, scheme, width, depth)]
        at = f"{gflops} GFLOPs, {scheme}, width {width}"
        if depth > 1:
            name, other = f"depth {depth} against 1", losses.loc[(gflops, scheme, width, 1)]
            above.setdefault(name, []).append(show(f"{at}, {name}", cell, other))
        if depth in (4, 12) and scheme != "pre_ln":
            other = losses.loc[(gflops, "pre_ln", width, depth)]
            show(f"{at}, depth {depth}, against Pre-LN", cell, other)
        if width == 64:
            other = losses.loc[(gflops, scheme, 32, depth)]
            name, where = "width 64 against 32", f"{gflops} GFLOPs, {scheme}, depth {depth}"
            above.setdefault(name, []).append(show(f"{where}, {name}", cell, other))
    for name, known in above.items():
        print(f"{name}: {sum(known)} of {len(known)} intervals lie above 0")


if __name__ == "__main__":
    main()
