"""Which runs make one line, and what a line, a title and a caption say of them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from deepstack import config as conf
from deepstack.plots.style import line_style
from deepstack.records import ENDED, Run, varying
from deepstack.records.cells import counted

DEPTH, SEED, SCHEME, TASK = "model.depth", "seed", "model.scheme", "task.name"
# No key of the config: what was trained on, where runs of one config were on different data.
DATA = "data"

# Schemes that stay in a figure which has no room for all.
COMPARED_WITH = ("deepnorm", "post_ln", "pre_ln")
MOST_NAMES = 12

# How often something is looked at is no part of what is looked at.
OBSERVATION = ("log.", "train.eval_every", "train.eval_batches")
# These mark different experiments even where each depth happens to have only one of them.
NEVER_FOLLOWS_DEPTH = (SCHEME, "model.scheme_options.", TASK, DATA)
# What a title or the beginning of a caption says.
SAID = {
    "name", SEED, DEPTH, SCHEME, TASK, "task.seq_len", "model.decoder_depth", "model.d_model",
    "model.n_heads", "model.d_ff", "train.batch_size", "train.optimizer", "train.lr",
    "train.schedule", "train.warmup_steps", "train.clip",
}  # fmt: skip
SAID_SECTIONS = ("train.lr_factors", "train.trainable")
FORMS = {
    "model.family": "{}",
    "model.activation": "{}",
    "model.norm.kind": "{} norm",
    "model.init.distribution": "init {}",
    "train.precision": "{}",
    "train.steps": "{} steps",
}


@dataclass(frozen=True)
class Series:
    """The runs that differ in depth and seed only: one line of a chart.

    label: what tells it from the others. numeric: the one number that does, if it is one.
    """

    label: str
    runs: tuple[Run, ...]
    numeric: float | None = None

    @property
    def depths(self) -> list[int]:
        return sorted({depth_of(run) for run in self.runs})

    def at(self, depth: int) -> list[Run]:
        """Its runs of one depth, by seed, one a seed."""
        found = one_a_seed([run for run in self.runs if depth_of(run) == depth])
        return sorted(found, key=lambda run: int(run.get(SEED, 0)))


def depth_of(run: Run) -> int:
    return int(run.get(DEPTH, 0))


def one_a_seed(runs: Sequence[Run]) -> list[Run]:
    """Of runs of one setting and depth one a seed: the last that came to an end, or else the last.

    A run that was only looked at otherwise is no further sample of what is averaged.
    """
    ended = sorted(runs, key=lambda run: run.state in ENDED)
    return list({run.get(SEED): run for run in ended}.values())


def differing(runs: Sequence[Run]) -> list[str]:
    """The keys besides depth and seed that tell these runs apart, in the config's order."""
    keys = [k for k in varying(runs) if k not in (DEPTH, SEED) and not k.startswith(OBSERVATION)]
    told = [key for key in keys if owner_of(key) is None or owners_told(key, runs)]
    return told + ([DATA] if data_differ(runs) else [])


def setting(run: Run, key: str) -> Any:
    """The config value at a dotted key; of DATA the first digits of their hash."""
    if key == DATA:
        return str(run.meta.get("data", {}).get("sha256") or "")[:6] or None
    return run.flat_config.get(key)


def data_differ(runs: Sequence[Run]) -> bool:
    """Whether runs of the same task were on different data: a file that was changed in between."""
    found: dict[tuple[Any, ...], str] = {}
    for run in runs:
        if setting(run, DATA):
            task = tuple((k, str(v)) for k, v in run.flat_config.items() if k.startswith("task."))
            if found.setdefault(task, setting(run, DATA)) != setting(run, DATA):
                return True
    return False


def owner_of(key: str) -> str | None:
    """The key that names what an option belongs to: schemes and tasks have options of their own."""
    if key.startswith("model.scheme_options."):
        return SCHEME
    return TASK if key.startswith("task.") and key not in (TASK, "task.seq_len") else None


def owners_told(key: str, runs: Sequence[Run]) -> set[Any]:
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


def depth_words(runs: Sequence[Run]) -> list[str]:
    """The depths of these runs, `6`, or `20 + 5` where there are an encoder and a decoder."""
    found = set()
    for run in runs:
        both = run.get("model.family") == "encoder_decoder"
        decoder = [int(run.get("model.decoder_depth") or depth_of(run))] if both else []
        found.add((depth_of(run), *decoder))
    return [" + ".join(map(str, depths)) for depths in sorted(found)]


def scheme_label(run: Run) -> str:
    """How people write the scheme: `DeepNorm`."""
    label = run.columns.get("scheme", {}).get("label")
    return str(label or run.get(SCHEME, "?"))


