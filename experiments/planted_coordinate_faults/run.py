"""Counts false alarms of `deepstack coordinates` in right models, and the faults that it names.

    python experiments/planted_coordinate_faults/run.py right --seeds 50
    python experiments/planted_coordinate_faults/run.py faults --seeds 10
    python experiments/planted_coordinate_faults/run.py held_out --seeds 10

Writes right.csv, a row for each model and set of five seeds, or faults.csv or held_out.csv, a row
for each fault; `held_out` are the faults that were written after the check.
Models are trained once for each seed; every check takes the values of its seeds.
"""

import argparse
import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pandas as pd
from faults import FAULTS, HELD_OUT, MODELS, RULES, SIZES, planted

import deepstack
from deepstack.tools.coordinates import CoordinateCheck, exponents

HERE = Path(__file__).parent
SET = 5  # seeds of a check
TABLES = {"faults": FAULTS, "held_out": HELD_OUT}


def checks(path: Path, model: str, seeds: int) -> Iterator[CoordinateCheck]:
    """Yield the check of each disjoint set of five seeds."""
    every = deepstack.coordinates(path, rule=RULES[model], seeds=seeds, **SIZES[model])
    for first in range(0, seeds - SET + 1, SET):
        chosen = list(range(first, first + SET))
        values = every.values[every.values["seed"].isin(chosen)]
        rows = exponents(values, every.modules, every.rule, every.tolerance)
        yield dataclasses.replace(every, rows=rows, values=values, seeds=chosen)


def right(models: list[str], seeds: int) -> None:
    """Write the verdict on each right model for each set of seeds."""
    rows = []
    for model in models:
        for check in checks(MODELS / f"{model}.py", model, seeds):
            first = check.first
            named = {"model": model, "rule": check.rule, "first_seed": check.seeds[0]}
            broken = "" if first is None else f"{first.module}: {first.found}"
            rows.append(named | check.counts | {"first": broken})
        found = [row["first"] == "" for row in rows if row["model"] == model]
        print(f"{model}: {sum(found)} of {len(found)} pass", flush=True)
        pd.DataFrame(rows).to_csv(HERE / "right.csv", index=False)


def faults(name: str, models: list[str], seeds: int) -> None:
    """Write for each fault how many sets of seeds find it, and how many name module and cause.

    name: faults or held_out, of the table in faults.py and of the file.
    """
    rows = []
    for fault in TABLES[name]:
        if fault.model not in models:
            continue
        began = time.process_time()
        with TemporaryDirectory() as folder:
            firsts = [one.first for one in checks(planted(fault, Path(folder)), fault.model, seeds)]
        seen = [one for one in firsts if one is not None]
        rows.append(
            {
                "model": fault.model,
                "rule": RULES[fault.model],
                "old": fault.old.strip(),
                "new": fault.new.strip(),
                "module": fault.module or "(the model's output)",
                "cause": fault.cause,
                "sets": len(firsts),
                "found": len(seen),
                "right_module": sum(one.module == fault.module for one in seen),
                "right_cause": sum(one.cause == fault.cause for one in seen),
                "exponent": seen[0].row.exponent if seen else None,
                "seconds_per_set": (time.process_time() - began) / len(firsts),
            }
        )
        print(rows[-1], flush=True)
        pd.DataFrame(rows).to_csv(HERE / f"{name}.csv", index=False)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["right", *TABLES])
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--models", default=",".join(RULES))
    given = parser.parse_args()
    chosen = given.models.split(",")
    right(chosen, given.seeds) if given.what == "right" else faults(given.what, chosen, given.seeds)
