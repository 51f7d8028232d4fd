"""The values of a run as trackers take them: scalars by step, settings."""

import math
from typing import Any

from deepstack.records import Run

Scalars = dict[str, float]


def scalars(run: Run) -> list[tuple[int, Scalars]]:
    """Return (step, {key: value}) of everything that a run has logged, in the order of steps.

    Keys are `steps/loss`, `evals/loss`, `timing/step_ms`, `attribution/q` and
    `layers/grad_norm/mean`, the columns of the run's files.  Values that do not exist are left out.
    """
    merged: dict[int, Scalars] = {}
    for table in run.log_names():
        rows = run.log(table).to_dict("records")
        for row in rows:
            step = int(row.pop("step"))
            values = {f"{table}/{name}": float(value) for name, value in row.items()}
            logged = {k: v for k, v in values.items() if table == "steps" or not math.isnan(v)}
            merged.setdefault(step, {}).update(logged)
    for step, values in layer_summaries(run):
        merged.setdefault(step, {}).update(values)
    return sorted(merged.items())


def layer_summaries(run: Run, after: int = -1) -> list[tuple[int, Scalars]]:
    """Return mean, least and largest value over layers of each diagnostic, for steps > `after`.

    Values that are not finite are left out of them.
    """
    import numpy as np

    merged: dict[int, Scalars] = {}
    for name in run.layer_names():
        for step, values in zip(*run.layers(name), strict=True):
            finite = values[np.isfinite(values)].astype(float)
            if step > after and len(finite):
                summary = {"mean": finite.mean(), "min": finite.min(), "max": finite.max()}
                merged.setdefault(int(step), {}).update(
                    {f"layers/{name}/{key}": float(value) for key, value in summary.items()}
                )
    return sorted(merged.items())


def logged_settings(run: Run) -> dict[str, Any]:
    """Return the config with dotted keys, with the state of the run and the sha256 of its data."""
    data = run.meta.get("data", {})
    facts = {"state": run.state, "data.name": data.get("name"), "data.sha256": data.get("sha256")}
    return {**run.flat_config, **{key: value for key, value in facts.items() if value is not None}}
