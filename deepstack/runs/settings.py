"""Settings, the config values that vary over runs, and the series of runs that they tell apart.

A setting varies if runs differ in it: it can be a line's label.  Depth and seed are no settings.
A setting is dependent if other settings determine it: it makes no further lines.
A depth setting is chosen for each depth: depth and the other settings determine it.
An option belongs to a scheme or a task: only labels of its owner name it.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from deepstack.base.errors import NothingMatchedError
from deepstack.records import ENDED, Run, varying

T = TypeVar("T")
SCHEME, DEPTH, WIDTH = "model.scheme", "model.depth", "model.d_model"
TASK, SEED, LR, STEPS = "task.name", "seed", "train.lr", "train.steps"
EXPONENTS = "train.lr_exponents."
# Not a key of the config: the data of a task, which can vary like a setting.
DATA = "data"
# Intervals of measurements are no settings.
OBSERVATION = ("log.", "train.eval_every", "train.eval_batches")
# Schemes that remain in a figure that cannot show all.
COMPARED_WITH = ("deepnorm", "post_ln", "pre_ln")
MOST_NAMES = 12
# These mark different experiments even where each depth happens to have only one of them.
NEVER_DEPTH_SETTINGS = (SCHEME, "model.scheme_options.", TASK, DATA)


def require(values: T, reason: str) -> T:
    """Return values that are not empty, or a condition that holds; else raise NothingMatchedError.

    reason: the sentence of the error.
    """
    if not values:
        raise NothingMatchedError(reason)
    return values


def depth_of(run: Run) -> int:
    return int(run.get(DEPTH, 0))


def depths_of(runs: Sequence[Run], kind: str = "runs") -> list[int]:
    """Return the depths of runs.  Raises NothingMatchedError for fewer than two."""
    depths = sorted({depth_of(run) for run in runs})
    require(len(depths) > 1, f"needs {kind} of two depths or more; all have N = {depths[0]}")
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
    known = [run for run in runs if setting_value(run, DATA)]
    keys = {key: None for run in known for key in run.flat_config if key.startswith("task.")}
    return not determines(list(keys), DATA, known)


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
    known = {values_of(run, keys) for run in runs}
    return len(known) == len({values_of(run, [*keys, key]) for run in runs})


def undetermined(keys: Sequence[str], known: Sequence[str], runs: Sequence[Run]) -> list[str]:
    """Return `keys` without those that `known` and the others determine, from the last one on."""
    undetermined_keys = list(keys)
    for key in reversed(keys):
        if determines([*known, *(k for k in undetermined_keys if k != key)], key, runs):
            undetermined_keys.remove(key)
    return undetermined_keys


def order_of(value: Any) -> tuple[int, float, str]:
    """Return a key that sorts None first, then numbers by size, then everything else."""
    if isinstance(value, int | float) and math.isfinite(value):
        return (1, float(value), "")
    return (0 if value is None else 2, 0.0, str(value))


def values_of(run: Run, keys: Sequence[str]) -> tuple[Any, ...]:
    """Return the values of a run at these keys, each as a key of a dict."""
    return tuple(hashable(setting_value(run, key)) for key in keys)


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
    words = [
        scheme_label(run) if key == SCHEME
        else f"{short_key(key)}\u00a0{text_of_setting(run, key, runs)}"
        for key in shown
        if not key.startswith(EXPONENTS)
    ]  # fmt: skip
    if exponents := [key for key in shown if key.startswith(EXPONENTS)]:
        words.append(rates_label(run, exponents, runs))
    return ", ".join(words)


def text_of_setting(run: Run, key: str, runs: Sequence[Run]) -> str:
    """Return a setting of a run as text that tells it from other values among `runs`."""
    return text_among(setting_value(run, key), [setting_value(other, key) for other in runs])


def rates_label(run: Run, keys: Sequence[str], runs: Sequence[Run]) -> str:
    """Return one label for `train.lr_exponents`: all of them only if a scheme has several sets."""
    sets = {(one.get(SCHEME), values) for one in runs if any(values := values_of(one, keys))}
    if not any(values_of(run, keys)):
        return "equal rates"
    if len({scheme for scheme, _ in sets}) == len(sets):
        return "rates by depth"
    return ", ".join(f"{short_key(k)}\u00a0{value_text(setting_value(run, k))}" for k in keys)


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


def text_among(value: Any, values: Iterable[Any]) -> str:
    """Return `value_text`, or the exact value if another one of `values` has the same text."""
    short = value_text(value)
    if any(other != value and value_text(other) == short for other in values):
        return repr(value) if isinstance(value, float) else str(value)
    return short


def _text(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, (list, tuple)):
        return "(" + ",\u00a0".join(map(_text, value)) + ")"
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class Series:
    """The runs that differ in depth and seed only: one line of a chart.

    label: the values that differ from other series. numeric: that value, if it is one number.
    """

    label: str
    runs: tuple[Run, ...]
    numeric: float | None = None

    @property
    def depths(self) -> list[int]:
        return sorted({depth_of(run) for run in self.runs})

    def at(self, depth: int) -> list[Run]:
        """Return the series' runs of one depth, sorted by seed, one per seed."""
        members = one_run_per_seed([run for run in self.runs if depth_of(run) == depth])
        return sorted(members, key=lambda run: int(run.get(SEED, 0)))

    @property
    def by_depth(self) -> dict[float, list[Run]]:
        return {depth: self.at(depth) for depth in self.depths}


