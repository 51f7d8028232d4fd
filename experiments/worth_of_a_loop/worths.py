"""Writes the loss of every run, and prints what a loop is worth.

    python experiments/worth_of_a_loop/worths.py [results]

With a folder it first writes runs.csv beside this file, from the two folders of runs in it.  It
prints φ for seeds 0 to 2, which the rule decides by, and for all seeds; and the loss of one layer
that is run eight times minus the loss of eight layers, paired by seed (Student's t).
"""

import sys
from pathlib import Path

import pandas as pd

from deepstack.tools.laws import Size, fit_loops

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent))
from run_tables import load_runs, text_of  # noqa: E402  (lies beside the experiments)

LAYERS, AROUND = 8, 2  # run between prelude and coda; prelude and coda
RULED = (0, 1, 2)
CELL = ["scheme", "width", "unique"]


def size_of(width: int, unique: int) -> Size:
    """Return the size of a stack: 12 d² parameters a layer, eight layers, prelude and coda."""
    layer = 12.0 * width**2
    return Size(AROUND * layer, unique * layer, LAYERS // unique, 0)


def phi_text(table: pd.DataFrame) -> str:
    """Return φ of one scheme with its interval and the residual of the law."""
    losses = {
        size_of(*cell): dict(zip(rows["seed"], rows["val_loss"], strict=True))
        for cell, rows in table.groupby(["width", "unique"])
    }
    law = fit_loops(losses)
    return (
        f"φ = {law.phi.value:.2f} ({law.phi.low:.2f} to {law.phi.high:.2f}), {law.seeds} seeds, "
        f"residual {law.residual:.3f} nats"
    )


def price(table: pd.DataFrame, width: int) -> str:
    """Return the loss of one layer run eight times minus the loss of eight layers."""
    by_seed = table[table["width"] == width].pivot(
        index="seed", columns="unique", values="val_loss"
    )
    return f"width {width}: {text_of(by_seed[1] - by_seed[LAYERS])}"


def main() -> None:
    table = load_runs(HERE, CELL)
    reported = table[table["kind"] == "reported"]
    for scheme, rows in reported.groupby("scheme"):
        for seeds in (RULED, sorted(rows["seed"].unique())):
            chosen = rows[rows["seed"].isin(seeds)]
            prices = [price(chosen, width) for width in sorted(rows["width"].unique())]
            print(f"{scheme}: {phi_text(chosen)}; eight runs of one layer cost, in nats:")
            print("  " + "; ".join(prices))
    cells = reported.groupby([*CELL, "lr"])["val_loss"]
    print(cells.agg(["mean", "std", "count"]).round(4).to_string())


if __name__ == "__main__":
    main()
