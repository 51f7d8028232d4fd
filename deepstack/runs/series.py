"""The settings that vary over runs, and the series of runs that they tell apart.

A setting varies if runs differ in it: it can be a line's label.  Depth and seed are not settings.
A setting is dependent if other settings determine it: it makes no further lines.
A depth setting is chosen for each depth: depth and the other settings determine it.
An option belongs to a scheme or a task: only labels of its owner name it.

`deepstack.runs.runs.Runs` has the results of these functions, each computed once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from deepstack.base.text import text_among, value_text
from deepstack.config.key import Key
from deepstack.records import Run, varying
from deepstack.runs.origin import START, Origin
from deepstack.runs.settings import (
    DATA,
    DEPTH,
    SCHEME,
    SEED,
    TASK,
    depth_of,
    evenly_spaced,
    hashable,
    left_out_note,
    one_run_per_seed,
    order_of,
    scheme_label,
    setting_value,
    values_of,
)

EXPONENTS = "train.lr_exponents."
# Intervals of measurements are not settings.
OBSERVATION = ("log.", "train.eval_every", "train.eval_batches")
# Schemes that others are compared with: they remain in a figure that cannot show all.
COMPARED_WITH = ("post_ln", "deepnorm", "pre_ln")
# These mark different experiments even where each depth happens to have only one of them.
NEVER_DEPTH_SETTINGS = (SCHEME, "model.scheme_options.", TASK, DATA)


@dataclass(frozen=True)
class Series:
    """The runs that differ in depth and seed only: one line of a chart.

    label: values that differ from other series.
    runs: runs of the series.
    numeric: the value that differs, if it is one number.
    """

    label: str
    runs: tuple[Run, ...]
    numeric: float | None = None

    @cached_property
    def depths(self) -> list[int]:
        return sorted({depth_of(run) for run in self.runs})

    @cached_property
    def by_depth(self) -> dict[float, list[Run]]:
        """The runs of each depth, sorted by seed, one per seed."""
        members: dict[float, list[Run]] = {depth: [] for depth in self.depths}
        for run in self.runs:
            members[depth_of(run)].append(run)
        return {
            depth: sorted(one_run_per_seed(runs), key=lambda run: int(run.get(SEED, 0)))
            for depth, runs in members.items()
        }

    def at(self, depth: int) -> list[Run]:
        """Return the runs of one depth, sorted by seed, one per seed."""
        return self.by_depth.get(depth, [])

    def everything_at(self, depth: int) -> list[Run]:
        """Return all runs of one depth, in the order of the series."""
        return [run for run in self.runs if depth_of(run) == depth]


class Split(NamedTuple):
    """Runs as series.

    series: one for each combination of independent settings, in the order of their values.
    depth_settings: the settings that are chosen for each depth.
    """

    series: tuple[Series, ...]
    depth_settings: list[Key]


def varying_settings(runs: Sequence[Run]) -> list[Key]:
    """Return the settings that vary over runs, in the config's order.

    An option of a scheme or task counts only if runs of that scheme or task differ in it.
    """
    differing = map(Key, varying(runs))
    keys = [k for k in differing if k not in (DEPTH, SEED) and not k.startswith(OBSERVATION)]
    keys = [key for key in keys if key.owner is None or owners_to_label(key, runs)]
    if START in keys:
        keys = with_origin(keys, runs)
    return keys + ([DATA] if data_differs(runs) else [])


def with_origin(keys: Sequence[Key], runs: Sequence[Run]) -> list[Key]:
    """Return `keys` with the training before the runs in place of the path of `model.start`.

    It is left out where depth and the other keys determine it.  The path stays unless the runs of
    each setting start all with one folder, or each seed with its own.
    """
    origin = Origin.of_runs(runs)
    others = [key for key in keys if key != START]
    settings: dict[Any, set[tuple[Any, Any]]] = {}
    for run in runs:
        setting = values_of(run, [*others, DEPTH, origin])
        settings.setdefault(setting, set()).add((run.get(START), run.get(SEED)))
    for pairs in settings.values():
        starts, seeds = ({pair[i] for pair in pairs} for i in (0, 1))
        if len(starts) > 1 and not len(starts) == len(seeds) == len(pairs):
            return list(keys)
    if determines([*others, DEPTH], origin, runs):
        return others
    return [origin if key == START else key for key in keys]


def data_differs(runs: Sequence[Run]) -> bool:
    """Return whether runs of one task read different data, such as a file that changed."""
    known = [run for run in runs if setting_value(run, DATA)]
    keys = {key: None for run in known for key in run.flat_config if key.startswith("task.")}
    return not determines(list(keys), DATA, known)


def owners_to_label(key: Key, runs: Sequence[Run]) -> set[Any]:
    """Return the schemes, or tasks, whose labels name an option: not all runs have its default."""
    owner = key.owner or SCHEME
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


def undetermined(keys: Sequence[Key], known: Sequence[str], runs: Sequence[Run]) -> list[Key]:
    """Return `keys` without those that `known` and the others determine, from the last one on."""
    undetermined_keys = list(keys)
    for key in reversed(keys):
        if determines([*known, *(k for k in undetermined_keys if k != key)], key, runs):
            undetermined_keys.remove(key)
    return undetermined_keys


def split_series(runs: Sequence[Run], settings: Sequence[Key]) -> Split:
    """Group runs into series by these settings, which vary.

    Each combination of the independent settings is a series.  Its label names dependent settings
    too (a learning rate chosen for each scheme), apart from d_ff, and no depth settings.
    """
    independent, dependent, depth_settings = divide(settings, runs)
    groups: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        groups.setdefault(values_of(run, independent), []).append(run)
    series = []
    for values in sorted(groups, key=lambda values: [order_of(value) for value in values]):
        members = groups[values]
        number = values[0] if len(values) == 1 and isinstance(values[0], (int, float)) else None
        label = label_of(members[0], [*independent, *dependent], runs) or scheme_label(members[0])
        series.append(Series(label, tuple(members), number))
    return Split(tuple(series), depth_settings)


def divide(settings: Sequence[Key], runs: Sequence[Run]) -> tuple[list[Key], list[Key], list[Key]]:
    """Return the settings that make series, those that these determine, and the depth settings."""
    keys = sorted(settings, key=lambda key: key != SCHEME)
    independent: list[Key] = []
    for key in keys:
        if not determines(independent, key, runs):
            independent.append(key)
    dependent = [key for key in keys if key not in independent and key != "model.d_ff"]
    fixed = [key for key in independent if key.startswith(NEVER_DEPTH_SETTINGS)]
    free = [key for key in independent if key not in fixed]
    determining = {*fixed, *undetermined(free, [DEPTH, *fixed], runs)}
    depth_settings = [key for key in reversed(independent) if key not in determining]
    independent = [key for key in independent if key in determining]
    # What only a depth setting determines, such as a rate by width where depth sets the width.
    depth_settings += [key for key in dependent if not determines(independent, key, runs)]
    dependent = [key for key in dependent if key not in depth_settings]
    return independent, dependent, depth_settings


def label_of(run: Run, keys: Sequence[Key], runs: Sequence[Run]) -> str:
    """Return the values of a run among `runs` as a label: `DeepNorm, lr 0.001`.

    An option is named for its scheme or task only, where not all of its runs have the default.
    """
    owners = {key: owners_to_label(key, runs) for key in keys if key.owner}
    shown = [k for k in keys if k not in owners or run.get(str(k.owner)) in owners[k]]
    words = [
        scheme_label(run) if key == SCHEME else key.label(text_of_setting(run, key, runs))
        for key in shown
        if not key.startswith(EXPONENTS)
    ]
    if exponents := [key for key in shown if key.startswith(EXPONENTS)]:
        words.append(rates_label(run, exponents, runs))
    return ", ".join(words)


def text_of_setting(run: Run, key: str, runs: Sequence[Run]) -> str:
    """Return a setting of a run as text that tells it from other values among `runs`."""
    return text_among(setting_value(run, key), [setting_value(other, key) for other in runs])


def rates_label(run: Run, keys: Sequence[Key], runs: Sequence[Run]) -> str:
    """Return one label for `train.lr_exponents`: all of them only if a scheme has several sets."""
    sets = {(one.get(SCHEME), values) for one in runs if any(values := values_of(one, keys))}
    if not any(values_of(run, keys)):
        return "equal rates"
    if len({scheme for scheme, _ in sets}) == len(sets):
        return "rates by depth"
    return ", ".join(key.label(value_text(setting_value(run, key))) for key in keys)


def choose_series(series: Sequence[Series], limit: int) -> tuple[list[Series], list[str]]:
    """Return at most `limit` of the series, and a note that names the others.

    Series of the schemes in COMPARED_WITH stay; the others are evenly spaced.
    """
    first = [s for s in series if s.numeric is None and s.runs[0].get(SCHEME) in COMPARED_WITH]
    first = first if len(first) <= limit else []
    others = evenly_spaced([s for s in series if s not in first], limit - len(first))
    chosen = [s for s in series if s in first or s in others]
    return chosen, left_out_note([s.label for s in series if s not in chosen])