def one_run_per_seed(runs: Sequence[Run]) -> list[Run]:
    """Return one run per seed: the last finished one, or else the last one.

    Runs that differ in intervals of measurements only are one sample of a mean.
    """
    ended = sorted(runs, key=lambda run: run.state in ENDED)
    return list({run.get(SEED): run for run in ended}.values())


def by_value(runs: Sequence[Run], value: Callable[[Run], Any]) -> dict[float, list[Run]]:
    """Return the runs at each value, such as a depth or a budget, one for each seed."""
    members: dict[float, list[Run]] = {}
    for run in runs:
        members.setdefault(float(value(run)), []).append(run)
    return {value: one_run_per_seed(members[value]) for value in sorted(members)}


def edge_of(value: float, tried: Iterable[float]) -> str:
    """Return 'lowest' or 'highest' if a value is a limit of several that were tried, else ''."""
    values = set(tried)
    if len(values) < 2 or value not in (min(values), max(values)):
        return ""
    return "lowest" if value == min(values) else "highest"


def split_series(runs: Sequence[Run], but: Sequence[str] = ()) -> tuple[list[Series], list[str]]:
    """Group runs into series; also return the depth settings (see `analysis.settings`).

    Each combination of the independent settings is a series.  Its label names dependent settings
    too (a learning rate chosen for each scheme), apart from d_ff, and no depth settings.
    Keys in `but` are ignored.
    """
    keys = [key for key in varying_settings(runs) if key not in but]
    keys.sort(key=lambda key: key != SCHEME)
    independent: list[str] = []
    for key in keys:
        if not determines(independent, key, runs):
            independent.append(key)
    dependent = [key for key in keys if key not in independent and key != "model.d_ff"]
    fixed = [key for key in independent if key.startswith(NEVER_DEPTH_SETTINGS)]
    free = [key for key in independent if key not in fixed]
    determining = {*fixed, *undetermined(free, [DEPTH, *fixed], runs)}
    depth_settings = [key for key in reversed(independent) if key not in determining]
    independent = [key for key in independent if key in determining]
    groups: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        groups.setdefault(values_of(run, independent), []).append(run)
    series = []
    for values in sorted(groups, key=lambda values: [order_of(value) for value in values]):
        members = groups[values]
        number = values[0] if len(values) == 1 and isinstance(values[0], (int, float)) else None
        label = label_of(members[0], [*independent, *dependent], runs) or scheme_label(members[0])
        series.append(Series(label, tuple(members), number))
    return series, depth_settings


def choose_series(series: Sequence[Series], limit: int) -> tuple[list[Series], list[str]]:
    """Return at most `limit` of the series, and a note that names the others.

    Series of the schemes in COMPARED_WITH stay; the others are evenly spaced.
    """
    first = [s for s in series if s.numeric is None and s.runs[0].get(SCHEME) in COMPARED_WITH]
    first = first if len(first) <= limit else []
    others = evenly_spaced([s for s in series if s not in first], limit - len(first))
    chosen = [s for s in series if s in first or s in others]
    return chosen, left_out_note([s.label for s in series if s not in chosen])


def left_out_note(labels: Sequence[str]) -> list[str]:
    """Return a note with the names of the series that a figure leaves out."""
    names = "; ".join(labels[:MOST_NAMES])
    more = f" and {len(labels) - MOST_NAMES} more" if len(labels) > MOST_NAMES else ""
    return [f"left out: {names}{more}"] if labels else []


def evenly_spaced(values: Sequence[Any], limit: int) -> list[Any]:
    """Return at most `limit` evenly spaced values, with the first and the last."""
    if len(values) <= limit:
        return list(values)
    if limit <= 1:
        return list(values[:limit])
    picks = {round(i * (len(values) - 1) / (limit - 1)) for i in range(limit)}
    return [values[i] for i in sorted(picks)]
