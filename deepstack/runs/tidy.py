"""The tidy table of a quantity: one row per observation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from deepstack.records import Run
from deepstack.runs.series import varying_settings
from deepstack.runs.settings import SCHEME, SEED, depth_of, setting_value

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd


def tidy(
    runs: Sequence[Run],
    quantity: str,
    source: str | Callable[[Run], pd.DataFrame] = "steps",
    settings: Sequence[str] | None = None,
) -> pd.DataFrame:
    """Return a table with one row per observation: scheme, depth, seed, step, value, settings.

    quantity: a column of `source`, which is `steps`, `evals`, `timing`, or a function that returns
        a table with a column `step` for a run.
    settings: dotted keys, one column each; by default the settings that vary.  Runs without the
        quantity have no rows.
    """
    import pandas as pd

    keys = varying_settings(runs) if settings is None else settings
    tables = [pd.DataFrame(columns=["scheme", "depth", "seed", "step", "value"])]
    for run in runs:
        logged = run.log(source) if isinstance(source, str) else source(run)
        if quantity not in logged or not len(logged):
            continue
        table = pd.DataFrame({"step": logged["step"], "value": logged[quantity].astype(float)})
        labels = {"scheme": run.get(SCHEME), "depth": depth_of(run), "seed": run.get(SEED)}
        labels |= {key: setting_value(run, key) for key in keys if key != SCHEME}
        for name, value in labels.items():
            table[name] = [value] * len(table)  # a list stays one value
        tables.append(table)
    return pd.concat(tables[1:] or tables, ignore_index=True)


def array_statistics(x: np.ndarray, values: np.ndarray) -> pd.DataFrame:
    """Return x, mean, mean ± deviation and number of seeds (x, y, low, high, n).

    values: (seeds, x); where one seed's is NaN the mean is.
    """
    import numpy as np
    import pandas as pd

    mean, n = values.mean(axis=0), len(values)
    deviation = values.std(axis=0, ddof=1) if n > 1 else np.full_like(mean, np.nan)
    columns = {"x": x, "y": mean, "low": mean - deviation, "high": mean + deviation, "n": n}
    return pd.DataFrame(columns)


def seed_statistics(table: pd.DataFrame, by: str = "step") -> pd.DataFrame:
    """Return the mean y of the seeds at each x, y ± one deviation as low and high, and their n.

    table: a tidy table of the seeds of one setting and depth.
    by: the column of x.  Counts finite values only.  The deviation of one seed is NaN.
    """
    import numpy as np  # `deepstack ls` needs none

    values = table.assign(value=table["value"].astype(float))
    finite = values[np.isfinite(values["value"])]
    rows = finite.groupby(by)["value"].agg(y="mean", deviation="std", n="count")
    rows["low"], rows["high"] = rows["y"] - rows["deviation"], rows["y"] + rows["deviation"]
    return rows.reset_index(names="x")[["x", "y", "low", "high", "n"]]
