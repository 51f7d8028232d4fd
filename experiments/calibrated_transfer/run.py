"""Calibrates schemes and finds their best learning rate at each depth, before and after.

    python experiments/calibrated_transfer/run.py [--schemes deepnorm,pre_ln] [--optimizers adamw]
        [--depths 6,24,96] [--seeds 5] [--workers 2] [--out results]

Writes ordinary run folders below --out and the table calibrated_transfer.csv.  A repeated call
skips finished runs.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import pandas as pd

from deepstack.analysis.statistics import final_value, has_diverged
from deepstack.analysis.transfer import Losses, transfer
from deepstack.config import Config, Study, load_config, with_overrides
from deepstack.records import Run, find_runs
from deepstack.sweeps import calibrate
from deepstack.sweeps.refine import refine

SCHEMES = (
    "post_ln,pre_ln,deepnorm,deepnorm_rates,rezero,layer_scale,peri_ln,sub_ln,depth_mup,"
    "complete_p,res_post_norm,ngpt"
)
HERE = Path(__file__).parent


def losses_of(runs: list[Run]) -> Losses:
    """Return depth -> learning rate -> seed -> final loss, infinite for a diverged run."""
    table: dict[int, dict[float, dict[int, float]]] = {}
    for run in runs:
        value = math.inf if has_diverged(run) else final_value(run, "loss_masked")
        by_seed = table.setdefault(run.get("model.depth"), {}).setdefault(run.get("train.lr"), {})
        by_seed[run.get("seed")] = value if math.isfinite(value) else math.inf
    return table


def search(config: Config, name: str, given: argparse.Namespace) -> Losses:
    """Find the best rate at each depth and return the losses of all runs of the search."""
    grid = {"model.depth": given.depths, "seed": list(range(given.seeds))}
    refine(
        Study(config, grid),
        "train.lr",
        tolerance=2**0.5,
        max_runs=12 * len(given.depths) * given.seeds,
        name=name,
        out=given.out,
        workers=given.workers,
    )
    return losses_of(find_runs(given.out / name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schemes", default=SCHEMES)
    parser.add_argument("--optimizers", default="adamw")
    parser.add_argument("--depths", default="6,24,96")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("results"))
    args = parser.parse_args()
    args.depths = [int(depth) for depth in args.depths.split(",")]
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
            exponents = {
                state: next(r.exponent for r in table if (r.role, r.step) == ("together", 10))
                for state, table in {"before": measured.rows, "after": measured.rows_after}.items()
            }
            for state, tuned in {"before": config, "after": measured.corrected}.items():
                result = transfer(search(tuned, f"transfer_{name}_{state}", args))
                deepest = max(args.depths)
                exponent, cost = result.exponent, result.costs[deepest]
                rows.append(
                    {
                        "scheme": scheme,
                        "optimizer": optimizer,
                        "state": state,
                        "update_exponent": exponents[state],
                        "rate_exponent": None if exponent is None else exponent.value,
                        "rate_low": None if exponent is None else exponent.low,
                        "rate_high": None if exponent is None else exponent.high,
                        "cost": None if cost is None else cost.value,
                        "cost_low": None if cost is None else cost.low,
                        "cost_high": None if cost is None else cost.high,
                        "seeds": min(best.seeds for best in result.best),
                        "inside": all(best.inside for best in result.best),
                    }
                    | {f"rate_{best.depth}": best.rate.value for best in result.best}
                    | {f"loss_{best.depth}": best.loss for best in result.best}
                )
                print(rows[-1], flush=True)
                pd.DataFrame(rows).to_csv(args.out / "calibrated_transfer.csv", index=False)


if __name__ == "__main__":
    main()
