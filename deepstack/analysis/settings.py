"""Settings: config values that vary over runs, and their names in labels.

A setting varies if runs differ in it: it can be a line's label.  Depth and seed are no settings.
A setting is dependent if other settings determine it: it makes no further lines.
A depth setting is chosen for each depth: depth and the other settings determine it.
An option belongs to a scheme or a task: only labels of its owner name it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from deepstack.errors import NothingMatchedError
from deepstack.records import Run, varying

DEPTH, SEED, SCHEME, TASK, LR = "model.depth", "seed", "model.scheme", "task.name", "train.lr"


# Not a key of the config: the data of a task, which can vary like a setting.
DATA = "data"


# Intervals of measurements are no settings.
OBSERVATION = ("log.", "train.eval_every", "train.eval_batches")


def depth_of(run: Run) -> int:
    return int(run.get(DEPTH, 0))


def depths_of(runs: Sequence[Run], kind: str = "runs") -> list[int]:
    """Return the depths of runs.  Raises NothingMatchedError for fewer than two."""
    depths = sorted({depth_of(run) for run in runs})
    if len(depths) < 2:
        raise NothingMatchedError(f"needs {kind} of two depths or more; all have N = {depths[0]}")
    return depths


def scheme_label(run: Run) -> str:
    """Return the scheme's name as papers write it: `DeepNorm`."""
    label = run.columns.get("scheme", {}).get("label")
    return str(label or run.get(SCHEME, "?"))


def setting_value(run: Run, key: str) -> Any:
    """Return the config value at a dotted key; for DATA the first digits of its hash."""
    if key == DATA:
        return str(run.meta.get("data", {}).get("sha256") or "")[:6] or None
    return run.flat_config.get(key)


def varying_settings(runs: Sequence[Run]) -> list[str]:
    """Return the settings that vary over runs, in the config's order.

    An option of a scheme or task counts only if runs of that scheme or task differ in it.
    """
    keys = [k for k in varying(runs) if k not in (DEPTH, SEED) and not k.startswith(OBSERVATION)]
    keys = [key for key in keys if owner_of(key) is None or owners_to_label(key, runs)]
    return keys + ([DATA] if data_differs(runs) else [])


def data_differs(runs: Sequence[Run]) -> bool:
    """Return whether runs of one task read different data, such as a file that changed."""
    data: dict[tuple[Any, ...], set[str]] = {}
    for run in runs:
        if digest := setting_value(run, DATA):
            task = tuple((k, str(v)) for k, v in run.flat_config.items() if k.startswith("task."))
            data.setdefault(task, set()).add(digest)
    return any(len(digests) > 1 for digests in data.values())


def owner_of(key: str) -> str | None:
    """Return SCHEME or TASK for an option of a scheme or task, None for other keys."""
    if key.startswith("model.scheme_options."):
        return SCHEME
    return TASK if key.startswith("task.") and key not in (TASK, "task.seq_len") else None


def owners_to_label(key: str, runs: Sequence[Run]) -> set[Any]:
    """Return the schemes, or tasks, whose labels name an option: not all runs have its default."""
    owner = owner_of(key) or SCHEME
    values: dict[Any, set[Any]] = {}
    for run in runs:
        if key in run.flat_config:
            value = run.flat_config[key]
            default = run.columns.get("defaults", {}).get(key, value)
            values.setdefault(run.get(owner), set()).update((hashable(value), hashable(default)))
    return {name for name, several in values.items() if len(several) > 1}


def determines(keys: Sequence[str], key: str, runs: Sequence[Run]) -> bool:
    """Return whether runs that are equal in `keys` are equal in `key`."""
    known = {tuple(hashable(setting_value(run, k)) for k in keys) for run in runs}
    return len(known) == len(
        {tuple(hashable(setting_value(run, k)) for k in (*keys, key)) for run in runs}
    )


def undetermined(keys: Sequence[str], known: Sequence[str], runs: Sequence[Run]) -> list[str]:
    """Return `keys` without those that `known` and the others determine, from the last one on."""
    kept = list(keys)
    for key in reversed(keys):
        if determines([*known, *(k for k in kept if k != key)], key, runs):
            kept.remove(key)
    return kept


def order_of(value: Any) -> tuple[int, float, str]:
    """Return a key that sorts None first, then numbers by size, then everything else."""
    if isinstance(value, int | float) and math.isfinite(value):
        return (1, float(value), "")
    return (0 if value is None else 2, 0.0, str(value))


def hashable(value: Any) -> Any:
    """Return a config value that can be a key of a dict: lists as tuples, dicts as text."""
    if isinstance(value, dict):
        return repr(value)
    return tuple(map(hashable, value)) if isinstance(value, list) else value


def label_of(run: Run, keys: Sequence[str], runs: Sequence[Run]) -> str:
    """Return the values of a run among `runs` as a label: `DeepNorm, lr 0.001`.

    An option is named for its scheme or task only, where not all of its runs have the default.
    """
    owners = {key: owners_to_label(key, runs) for key in keys if owner_of(key)}
    shown = [k for k in keys if k not in owners or run.get(str(owner_of(k))) in owners[k]]
    return ", ".join(
        scheme_label(run) if key == SCHEME
        else f"{short_key(key)}\u00a0{value_text(setting_value(run, key))}"
        for key in shown
    )  # fmt: skip


def short_key(key: str) -> str:
    """Return a dotted key as part of a label: `lr`, `d_model`, `norm gain`."""
    section, *rest = key.split(".")
    names = rest if section in ("model", "train", "task", "log") and rest else [section, *rest]
    if names[0] == "scheme_options":
        names = names[1:]
    if section == "task" and names == ["name"]:
        names = ["task"]
    return " ".join(names)


def value_text(value: Any) -> str:
    """Return a config value as text: `0.001`, `on`, `(0.9, 0.98)`; without its middle if long."""
    full = _text(value)
    return full if len(full) <= 300 else f"{full[:140]}…{full[-140:]}"


def _text(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, (list, tuple)):
        return "(" + ",\u00a0".join(map(_text, value)) + ")"
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)
