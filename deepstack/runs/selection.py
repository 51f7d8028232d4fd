"""The table of runs as a pandas DataFrame, and the runs in its rows."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from deepstack.base.errors import ConfigError
from deepstack.records import Summary
from deepstack.runs.conditions import Where
from deepstack.runs.runs import Runs

if TYPE_CHECKING:
    import pandas as pd


def load_runs(
    path: str | os.PathLike[str],
    *,
    where: Where = (),
    sort: str | None = None,
    last: int | None = None,
    best: str | Sequence[str] = (),
    settings: str = "varying",
) -> pd.DataFrame:
    """Return one row a run below a results, study or run folder, as a pandas DataFrame.

    | column          | unit  |                                                                  |
    |-----------------|-------|------------------------------------------------------------------|
    | study, run      |       | names of the folders                                             |
    | state           |       | done, diverged, failed, interrupted, …                           |
    | tags, note      |       | of `deepstack note`, where any run has them                      |
    | model.depth, …  |       | settings that vary inside a study, by dotted key                 |
    | step            | steps | the last row of steps.csv                                        |
    | loss            | nats  | training loss of that row                                        |
    | grad_norm       |       | norm of its gradient, before clipping                            |
    | model_update    |       | ‖ΔF‖ there, since the start                                      |
    | val_loss        | nats  | last validation loss over all predicted positions                |
    | val_loss_masked | nats  | the same over those whose token is not shown                     |
    | step_ms         | ms    | median wall-clock time of a step                                 |
    | path            |       | the folder, which tells runs with equal names apart               |

    where: conditions that all hold for each run, such as "depth=6,48", "lr<0.01", "state!=failed"
        or "outcome=trained"; one, several, or {key: value or values}, a list, range or array.  The
        values of a mapping are compared as they are: no comma, `*` or `?` of a text has a meaning.
    sort: a column or setting, descending with `-` before it.
    last: the number of runs to keep, those created last.
    best: keys such as "lr"; each setting and depth keeps the runs with the best value, as in
        `deepstack.compare`.
    settings: 'varying', or 'all' for every setting and the same columns in every study; options of
        schemes and tasks are then one column each.

    Raises NothingMatchedError when there is no run, or none that meets the conditions, and
    ConfigError for an unknown key.
    """
    if settings not in ("varying", "all"):
        raise ConfigError(f"settings: found {settings!r}; allowed 'varying' or 'all'")
    chosen = Runs.below(path).select(where, sort, last, best)
    table = chosen.make_table(all_settings) if settings == "all" else chosen.table
    table.attrs["folder"] = os.fspath(path)
    return table


def all_settings(one: Summary) -> dict[str, Any]:
    """Return the value of each setting, the same keys for every run.

    The options of a scheme or a task and the factors of roles are one text each, as JSON.
    """
    from deepstack.config.keys import setting_keys

    rest, settings = dict(one.config), {}
    for key in setting_keys():
        inner = [name for name in rest if name.startswith(f"{key}.")]
        options = {name.removeprefix(f"{key}."): rest.pop(name) for name in inner}
        value = rest.pop(key, options or None)
        plain = value is None or isinstance(value, bool | int | float | str)
        settings[key] = value if plain else json.dumps(value, default=str)
    options = {k.removeprefix("task."): v for k, v in rest.items() if k.startswith("task.")}
    settings["task.options"] = json.dumps(options, default=str) if options else None
    return settings
