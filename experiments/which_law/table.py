"""Compares the measured exponent of the best rate in depth with published laws.

    python experiments/which_law/table.py results/transfer_*_adamw_before

Reads studies of experiments/calibrated_transfer/run.py, prints a Markdown table and writes
which_law.csv beside this file.
"""

import sys
from pathlib import Path

import pandas as pd

from deepstack.runs import Runs
from deepstack.tools.transfer import transfer_table

LAWS = {"N^(-3/2)": -1.5, "N^(-1)": -1.0, "N^(-1/2)": -0.5, "N^0": 0.0}
OWN = {"depth_mup": "N^0", "complete_p": "N^0"}  # the laws of the schemes' own papers


def main() -> None:
    rows = []
    for folder in sys.argv[1:]:
        runs = Runs.below(folder)
        (measured, *more), _ = transfer_table(runs)
        scheme = str(runs[0].get("model.scheme"))
        low, high = measured["exponent_low"], measured["exponent_high"]
        rows.append(
            {
                "scheme": scheme,
                "own law": OWN.get(scheme, "-"),
                "exponent": round(measured["exponent"], 3),
                "low": round(low, 3),
                "high": round(high, 3),
            }
            | {law: "holds" if low <= power <= high else "fails" for law, power in LAWS.items()}
            | {"rates inside": all(row["inside"] for row in (measured, *more))}
            | {f"rate {row['depth']}": round(row["best_lr"], 5) for row in (measured, *more)}
            | {"seeds": measured["seeds"], "runs": len(runs)}
        )
    table = pd.DataFrame(rows)
    table.to_csv(Path(__file__).parent / "which_law.csv", index=False)
    print("| " + " | ".join(table.columns) + " |\n|" + "---|" * len(table.columns))
    for row in table.itertuples(index=False):
        print("| " + " | ".join(map(str, row)) + " |")


if __name__ == "__main__":
    main()
