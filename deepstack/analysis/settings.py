"""Settings: the config values that tell runs apart, and their names in labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deepstack.records import Run, varying

DEPTH, SEED, SCHEME, TASK = "model.depth", "seed", "model.scheme", "task.name"


# No key of the config: what was trained on, where runs of one config were on different data.
DATA = "data"


# How often something is looked at is no part of what is looked at.
OBSERVATION = ("log.", "train.eval_every", "train.eval_batches")


def depth_of(run: Run) -> int:
    return int(run.get(DEPTH, 0))


def scheme_label(run: Run) -> str:
    """How people write the scheme: `DeepNorm`."""
    label = run.columns.get("scheme", {}).get("label")
    return str(label or run.get(SCHEME, "?"))


def setting_value(run: Run, key: str) -> Any:
    """The config value at a dotted key; of DATA the first digits of their hash."""
    if key == DATA:
        return str(run.meta.get("data", {}).get("sha256") or "")[:6] or None
    return run.flat_config.get(key)


def varying_settings(runs: Sequence[Run]) -> list[str]:
    """The keys besides depth and seed that tell these runs apart, in the config's order."""
    keys = [k for k in varying(runs) if k not in (DEPTH, SEED) and not k.startswith(OBSERVATION)]
    told = [key for key in keys if owner_of(key) is None or owners_to_label(key, runs)]
    return told + ([DATA] if data_differs(runs) else [])


def data_differs(runs: Sequence[Run]) -> bool:
    """Whether runs of the same task were on different data: a file that was changed in between."""
    found: dict[tuple[Any, ...], str] = {}
    for run in runs:
        if setting_value(run, DATA):
            task = tuple((k, str(v)) for k, v in run.flat_config.items() if k.startswith("task."))
            if found.setdefault(task, setting_value(run, DATA)) != setting_value(run, DATA):
                return True
    return False


def owner_of(key: str) -> str | None:
    """The key that names what an option belongs to: schemes and tasks have options of their own."""
    if key.startswith("model.scheme_options."):
        return SCHEME
    return TASK if key.startswith("task.") and key not in (TASK, "task.seq_len") else None


def owners_to_label(key: str, runs: Sequence[Run]) -> set[Any]:
    """The schemes, or tasks, of which an option is said: runs of one differ in it, or have another
    value than its default."""
    owner = owner_of(key) or SCHEME
    values: dict[Any, set[Any]] = {}
    told = set()
    for run in runs:
        if key in run.flat_config:
            value = run.flat_config[key]
            values.setdefault(run.get(owner), set()).add(_hashable(value))
            if run.columns.get("defaults", {}).get(key, value) != value:
                told.add(run.get(owner))
    return told | {name for name, found in values.items() if len(found) > 1}


def determines(keys: Sequence[str], key: str, runs: Sequence[Run]) -> bool:
    """Whether runs that are equal in `keys` are equal in `key`."""
    seen: dict[tuple[Any, ...], Any] = {}
    for run in runs:
        where = tuple(_hashable(setting_value(run, k)) for k in keys)
        value = _hashable(setting_value(run, key))
        if seen.setdefault(where, value) != value:
            return False
    return True


def _hashable(value: Any) -> Any:
    if isinstance(value, dict):
        return repr(value)
    return tuple(map(_hashable, value)) if isinstance(value, list) else value


def setting_label(run: Run, key: str) -> str:
    """A setting in a label: `lr 0.001`."""
    return f"{short_key(key)}\u00a0{value_text(setting_value(run, key))}"


def short_key(key: str) -> str:
    """A dotted key as a label: `lr`, `d_model`, `norm gain`."""
    section, *rest = key.split(".")
    names = rest if section in ("model", "train", "task", "log") and rest else [section, *rest]
    if names[0] == "scheme_options":
        names = names[1:]
    if section == "task" and names == ["name"]:
        names = ["task"]
    return " ".join(names)


def value_text(value: Any) -> str:
    """A config value in a label: `0.001`, `on`, `(0.9, 0.98)`; a long one without its middle."""
    whole = _text(value)
    return whole if len(whole) <= 300 else f"{whole[:140]}…{whole[-140:]}"


def _text(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, (list, tuple)):
        return "(" + ",\u00a0".join(map(_text, value)) + ")"
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)
