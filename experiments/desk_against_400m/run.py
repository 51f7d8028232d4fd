"""Trains the nine designs: first all rates, then the reported seeds at each design's best rate.

    python experiments/desk_against_400m/run.py [--workers 1] [--out results]

Writes run folders to <out>/desk_against_400m_rates (seed 10, all rates), <out>/desk_against_400m
(seeds 0 to 4, the best of these rates) and <out>/desk_against_400m_tenth (seeds 0 and 1, a tenth of
it).  A repeated call skips finished runs.
"""

import sys
from pathlib import Path
from typing import Any

from pairs import DESIGNS, design_of

from deepstack import sweep
from deepstack.config import Study, load_study
from deepstack.records import Run

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent))
from rate_choice import choose_rates, read_options  # noqa: E402  (lies beside the experiments)

STUDY = load_study(HERE / "study.yaml")
RATES = (4e-3, 8e-3)
CHOOSING, REPORTED, TENTH = (10,), (0, 1, 2, 3, 4), (0, 1)


def train(rates: dict[str, float], seeds: tuple[int, ...], study: str, **options: Any) -> list[Run]:
    """Return the runs of these designs, each at its own rate."""
    (rows,) = STUDY.zips
    kept = [i for i, design in enumerate(DESIGNS) if design in rates]
    zipped = {key: [values[i] for i in kept] for key, values in rows.items()}
    zipped["train.lr"] = [rates[DESIGNS[i]] for i in kept]
    return sweep(Study(STUDY.base, {"seed": list(seeds)}, (zipped,)), study=study, **options)


def main() -> None:
    options = read_options(__doc__)
    bests = choose_rates(
        DESIGNS,
        RATES,
        lambda rates: train(rates, CHOOSING, "desk_against_400m_rates", **options),
        design_of,
    )
    for design, best in bests.items():
        print(f"{design}: {best.value_text}", flush=True)
    chosen = {design: best.value for design, best in bests.items()}
    for seed in REPORTED:  # seed by seed: whole seeds are left when the time is up
        train(chosen, (seed,), "desk_against_400m", **options)
    tenth = {design: float(f"{rate / 10:.3g}") for design, rate in chosen.items()}
    train(tenth, TENTH, "desk_against_400m_tenth", **options)


if __name__ == "__main__":
    main()
