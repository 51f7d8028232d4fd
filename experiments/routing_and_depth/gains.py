"""Writes the loss of every run, and prints the gain of attention residuals over Pre-LN by depth.

    python experiments/routing_and_depth/gains.py [results]

With a folder it first writes runs.csv beside this file, from the two folders of runs in it.  Seeds
that do not have a finite loss in all six cells are written and not used.
"""

import sys
from pathlib import Path

import numpy as np
import pandas as pd

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent))
from run_tables import load_runs, text_of  # noqa: E402  (lies beside the experiments)

CELL = ["scheme", "depth"]


def gains_of(reported: pd.DataFrame) -> pd.DataFrame:
    """Return the loss of Pre-LN minus the loss of attention residuals: a row a depth, by seed."""
    losses = reported.pivot(index=CELL, columns="seed", values="val_loss")
    whole = losses.replace(np.inf, np.nan).dropna(axis="columns")
    return whole.loc["pre_ln"] - whole.loc["attn_res"]


def main() -> None:
    table = load_runs(HERE, CELL)
    reported = table[table["kind"] == "reported"]
    gains = gains_of(reported)
    for depth, by_seed in gains.iterrows():
        print(f"{depth} layers: {text_of(by_seed)}")
    slopes = np.polyfit(np.log(gains.index.to_numpy(float)), gains.to_numpy(), 1)[0]
    print(f"slope in ln N: {text_of(slopes)}")
    print(reported.groupby([*CELL, "lr"])["val_loss"].agg(["mean", "std", "count"]).round(4))


if __name__ == "__main__":
    main()
