"""Trains the nine designs: first all rates, then the reported seeds at each design's best rate.

    python experiments/desk_against_400m/run.py [--workers 1] [--out results]

Writes run folders to <out>/desk_against_400m_rates (seed 10, all rates), <out>/desk_against_400m
(seeds 0 to 4, the best of these rates) and <out>/desk_against_400m_tenth (seeds 0 and 1, a tenth of
it).  A repeated call skips finished runs.
"""

import argparse
from pathlib import Path
from typing import Any

from pairs import DESIGNS, design_of

from deepstack import sweep
from deepstack.config import Study, load_study
from deepstack.records import Run
from deepstack.runs import HIGHEST, LOWEST, Best, Runs

HERE = Path(__file__).parent
STUDY = load_study(HERE / "study.yaml")
RATES = (4e-3, 8e-3)
LEAST, MOST = 5e-4, 3.2e-2  # of the rates that a best rate at the edge adds
CHOOSING, REPORTED, TENTH = (10,), (0, 1, 2, 3, 4), (0, 1)


def train(rates: dict[str, float], seeds: tuple[int, ...], study: str, **options: Any) -> list[Run]:
    """Return the runs of these designs, each at its own rate."""
    (rows,) = STUDY.zips
    kept = [i for i, design in enumerate(DESIGNS) if design in rates]
    zipped = {key: [values[i] for i in kept] for key, values in rows.items()}
    zipped["train.lr"] = [rates[DESIGNS[i]] for i in kept]
    return sweep(Study(STUDY.base, {"seed": list(seeds)}, (zipped,)), study=study, **options)


def next_rate(best: Best) -> float | None:
    """Return the rate to try beyond the edge at which the best one lies, or None."""
    beyond = {LOWEST: best.value / 2, HIGHEST: best.value * 2}.get(best.edge)
    if beyond is None or not LEAST * 0.99 < beyond < MOST * 1.01:
        return None
    return float(f"{beyond:.3g}")


def choose_rates(**options: Any) -> dict[str, float]:
    """Return the best rate of each design on the choosing seeds; add rates beyond the edges."""
    runs: list[Run] = []
    for rate in RATES:
        runs += train(dict.fromkeys(DESIGNS, rate), CHOOSING, "desk_against_400m_rates", **options)
    while True:
        bests = {design_of(best.runs[0]): best for best in Runs(runs).bests()}
        more = {d: rate for d, best in bests.items() if (rate := next_rate(best)) is not None}
        if not more:
            break
        runs += train(more, CHOOSING, "desk_against_400m_rates", **options)
    for design, best in bests.items():
        print(f"{design}: {best.value_text}", flush=True)
    return {design: best.value for design, best in bests.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--out", type=Path, default=Path("results"))
    args = parser.parse_args()
    options: dict[str, Any] = {"out": args.out, "workers": args.workers}
    best = choose_rates(**options)
    for seed in REPORTED:  # seed by seed: whole seeds are left when the time is up
        train(best, (seed,), "desk_against_400m", **options)
    tenth = {design: float(f"{rate / 10:.3g}") for design, rate in best.items()}
    train(tenth, TENTH, "desk_against_400m_tenth", **options)


if __name__ == "__main__":
    main()