def split(runs: Sequence[Run], but: Sequence[str] = ()) -> tuple[list[Series], list[str]]:
    """One series for each value of what varies besides depth and seed, and what follows depth.

    A key that others determine does not split, but a label says it (a learning rate chosen for
    each scheme; d_ff, which follows d_model, goes without saying).  One that depth determines (a
    learning rate chosen for each depth) does not split either and is named in the second list.
    Keys in `but` never split.
    """
    keys = sorted((k for k in differing(runs) if k not in but), key=lambda key: key != SCHEME)
    kept: list[str] = []
    for key in keys:
        if not determines(kept, key, runs):
            kept.append(key)
    said = [key for key in keys if key not in kept and key != "model.d_ff"]
    follows: list[str] = []
    for key in reversed(kept.copy()):
        others = [k for k in kept if k != key]
        if not key.startswith(NEVER_FOLLOWS_DEPTH) and determines([DEPTH, *others], key, runs):
            kept.remove(key)
            follows.append(key)
    told = {key: owners_told(key, runs) for key in keys if owner_of(key)}
    groups: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        groups.setdefault(tuple(_hashable(setting(run, k)) for k in kept), []).append(run)
    series = []
    for values in sorted(groups, key=lambda values: [_order(value) for value in values]):
        members = groups[values]
        first = members[0]
        # An option of another scheme says nothing about this one, and a default nothing new.
        own = [k for k in (*kept, *said) if k not in told or first.get(str(owner_of(k))) in told[k]]
        parts = [scheme_label(first) if key == SCHEME else value_said(first, key) for key in own]
        number = values[0] if len(values) == 1 and isinstance(values[0], (int, float)) else None
        label = ", ".join(parts) or scheme_label(first)
        series.append(Series(label, tuple(members), number))
    return series, follows


def value_said(run: Run, key: str) -> str:
    """A setting in a label: `lr 0.001`."""
    return f"{short(key)}\u00a0{text(setting(run, key))}"


def short(key: str) -> str:
    """A dotted key as a label: `lr`, `d_model`, `norm gain`."""
    section, *rest = key.split(".")
    names = rest if section in ("model", "train", "task", "log") and rest else [section, *rest]
    if names[0] == "scheme_options":
        names = names[1:]
    if section == "task" and names == ["name"]:
        names = ["task"]
    return " ".join(names)


def text(value: Any) -> str:
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


def title_of(runs: Sequence[Run], series: Sequence[Series]) -> str:
    """What was run: `DeepNorm, Post-LN on text, N = 6 to 1000, 3 seeds`."""
    labels = list(dict.fromkeys(scheme_label(run) for run in runs))
    schemes = ", ".join(labels) if len(labels) <= 4 else f"{len(labels)} schemes"
    tasks = list(dict.fromkeys(str(run.get("task.name", "?")) for run in runs))
    words = f"{schemes} on {', '.join(tasks)}"
    depths = [words.replace(" ", "\u00a0") for words in depth_words(runs)]
    words += f", N\u00a0=\u00a0{depths[0]}" + (f"\u00a0to\u00a0{depths[-1]}" if depths[1:] else "")
    seeds = {run.get(SEED, 0) for run in runs}
    words += f", {len(seeds)}\u00a0seeds" if len(seeds) > 1 else ""
    return words + (f", {len(series)} settings" if len(series) > len(labels) else "")


def caption_of(runs: Sequence[Run], follows: Iterable[str] = ()) -> list[str]:
    """What all runs share, for the caption, what follows depth, and how many have not ended.

    Width, batch and rate are always said, of the rest what is not the default.
    """
    different = set(varying(runs))

    def value(key: str) -> str | None:
        found = runs[0].get(key)
        return None if key in different or found is None else text(found)

    width = _join(
        (value("model.d_model"), "d_model {}"),
        (value("model.n_heads"), "n_heads {}"),
        (value("model.d_ff"), "d_ff {}"),
    )
    size, tokens = value("train.batch_size"), value("task.seq_len")
    batch = _join((size, "batch {}"), (tokens, "× {} tokens" if size else "sequences of {} tokens"))
    rate = _join(
        (value("train.optimizer"), "{}"),
        (value("train.lr"), "lr {}"),
        (value("train.schedule"), "{} schedule"),
        (value("train.warmup_steps"), "{} warm-up steps"),
    )
    items = [width, batch.replace(", ×", " ×"), rate]
    if "train.clip" in runs[0].flat_config and "train.clip" not in different:
        clip = runs[0].get("train.clip")
        items.append("no clip" if clip is None else f"clip {text(clip)}")
    factors = runs[0].get("train.lr_factors") or {}
    if factors and not any(key.startswith("train.lr_factors") for key in different):
        items.append("lr of " + ", ".join(f"{role} × {text(f)}" for role, f in factors.items()))
    roles = runs[0].get("train.trainable", "all")
    if roles != "all" and not any(key.startswith("train.trainable") for key in different):
        items.append(f"trained: {' '.join(map(str, roles))}")
    for key in _set_otherwise(runs[0]):
        if key not in different:
            form = FORMS.get(key, f"{short(key)} {{}}")
            # Of a file its name, not where it lies.
            items.append(counted(form, text(runs[0].flat_config[key]).rpartition("/")[2]))
    items += [f"{short(key)} follows N" for key in follows]
    if left := _repeated(runs):
        items.append(f"left out: {counted('{} runs', left)} with the seed of another")
    if going := sum(run.state not in ENDED for run in runs):
        items.append(f"unfinished: {going} of {counted('{} runs', len(runs))}")
    # A line may end after a comma; a name and its value stay together.
    return [re.sub("(?<!,) ", "\u00a0", item) for item in items if item]


