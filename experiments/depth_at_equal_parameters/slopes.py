"""Writes the loss of every run, and prints slopes of the loss in ln N with 95 % intervals.

    python experiments/depth_at_equal_parameters/slopes.py [results]

With a folder it first writes runs.csv beside this file, from the two folders of runs in it.  Seeds
that do not have a finite loss in all nine cells are written and not used.
"""

import sys
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.stats import t as student

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent))
from run_tables import load_runs  # noqa: E402  (lies beside the experiments)

BASE = "pre_ln"


def slopes_of(table: pd.DataFrame) -> pd.DataFrame:
    """Return the slope of the loss in ln N by scheme (columns) and seed (rows), of whole seeds."""
    losses = table.pivot(index=["scheme", "depth"], columns="seed", values="val_loss")
    whole = losses.replace(np.inf, np.nan).dropna(axis="columns")
    slopes = {}
    for scheme, cells in whole.groupby(level="scheme"):
        depths = np.log(cells.index.get_level_values("depth").to_numpy(float))
        slopes[scheme] = np.polyfit(depths, cells.to_numpy(), 1)[0]
    return pd.DataFrame(slopes, index=whole.columns)


def words_of(values: pd.Series) -> str:
    """Return the mean of one value a seed, its 95 % and its 97.5 % interval (Student's t)."""
    ends = [
        student.interval(level, len(values) - 1, values.mean(), values.sem())
        for level in (0.95, 0.975)
    ]
    texts = [f"{low:+.4f} to {high:+.4f}" for low, high in ends]
    return f"{values.mean():+.4f} (95 %: {texts[0]}; 97.5 %: {texts[1]})"


def main() -> None:
    table = load_runs(HERE, ["scheme", "depth", "width"], ("_rates", ""))
    reported = table[table["kind"] == "reported"]
    slopes = slopes_of(reported)
    print(f"seeds {', '.join(map(str, slopes.index))}: nats a unit of ln N")
    for scheme in slopes:
        print(f"{scheme}: {words_of(slopes[scheme])}")
        if scheme != BASE:
            print(f"{scheme} minus {BASE}: {words_of(slopes[scheme] - slopes[BASE])}")
    used = reported[reported["seed"].isin(slopes.index)]
    cells = used.groupby(["scheme", "depth", "width", "lr"])["val_loss"]
    print(cells.agg(["mean", "std"]).round(4).to_string())


if __name__ == "__main__":
    main()
