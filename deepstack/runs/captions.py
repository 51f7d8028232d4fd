"""Titles and captions: the settings that the runs of a figure share."""

import re
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

from deepstack import config as conf
from deepstack.base.text import counted, value_text
from deepstack.config.identity import is_of_experiment
from deepstack.config.key import Key
from deepstack.config.schema import nested
from deepstack.records import ENDED, Run, varying
from deepstack.runs.runs import Runs
from deepstack.runs.series import OBSERVATION, Series
from deepstack.runs.settings import (
    DEPTH,
    LR,
    SCHEME,
    SEED,
    TASK,
    WIDTH,
    depth_of,
    scheme_label,
    setting_value,
    values_of,
)
from deepstack.runs.statistics import has_diverged

# Settings that every caption shows; of the others it shows those that differ from the default.
ALWAYS = (
    "model.d_model", "model.d_ff", "train.batch_size", "task.seq_len", "train.lr", "train.clip"
)  # fmt: skip
STEPS = "train.steps"
IN_TITLE = ("name", SEED, DEPTH, SCHEME, TASK, "model.decoder_depth")
MOST_DEPTHS = 4  # whose values of a setting a caption lists
NO_SETTING = ("runtime.", *OBSERVATION)  # starts of keys that change no number


def title_of(runs: Sequence[Run], series: Sequence[Series]) -> str:
    """Return the title of runs: `DeepNorm, Post-LN on text, N = 6 to 1000, 3 seeds`."""
    labels = list(dict.fromkeys(scheme_label(run) for run in runs))
    schemes = ", ".join(labels) if len(labels) <= 4 else f"{len(labels)} schemes"
    tasks = list(dict.fromkeys(str(run.get("task.name", "?")) for run in runs))
    known = [task for task in tasks if task != "unnamed"]
    words = f"{schemes} on {', '.join(known)}" if known else schemes
    depths = [words.replace(" ", "\u00a0") for words in depth_words(runs)]
    if depths != ["0"]:  # runs of commands may have no depth
        to = f"\u00a0to\u00a0{depths[-1]}" if depths[1:] else ""
        words += f", N\u00a0=\u00a0{depths[0]}{to}"
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


def sides_note(runs: Sequence[Run]) -> list[str]:
    """Return a note on the layers of encoder and decoder, if there are two stacks."""
    sides = [run.columns.get("stacks", {}) for run in runs]
    if not all(len(stacks) == 2 for stacks in sides):
        return []
    depths = {stacks["encoder"] for stacks in sides}
    first = f"layers 1 to {min(depths)} are" if len(depths) == 1 else "the first layers are"
    return [f"{first} the encoder's, those after them the decoder's"]


def caption_of(runs: Runs, depth_settings: Iterable[Key] = ()) -> list[str]:
    """Return a caption: the shared settings and those that follow depth.

    It always has width, batch and rate; of the other settings those that differ from the default.
    """
    hidden = {*IN_TITLE, *varying(runs)}
    usual = _usual() | runs[0].columns.get("defaults", {})
    items = []
    for key, value in runs[0].flat_config.items():
        is_set = value not in (None, "", {}) and value != usual.get(key)
        if key in hidden or key.startswith(NO_SETTING):
            continue
        if is_set or key in ALWAYS:
            text = value_text(value)
            if " " not in text:  # a file is shown by its name, without its folder
                text = text.rpartition("/")[2]
            items.append(f"{Key(key).short} {text}")
    items += [follows_depth(runs, key) for key in depth_settings]
    # A line may end after a comma; a name and its value stay together.
    return [re.sub("(?<!,) ", "\u00a0", item) for item in items]


def settings_line(runs: Sequence[Run], depth_settings: Iterable[Key] = ()) -> str:
    """Return width, steps and learning rate in one line: `d_model 32 · 200 steps · lr 0.001`.

    Settings that vary, and those that runs of other trainers lack, are left out; a rate that is
    chosen for each depth has its two ends.
    """
    lacking = [key for key in (STEPS, WIDTH, LR) if runs[0].get(key) is None]
    differing = [*varying(runs), *lacking]
    items = [counted("{} steps", runs[0].get(STEPS))] if STEPS not in differing else []
    widths = [f"d_model {runs[0].get(WIDTH)}"] if WIDTH not in differing else []
    if LR not in differing:
        items.append(f"lr {value_text(runs[0].get(LR))}")
    elif LR in depth_settings:
        words = follows_depth(runs, Key(LR))
        if " at " in words:  # one value at each depth
            ordered = sorted(runs, key=depth_of)
            ends = [value_text(setting_value(run, Key(LR))) for run in (ordered[0], ordered[-1])]
            words = f"lr {' to '.join(ends)} by N"
        items.append(words)
    return "\u00a0· ".join(item.replace(" ", "\u00a0") for item in [*widths, *items])


def runs_notes(runs: Runs) -> list[str]:
    """Return notes on the runs that a figure hides, and on those that are unfinished."""
    going = sum(run.state not in ENDED for run in runs)
    unfinished = f"unfinished: {going} of {counted('{} runs', len(runs))}" if going else ""
    return list(filter(None, [hidden_note(runs), unfinished]))


def follows_depth(runs: Sequence[Run], key: Key) -> str:
    """Return the values of a setting that is chosen for each depth: 'lr 0.01, 0.005 at N 6, 48'.

    Of more than four depths it is the first and the last one's: 'lr 0.01 at N 6 to 0.001 at N 96'.
    """
    by_depth: dict[int, dict[str, None]] = {}
    for run in sorted(runs, key=depth_of):
        text = value_text(setting_value(run, key)).rpartition("/")[2]
        by_depth.setdefault(depth_of(run), {})[text] = None
    if any(len(values) > 1 for values in by_depth.values()):
        return f"{key.short} by N and setting"
    values = {depth: next(iter(texts)) for depth, texts in by_depth.items()}
    if len(values) > MOST_DEPTHS:
        (first, one), *_, (last, other) = values.items()
        return f"{key.short} {one} at N {first} to {other} at N {last}"
    return f"{key.short} {', '.join(values.values())} at N {', '.join(map(str, values))}"


def shared_settings(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the settings that all these runs have in common, nested as in a config."""
    differing = varying(runs)
    settings = runs[0].flat_config.items()
    return nested({k: v for k, v in settings if k not in differing and is_of_experiment(k)})


def versions_notes(runs: Iterable[Run]) -> list[str]:
    """Return a note for each script of the user's that runs had in several versions."""
    versions: dict[str, set[str]] = {}
    for run in runs:
        trainer = run.meta.get("trainer")
        files = trainer.get("files") if isinstance(trainer, dict) else None
        for name, digest in files.items() if isinstance(files, dict) else ():
            versions.setdefault(name, set()).add(str(digest))
    return [
        f"the runs had {len(digests)} versions of {name}, whose losses are compared here"
        for name, digests in versions.items()
        if len(digests) > 1
    ]


def hidden_note(runs: Runs) -> str:
    """Return a note on runs with the setting, depth and seed of another run, or ''."""
    keys = [DEPTH, SEED, *runs.varying]
    hidden = len(runs) - len({values_of(run, keys) for run in runs})
    text = f"{counted('{} runs', hidden)} hidden: same setting and seed as another run"
    return text if hidden else ""


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
