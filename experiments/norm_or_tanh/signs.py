"""Writes the losses of every run, and prints the difference of dynamic tanh from LayerNorm.

    python experiments/norm_or_tanh/signs.py [results]

With a folder it first writes runs.csv beside this file, from the folders of runs in it.
"""

import sys
from pathlib import Path

import pandas as pd

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent))
from run_tables import load_runs, text_of  # noqa: E402  (lies beside the experiments)

CELL = ["norm", "held_out"]
LOSSES = {"val_loss": "final", "least_loss": "least"}


def differences_of(reported: pd.DataFrame, loss: str, held_out: float) -> list[float]:
    """Return dynamic tanh's loss minus LayerNorm's in percent of LayerNorm's, a value a seed."""
    rows = reported[reported["held_out"] == held_out]
    by_seed = rows.pivot(index="seed", columns="norm", values=loss)
    ratios = by_seed["dynamic_tanh"] / by_seed["layer"]
    return (100 * (ratios - 1)).tolist()


def main() -> None:
    table = load_runs(HERE, CELL)
    reported = table[table["kind"] == "reported"]
    for held_out in sorted(reported["held_out"].unique(), reverse=True):
        for loss, word in LOSSES.items():
            text = text_of(differences_of(reported, loss, held_out), 1)
            print(f"{100 * (1 - held_out):.0f} % of the text, {word} loss: {text} %")
    cells = reported.groupby([*CELL, "lr"])[list(LOSSES)]
    print(cells.agg(["mean", "std", "count"]).round(4).to_string())


if __name__ == "__main__":
    main()
