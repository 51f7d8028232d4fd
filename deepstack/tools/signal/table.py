"""Signals of a stack before training: values of every layer, and their growth rates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from deepstack.records import Run
from deepstack.runs import SCHEME, SEED, Runs, depth_of, finite_or_none, growth, mean_of, require

if TYPE_CHECKING:
    import pandas as pd

# column of the tables -> diagnostic
SIGNALS = {
    "variance": "stream_variance",
    "token_distance": "token_distance",
    "stream_grad": "stream_grad",
    "grad_norm": "grad_norm",
    "jacobian": "jacobian",
    "jacobian_error": "jacobian_error",
    "attention_entropy": "attention_entropy_attention",
    "rank_collapse": "rank_collapse",
    "attention_gain": "effective_gain_attention",
}
# growth rates: column -> signal, and whether it grows from a layer to the one after or before it
RATES = {
    "variance_growth": ("variance", 1),
    "angle_exponent": ("token_distance", 1),
    "gradient_exponent": ("stream_grad", -1),
    "parameter_gradient_exponent": ("grad_norm", -1),
    "jacobian_exponent": ("jacobian", -1),
}

INTERVALS = ("angle_exponent", "gradient_exponent", "jacobian_ratio")
RATIOS = ("jacobian_ratio",)  # never below 0


def signal_layers(runs: Runs) -> pd.DataFrame:
    """Return a row per run and layer at step 0: setting, depth, side, seed, layer, and SIGNALS.

    side: encoder or decoder; layer: its number in its stack, from 1.  A signal that a run lacks is
    NaN.  Raises NothingMatchedError if no run has a snapshot of step 0.
    """
    import pandas as pd

    tables = []
    for series in runs.series():
        for run in series.runs:
            values = {column: at_start(run, name) for column, name in SIGNALS.items()}
            if values["variance"] is None:
                continue
            total = len(values["variance"])
            stacks = run.columns.get("stacks") or {"encoder": total}
            layers = [(side, layer + 1) for side, depth in stacks.items() for layer in range(depth)]
            labels = {"setting": series.label, "scheme": run.get(SCHEME), "depth": depth_of(run)}
            signals = {name: np.nan if at is None else at for name, at in values.items()}
            table = pd.DataFrame(layers, columns=["side", "layer"])
            tables.append(table.assign(seed=run.get(SEED), **labels, **signals))
    require(tables, "no run has stream_variance at step 0; see deepstack signal")
    first = ["setting", "scheme", "depth", "side", "seed", "layer"]
    return pd.concat(tables, ignore_index=True)[[*first, *SIGNALS]]


def at_start(run: Run, diagnostic: str) -> np.ndarray | None:
    """Return a diagnostic of every layer in the snapshot of step 0, or None."""
    if diagnostic not in run.layer_names():
        return None
    steps, values = run.layers(diagnostic)
    return values[0].astype(float) if len(steps) else None


def seed_rows(layers: pd.DataFrame) -> pd.DataFrame:
    """Return a row per setting, depth, side and seed: the first and last layer, and RATES.

    layers: from `signal_layers`.  A rate is the least-squares slope of ln of the signal on the
        layer: per layer away from the input, or toward it for gradients (`gradient_exponent` and
        the two after it), so that a positive one is a growth in the direction in which the signal
        goes. `jacobian_ratio`: ‖∂F/∂x_1‖² over ‖∂F/∂x_N‖².  `angle_exponent_predicted`: mean over
        layers of −ln(1 + (v w/α)²), which attention causes in LN(α x + G(x)) if tokens are nearly
        equal; NaN for other schemes.
    """
    import pandas as pd

    rows = []
    keys = ["setting", "scheme", "depth", "side", "seed"]
    for labels, table in layers.groupby(keys, sort=False):
        first, last = table.iloc[0], table.iloc[-1]
        row: dict[str, Any] = dict(zip(keys, labels, strict=True))
        row |= {"variance_first": first["variance"], "variance_last": last["variance"]}
        row |= {"cosine_first": 1 - first["token_distance"]}
        row |= {"cosine_last": 1 - last["token_distance"]}
        for name, (signal, direction) in RATES.items():
            values = table[signal].to_numpy(float)
            row[name] = direction * float(growth(values[None])[0])
        row["angle_exponent_predicted"] = -np.log1p(table["attention_gain"] ** 2).mean()
        row["jacobian_ratio"] = first["jacobian"] / last["jacobian"]
        row["attention_entropy"] = table["attention_entropy"].mean()
        row["rank_collapse_last"] = last["rank_collapse"]
        rows.append(row)
    return pd.DataFrame(rows)


def signal_table(layers: pd.DataFrame) -> list[dict[str, Any]]:
    """Return a row per setting, depth and side: means over seeds, None where nothing is finite.

    INTERVALS have a 95 % interval over three seeds or more, `…_low` and `…_high` (Student's t).
    The draws of the Jacobian differ by seed, so that its interval includes their error.  The side
    is left out if there is one.
    """
    by_seed = seed_rows(layers)
    keys = ["setting", "depth", *(["side"] if by_seed["side"].nunique() > 1 else [])]
    rows = []
    for labels, table in by_seed.groupby(keys, sort=False):
        row: dict[str, Any] = dict(zip(keys, labels, strict=True)) | {"seeds": len(table)}
        for name in table.columns.difference(["setting", "scheme", "depth", "side", "seed"], False):
            mean = mean_of(table[name].tolist())
            row[name] = finite_or_none(mean.value)
            if name in INTERVALS:
                low = 0.0 if name in RATIOS and mean.low < 0 else mean.low
                row[f"{name}_low"] = finite_or_none(low)
                row[f"{name}_high"] = finite_or_none(mean.high)
        rows.append(row)
    return rows
