"""Write a CSV with a row a run, and print means over seeds.

python experiments/effective_depth/summarize.py results/effective_depth effective_depth.csv
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from deepstack.records import Run, find_runs
from deepstack.runs import outcome, result_of

HERE = Path(__file__).parent


def row_of(run: Run) -> dict[str, Any]:
    """Return settings and numbers of a run; above 24 layers effects are of every 4th or 16th."""
    lens, effects, linear = (run.analysis(name) for name in ("lens", "effects", "linear"))
    removed = effects.arrays["removed"]
    step = 4 if run.get("model.depth") > 24 and removed[1] == removed[0] + 1 else 1
    loss = effects.scalars["loss"]
    rise = effects.arrays["loss_without"][::step] - loss
    replaced = linear.arrays["loss_linear"][::step]
    return {
        "scheme": run.get("model.scheme"),
        "depth": run.get("model.depth"),
        "seed": run.get("seed"),
        "outcome": outcome(run),
        "margin": result_of(run).margin,
        "effective_depth": lens.scalars["effective_depth"],
        "effective_depth_ratio": lens.scalars["effective_depth_ratio"],
        "median_rise": np.median(rise),
        "largest_rise": np.max(rise),
        "largest_rise_layer": int(effects.arrays["removed"][::step][np.argmax(rise)]),
        "causal_score": np.nanmean(effects.arrays["effect_mean"][::step]),
        "usefulness": np.mean(replaced > 1.1 * loss),
    }


def main() -> None:
    table = pd.DataFrame([row_of(run) for run in find_runs(sys.argv[1])])
    table = table.sort_values(["scheme", "depth", "seed"])
    table.to_csv(HERE / sys.argv[2], index=False, float_format="%.4g")
    groups = table.drop(columns=["outcome", "seed"]).groupby(["scheme", "depth"])
    means, spread = groups.mean(), groups.std()
    with pd.option_context("display.width", 200, "display.max_columns", 20):
        print(means.round(3), spread.round(3), sep="\n")


if __name__ == "__main__":
    main()
