"""Titles and captions: the settings that the runs of a figure share."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import chain
from typing import Any

from deepstack import config as conf
from deepstack.analysis.settings import (
    DEPTH,
    OBSERVATION,
    SCHEME,
    SEED,
    TASK,
    Series,
    depth_of,
    scheme_label,
    short_key,
    value_text,
    values_of,
    varying_settings,
)
from deepstack.analysis.statistics import has_diverged
from deepstack.records import ENDED, Run, varying
from deepstack.records.cells import counted

# Settings that every caption shows, with their forms; one group is one item.
GROUPS = (
    {"model.d_model": "d_model {}", "model.n_heads": "n_heads {}", "model.d_ff": "d_ff {}"},
    {"train.batch_size": "batch {}", "task.seq_len": "sequences of {} tokens"},
    {"train.optimizer": "{}", "train.lr": "lr {}", "train.schedule": "{} schedule",
     "train.warmup_steps": "{} warm-up steps"},
)  # fmt: skip
# Keys that titles and these groups show.
TITLE_KEYS = {
    "name", SEED, DEPTH, SCHEME, TASK, "model.decoder_depth", "train.clip", *chain(*GROUPS)
}  # fmt: skip
FORMS = {
    "model.family": "{}",
    "model.activation": "{}",
    "model.norm.kind": "{} norm",
    "model.init.distribution": "init {}",
    "train.precision": "{}",
    "train.steps": "{} steps",
}


def title_of(runs: Sequence[Run], series: Sequence[Series]) -> str:
    """Return the title of runs: `DeepNorm, Post-LN on text, N = 6 to 1000, 3 seeds`."""
    labels = list(dict.fromkeys(scheme_label(run) for run in runs))
    schemes = ", ".join(labels) if len(labels) <= 4 else f"{len(labels)} schemes"
    tasks = list(dict.fromkeys(str(run.get("task.name", "?")) for run in runs))
    words = f"{schemes} on {', '.join(tasks)}"
    depths = [words.replace(" ", "\u00a0") for words in depth_words(runs)]
    words += f", N\u00a0=\u00a0{depths[0]}" + (f"\u00a0to\u00a0{depths[-1]}" if depths[1:] else "")
    seeds = {run.get(SEED, 0) for run in runs}
    words += f", {len(seeds)}\u00a0seeds" if len(seeds) > 1 else ""
    return words + (f", {len(series)} settings" if len(series) > len(labels) else "")


def depth_words(runs: Sequence[Run]) -> list[str]:
    """Return the depths of these runs: `6`, or `20 + 5` for an encoder-decoder."""
    depth_sets = set()
    for run in runs:
        both = run.get("model.family") == "encoder_decoder"
        decoder = [int(run.get("model.decoder_depth") or depth_of(run))] if both else []
        depth_sets.add((depth_of(run), *decoder))
    return [" + ".join(map(str, depths)) for depths in sorted(depth_sets)]


def caption_of(runs: Sequence[Run], depth_settings: Iterable[str] = ()) -> list[str]:
    """Return a caption: shared settings, those that follow depth, the number of unfinished runs.

    It always has width, batch and rate; of the other settings those that differ from the default.
    """
    different = set(varying(runs))

    def value(key: str) -> str | None:
        current = runs[0].get(key)
        return None if key in different or current is None else value_text(current)

    items = [
        ", ".join(counted(form, text) for key, form in group.items() if (text := value(key)))
        for group in GROUPS
    ]
    items[1] = items[1].replace(", sequences of", " ×")
    if "train.clip" in runs[0].flat_config and "train.clip" not in different:
        clip = runs[0].get("train.clip")
        items.append("no clip" if clip is None else f"clip {value_text(clip)}")
    factors = runs[0].get("train.lr_factors") or {}
    if factors and not any(key.startswith("train.lr_factors") for key in different):
        words = ", ".join(f"{role} × {value_text(f)}" for role, f in factors.items())
        items.append(f"lr of {words}")
    for key in _set_otherwise(runs[0]):
        if key not in different:
            form = FORMS.get(key, f"{short_key(key)} {{}}")
            # A file is shown by its name, without its folder.
            items.append(counted(form, value_text(runs[0].flat_config[key]).rpartition("/")[2]))
    items += [f"{short_key(key)} follows N" for key in depth_settings]
    if left := _repeated(runs):
        items.append(f"left out: {counted('{} runs', left)} with the seed of another")
    if going := sum(run.state not in ENDED for run in runs):
        items.append(f"unfinished: {going} of {counted('{} runs', len(runs))}")
    # A line may end after a comma; a name and its value stay together.
    return [re.sub("(?<!,) ", "\u00a0", item) for item in items if item]


def _repeated(runs: Sequence[Run]) -> int:
    """Return the number of runs with the setting, depth and seed of another run."""
    keys = [DEPTH, SEED, *varying_settings(runs)]
    return len(runs) - len({values_of(run, keys) for run in runs})


def _set_otherwise(run: Run) -> list[str]:
    """Return the settings of a run that differ from the default, without TITLE_KEYS."""
    usual = _usual() | run.columns.get("defaults", {})
    skipped = (*OBSERVATION, "train.lr_factors", "runtime.")
    return [
        key
        for key, value in run.flat_config.items()
        if key not in TITLE_KEYS and not key.startswith(skipped)
        if value not in (None, "", {}) and value != usual.get(key)
    ]


@cache
def _usual() -> dict[str, Any]:
    return conf.values(conf.Config())


def seeds_note(counts: Iterable[int]) -> str:
    """Return a note on the number of seeds of a band."""
    numbers = set(counts)
    if not numbers or max(numbers) == 1:
        return ""
    return "n = " + " to ".join(str(n) for n in sorted({min(numbers), max(numbers)}))


def means_note(runs: Sequence[Run]) -> list[str]:
    """Return a note on the runs that diverged, if any did."""
    count = sum(map(has_diverged, runs))
    return [f"left out of the means: {counted('{} diverged runs', count)}"] if count else []


def diverged_note(shown: Iterable[tuple[str, Sequence[Run]]]) -> list[str]:
    """Return a note that names the means with diverged seeds."""
    notes = []
    for name, runs in shown:
        if count := sum(map(has_diverged, runs)):
            notes.append(f"{name} ({count} of {counted('{} seeds', len(runs))})")
    return [f"diverged: {'; '.join(notes)}"] if notes else []
