"""Writes a row for each run, and prints how much a grown stack uses its depth.

    python experiments/grown_depth/uses.py [results]

With a folder it first writes runs.csv beside this file, from the runs in it, whose effects and lens
`deepstack analyze` has measured.
"""

import sys
from pathlib import Path

import pandas as pd
from scipy.stats import t as student

from deepstack.records import find_runs

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent))
from run_tables import row_of, text_of  # noqa: E402  (lies beside the experiments)

RUNS = HERE / "runs.csv"
NAME = HERE.name
NEVER = "not grown"
WAYS = ("stack", "interleave", "middle")
HALF = 16  # layers
QUANTITIES = ("rise_late", "rise_early", "effective_depth", "val_loss")


def collect(results: Path) -> pd.DataFrame:
    """Return settings, loss, and the mean rise without a layer of either half, of all runs."""
    rows = []
    for kind, folder in {"rates": f"{NAME}_rates", "reported": NAME}.items():
        for run in find_runs(results / folder):
            row = {"kind": kind} | row_of(run, ["grow", "lr", "seed"])
            row["grow"] = row["grow"] or NEVER
            if kind == "reported":
                effects, lens = run.analysis("effects"), run.analysis("lens")
                rise = effects.arrays["loss_without"] - effects.scalars["loss"]
                row["rise_early"], row["rise_late"] = rise[:HALF].mean(), rise[HALF:].mean()
                row["effective_depth"] = lens.scalars["effective_depth"]
            rows.append(row)
    return pd.DataFrame(rows).sort_values(["kind", "grow", "lr", "seed"])


def wide_text(values: list[float]) -> str:
    """Return the interval that three comparisons together hold with 95 %."""
    series = pd.Series(values)
    low, high = student.interval(1 - 0.05 / 3, len(series) - 1, series.mean(), series.sem())
    return f"98.3 %: {low:+.4f} to {high:+.4f}"


def main() -> None:
    if len(sys.argv) > 1:
        collect(Path(sys.argv[1])).to_csv(RUNS, index=False, float_format="%.6g")
    table = pd.read_csv(RUNS)
    reported = table[table["kind"] == "reported"]
    for quantity in QUANTITIES:
        by_seed = reported.pivot(index="seed", columns="grow", values=quantity)
        for way in WAYS:
            gaps = (by_seed[way] - by_seed[NEVER]).tolist()
            print(f"{quantity}, {way} minus {NEVER}: {text_of(gaps, 4)}; {wide_text(gaps)}")
    print(reported.groupby(["grow", "lr"])[list(QUANTITIES)].agg(["mean", "std"]).round(4).T)


if __name__ == "__main__":
    main()
