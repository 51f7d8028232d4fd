"""Calibrates schemes and finds their best learning rate at each depth, before and after.

    python experiments/calibrated_transfer/run.py [--schemes deepnorm,pre_ln] [--optimizers adamw]
        [--depths 6,24,96] [--seeds 0,1,2,3,4] [--workers 2] [--out results]

Writes ordinary run folders below --out and the table calibrated_transfer.csv.  A repeated call
skips finished runs.
"""

import argparse
from pathlib import Path

import pandas as pd

from deepstack import calibrate
from deepstack.config import Config, Study, load_config, with_overrides
from deepstack.records import find_runs
from deepstack.runs import UNKNOWN
from deepstack.tools.refine import refine
from deepstack.tools.transfer import Losses, final_losses, transfer

SCHEMES = (
    "post_ln,pre_ln,deepnorm,deepnorm_rates,rezero,layer_scale,peri_ln,sub_ln,depth_mup,"
    "complete_p,res_post_norm,ngpt"
)
HERE = Path(__file__).parent


def search(config: Config, name: str, given: argparse.Namespace) -> Losses:
    """Find the best rate at each depth and return the losses of all runs of the search."""
    grid = {"model.depth": given.depths, "seed": given.seeds}
    refine(
        Study(config, grid),
        "train.lr",
        tolerance=2**0.5,
        max_runs=12 * len(given.depths) * len(given.seeds),
        name=name,
        out=given.out,
        workers=given.workers,
    )
    return final_losses(find_runs(given.out / name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schemes", default=SCHEMES)
    parser.add_argument("--optimizers", default="adamw")
    parser.add_argument("--depths", default="6,24,96")
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("results"))
    args = parser.parse_args()
    args.depths = [int(depth) for depth in args.depths.split(",")]
    args.seeds = [int(seed) for seed in args.seeds.split(",")]
    base = load_config(HERE / "study.yaml")
    rows = []
    for optimizer in args.optimizers.split(","):
        for scheme in args.schemes.split(","):
            config = with_overrides(base, {"model.scheme": scheme, "train.optimizer": optimizer})
            name = f"{scheme}_{optimizer}"
            measured = calibrate(
                config,
                depths=args.depths,
                seeds=args.seeds,
                study=f"calibration_{name}",
                out=args.out,
                workers=args.workers,
            )
            for state, tuned, table in (
                ("before", config, measured.rows),
                ("after", measured.corrected, measured.rows_after),
            ):
                result = transfer(search(tuned, f"transfer_{name}_{state}", args))
                exponent, cost = result.exponent, result.costs[max(args.depths)]
                by_step = {row.step: row.exponent for row in table if row.role == "together"}
                rows.append(
                    {"scheme": scheme, "optimizer": optimizer, "state": state}
                    | {"update_exponent": by_step[10]}
                    | (exponent or UNKNOWN).columns("rate_exponent", "rate_low", "rate_high")
                    | (cost or UNKNOWN).columns("cost")
                    | {"seeds": min(best.seeds for best in result.best)}
                    | {"inside": all(best.inside for best in result.best)}
                    | {f"rate_{best.depth}": best.rate.value for best in result.best}
                    | {f"loss_{best.depth}": best.loss for best in result.best}
                )
                print(rows[-1], flush=True)
                pd.DataFrame(rows).to_csv(args.out / "calibrated_transfer.csv", index=False)


if __name__ == "__main__":
    main()
