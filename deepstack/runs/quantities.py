"""Finds logged and per-layer quantities by name, and returns their observations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deepstack.base.errors import ConfigError
from deepstack.base.registry import unknown
from deepstack.base.text import value_text
from deepstack.config.key import Key
from deepstack.records import Run
from deepstack.runs.runs import Runs
from deepstack.runs.settings import SCHEME, require, scheme_label
from deepstack.runs.statistics import layers_at

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

STEP, LAYER, FLOPS = "step", "layer", "flops"
Layers = str | int


def growth(values: np.ndarray, axis: int = 1) -> np.ndarray:
    """Return the least-squares slope of ln value on the layer: the growth rate per layer.

    values: (snapshots, layers), axis 1.  Counts the layers before the first one whose value is not
        finite and above 0; NaN if these are fewer than two.
    """
    import numpy as np

    def slope(row: np.ndarray) -> float:
        good = np.isfinite(row) & (row > 0)
        logs = np.log(row[: len(row) if good.all() else int(good.argmin())])
        return float(np.polyfit(np.arange(len(logs)), logs, 1)[0]) if len(logs) > 1 else math.nan

    return np.apply_along_axis(slope, axis, values)


REDUCTIONS = ("mean", "max", "min", "growth")
# Names of load_runs for columns of evals.csv.
VALIDATION = {"val_loss": "loss", "val_loss_masked": "loss_masked"}


@dataclass(frozen=True)
class Quantity:
    """A logged column or a per-layer diagnostic of runs.

    source: the table that has it, `layers`, or `flops`, of which meta.json has the number a step.
    column: its name there.
    layers: how the layers of a diagnostic become one value.
    words: of an axis.
    """

    name: str
    source: str
    column: str
    words: str
    layers: Layers = "mean"

    @property
    def title(self) -> str:
        return f"{self.words[0].upper()}{self.words[1:]}"

    def table(self, run: Run) -> pd.DataFrame:
        """Return step and value of a run."""
        import numpy as np
        import pandas as pd

        if self.source == FLOPS:
            taken_steps = np.union1d([0], run.steps["step"]) if len(run.steps) else np.arange(0)
            return pd.DataFrame(
                {"step": taken_steps, "value": taken_steps * run.step_flops}
            ).dropna()
        if self.source != "layers":
            logged = run.log(self.source)
            return pd.DataFrame({"step": logged["step"], "value": logged.get(self.column)})
        if self.column not in run.layer_names():
            return pd.DataFrame({"step": [], "value": []})
        steps, values = run.layers(self.column)
        return pd.DataFrame({"step": steps, "value": self.reduced(values.astype(float))})

    def reduced(self, values: np.ndarray) -> np.ndarray:
        """Return one value per snapshot from values (snapshots, layers)."""
        import numpy as np

        if self.layers == "growth":
            return growth(values)
        if self.layers in REDUCTIONS:  # functions of numpy
            return np.asarray(getattr(np, str(self.layers))(values, axis=1))
        layer = values.shape[1] if self.layers == "last" else int(self.layers)
        if not 1 <= layer <= values.shape[1]:
            return np.full(len(values), math.nan)
        return values[:, layer - 1]


def find_quantity(name: str, runs: Sequence[Run], layers: Layers | None = None) -> Quantity:
    """Return the quantity with this name in some of the runs.

    layers: how the layers of a diagnostic become one value, by default the mean; if given, a
        diagnostic goes before a logged column with the same name (`grad_norm`).

    Raises ConfigError for an unknown one, or for `layers` other than mean, max, min, growth,
    last or a number.
    """
    if layers not in (None, *REDUCTIONS, "last") and not str(layers).isdecimal():
        raise ConfigError(unknown("layers", layers, (*REDUCTIONS, "last", "a number")))
    if name == FLOPS:
        return Quantity(name, FLOPS, name, Key(name).words)
    words = Key(name).words
    if name in VALIDATION and any(VALIDATION[name] in run.evals for run in runs):
        return Quantity(name, "evals", VALIDATION[name], words)
    known: dict[str, None] = {}
    is_diagnostic = any(name in run.layer_names() for run in runs)
    logs = dict.fromkeys(name for run in runs for name in run.log_names())
    for source in () if layers is not None and is_diagnostic else logs:
        for run in runs:
            columns = [str(c) for c in run.log(source) if c != "step"]
            known |= dict.fromkeys(columns)
            if name in columns:
                return Quantity(name, source, name, words)
    if is_diagnostic:
        return diagnostic_quantity(name, layers or "mean")
    for run in runs:
        known |= dict.fromkeys(run.layer_names())
    raise ConfigError(unknown("column", name, [*known, *VALIDATION, FLOPS]))


def diagnostic_quantity(name: str, layers: Layers) -> Quantity:
    """Return the quantity of a diagnostic whose layers become one value."""
    of = {"growth": "growth per layer", "last": "last layer"}
    of |= {reduction: f"{reduction} of layers" for reduction in ("mean", "max", "min")}
    words = f"{Key(name).words}, {of.get(str(layers), f'layer {layers}')}"
    return Quantity(name, "layers", name, words, layers)


def find_axis(word: str, runs: Runs) -> Key:
    """Return `step`, `layer`, a dotted setting, or a logged column for the word of an axis."""
    if word in (STEP, LAYER, FLOPS):
        return Key(word)
    try:
        return runs.key(word)
    except ConfigError as error:
        try:
            return Key(find_quantity(word, runs).name)
        except ConfigError:
            raise error from None


def observations(
    runs: Sequence[Run], quantity: Quantity, across: str, at_step: int | None = None
) -> pd.DataFrame:
    """Return a table x, value, run (and step against a column): one row an observation.

    Against a setting the value is taken at `at_step`, or the last one.  Raises NothingMatchedError
    if no run has a value.
    """
    import pandas as pd

    has_layers = across != LAYER or quantity.source == "layers"
    require(has_layers, f"{quantity.name} has no value of single layers")
    is_setting = any(across in run.flat_config for run in runs)
    every = {run: observations_of(run, quantity, across, is_setting, at_step) for run in runs}
    tables = {run: table for run, table in every.items() if len(table)}
    at = f" at step {at_step}" if at_step is not None else ""
    require(tables, f"no run has a value of {quantity.name}{at}")
    return pd.concat(tables, names=["run"]).reset_index("run")


def observations_of(
    run: Run, quantity: Quantity, across: str, is_setting: bool, at_step: int | None
) -> pd.DataFrame:
    """Return the rows of one run, without the run."""
    import numpy as np
    import pandas as pd

    if across == LAYER:
        snapshot = layers_at(run, quantity.column, at_step)
        values = np.empty(0) if snapshot is None else snapshot[1]
        return pd.DataFrame({"x": range(1, len(values) + 1), "value": values})
    table = quantity.table(run).astype({"value": float})
    if across == STEP:
        return table.rename(columns={"step": "x"})
    if is_setting:
        table = table[np.isfinite(table["value"])]
        table = table if at_step is None else table[table["step"] == at_step]
        last = table.drop(columns="step").tail(1)
        return last.assign(x=[axis_value(run, across)] * len(last))
    other = find_quantity(across, [run]).table(run).rename(columns={"value": "x"})
    return table.merge(other.astype({"x": float}), on="step")


def axis_value(run: Run, key: str) -> Any:
    """Return the value of a setting on an axis: a number, or a category's label."""
    if key == SCHEME:
        return scheme_label(run)
    value = run.flat_config.get(key)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if is_number else value_text(value)
