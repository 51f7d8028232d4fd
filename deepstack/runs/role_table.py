"""The part of ‖ΔF‖ of each role in the logs of runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from deepstack.records import Run
from deepstack.runs.settings import LR, SEED, depth_of, require
from deepstack.runs.statistics import has_diverged_by

if TYPE_CHECKING:
    import pandas as pd

TOGETHER = "together"
"""The name of all roles at once."""
NOT_A_ROLE = ("outside", "schedule", "unexplained")
ROUNDING = 10 * 2**-23
"""The part of ‖F_0‖ below which a movement of F is rounding in fp32 and counts as none."""


def role_updates(runs: Sequence[Run]) -> pd.DataFrame:
    """Return a table with one row per run, step and trained role.

    Its columns are depth, seed, lr, step, role, value.

    value: ‖F(θ_0 + Δθ_role) − F(θ_0)‖, or ‖F(θ_t) − F(θ_t − Δθ_role)‖ under
    `log.attribution_from=current`; mean over probe tokens of the 2-norm, and 0 within the
    rounding of F.  Runs need `log.attribution_every`; one that trains a single role gives ‖ΔF‖.
    Rows at and after a divergence are left out.  Raises NothingMatchedError if no run has such a
    row.
    """
    import pandas as pd

    tables = []
    for run in runs:
        wide = run.log("attribution")
        trained = run.get("train.trainable")
        if not len(wide) and isinstance(trained, list) and len(trained) == 1:
            wide = run.steps[["step", "model_update"]].rename(columns={"model_update": trained[0]})
        roles = [name for name in map(str, wide) if is_role(name)]
        if isinstance(trained, list):
            roles = [role for role in roles if role in trained]
        if not len(wide) or not roles:
            continue
        long = wide.melt("step", [*roles, *({"whole"} & {*wide})], "role", "value")
        long = long[[not has_diverged_by(run, int(step)) for step in long["step"]]]
        rounding = ROUNDING * float(run.columns.get("f0_norm", 0.0))
        long["value"] = long["value"].where(long["value"] > rounding, 0.0)
        labels = {"depth": depth_of(run), "seed": run.get(SEED), "lr": float(run.get(LR, 0.0))}
        tables.append(long.replace({"role": {"whole": TOGETHER}}).assign(**labels))
    require(tables, "no run has an attribution.csv; set log.attribution_every=1")
    table = pd.concat(tables, ignore_index=True)
    return table[["depth", "seed", "lr", "step", "role", "value"]]


def is_role(column: str) -> bool:
    """Return whether a column of attribution.csv belongs to one role and not to some layers."""
    return not column.startswith(("step", "whole", "layers_", "first_order_", *NOT_A_ROLE))