def _repeated(runs: Sequence[Run]) -> int:
    """How many runs have setting, depth and seed of another."""
    keys = [DEPTH, SEED, *differing(runs)]
    return len(runs) - len({tuple(_hashable(setting(run, k)) for k in keys) for run in runs})


def _set_otherwise(run: Run) -> list[str]:
    """The settings of a run that change what is computed, are not the default and not said yet."""
    usual = _usual() | run.columns.get("defaults", {})
    skipped = (*OBSERVATION, *SAID_SECTIONS, "runtime.")
    return [
        key
        for key, value in run.flat_config.items()
        if key not in SAID and not key.startswith(skipped)
        if value not in (None, "", {}) and value != usual.get(key)
    ]


@cache
def _usual() -> dict[str, Any]:
    return conf.values(conf.Config())


def seeds_note(counts: Iterable[int]) -> str:
    """How many seeds a band stands on."""
    found = sorted(set(counts))
    if not found or found[-1] == 1:
        return ""
    return f"n = {found[0]}" if len(found) == 1 else f"n = {found[0]} to {found[-1]}"


def line_styles(series: Sequence[Series], runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Colour, line and marker of each series: those that it has among all runs of the folder.

    A chart that can show some of the runs only gives none of them another's colour.
    """
    every = split(runs)[0]
    home = {run: i for i, s in enumerate(every) for run in s.runs}
    places = [home.get(s.runs[0], -1) for s in series]
    if -1 in places or len(set(places)) < len(series):  # here something else tells them apart
        every, places = list(series), list(range(len(series)))
    return [line_style(i, len(every), ordered(every)) for i in places]


def ordered(series: Sequence[Series]) -> bool:
    """Whether one number tells each of the series from the others."""
    return all(s.numeric is not None for s in series)


def chosen(series: Sequence[Series], limit: int) -> tuple[list[Series], list[str]]:
    """At most `limit` of the series, and a note that names the others.

    Of names those that others are compared with stay; numbers, and the rest, are taken evenly.
    """
    first = [s for s in series if s.numeric is None and s.runs[0].get(SCHEME) in COMPARED_WITH]
    first = first if len(first) <= limit else []
    others = spread([s for s in series if s not in first], limit - len(first))
    kept = [s for s in series if s in first or s in others]
    return kept, left_out([s.label for s in series if s not in kept])


def panels(series: Sequence[Series], limit: int) -> tuple[list[tuple[str, list[Run]]], list[str]]:
    """What has a panel of its own, label and runs, and notes on what has none.

    Of one setting every depth; of several each at its greatest depth, named where there are others.
    """
    if len(series) == 1:
        depths = series[0].depths
        notes = [f"{limit} of {len(depths)} depths"] if len(depths) > limit else []
        return [(f"N = {n}", series[0].at(n)) for n in spread(depths, limit)], notes
    shown, left = chosen(series, limit)
    several = len({n for s in shown for n in s.depths}) > 1
    made = []
    for s in shown:
        n = s.depths[-1]
        made.append((f"{s.label}, N = {n}" if several else s.label, s.at(n)))
    notes = ["each at its greatest depth"] if any(len(s.depths) > 1 for s in shown) else []
    return made, notes + left


def left_out(labels: Sequence[str]) -> list[str]:
    """A note on what a figure has no room for, by name."""
    names = "; ".join(labels[:MOST_NAMES])
    more = f" and {len(labels) - MOST_NAMES} more" if len(labels) > MOST_NAMES else ""
    return [f"left out: {names}{more}"] if labels else []


def spread(values: Sequence[Any], limit: int) -> list[Any]:
    """At most `limit` of the values, evenly, with the first and the last."""
    if len(values) <= limit:
        return list(values)
    if limit <= 1:
        return list(values[:limit])
    picks = {round(i * (len(values) - 1) / (limit - 1)) for i in range(limit)}
    return [values[i] for i in sorted(picks)]


def _join(*parts: tuple[str | None, str]) -> str:
    return ", ".join(counted(form, value) for value, form in parts if value is not None)


def determines(keys: Sequence[str], key: str, runs: Sequence[Run]) -> bool:
    """Whether runs that are equal in `keys` are equal in `key`."""
    seen: dict[tuple[Any, ...], Any] = {}
    for run in runs:
        where = tuple(_hashable(setting(run, k)) for k in keys)
        value = _hashable(setting(run, key))
        if seen.setdefault(where, value) != value:
            return False
    return True


def _hashable(value: Any) -> Any:
    if isinstance(value, dict):
        return repr(value)
    return tuple(map(_hashable, value)) if isinstance(value, list) else value


def _order(value: Any) -> tuple[int, float, str]:
    if isinstance(value, (int, float)) and math.isfinite(value):
        return (1, float(value), "")
    return (0 if value is None else 2, 0.0, str(value))
