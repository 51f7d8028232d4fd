"""The methods paragraph of a study: models, data, training, evaluation, statistics, software."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from deepstack.base import counted, value_text
from deepstack.records import Run
from deepstack.runs import (
    LEARNT,
    LR,
    SCHEME,
    SEED,
    STEPS,
    TASK,
    Runs,
    depth_words,
    is_of_deepstack,
    result_of,
    scheme_label,
    values_tried,
)
from deepstack.tools.answer.citations import DEEPSTACK, section
from deepstack.tools.answer.found import Found, joined

FLOOR_DIGITS = 6  # decimals in nats of equal losses of chance
FAMILIES = {
    "encoder": "Transformer encoders",
    "decoder": "Transformer decoders",
    "encoder_decoder": "Transformer encoder-decoders",
}
OPTIMIZER = "train.optimizer"
NOT_LISTED = (
    "name", SEED, SCHEME, "model.depth", "model.decoder_depth", LR, STEPS, TASK, OPTIMIZER,
)  # fmt: skip


def methods_of(runs: Runs, found: Found, keys: Mapping[str, str]) -> str:
    """Return the methods paragraph, or '' for runs that deepstack has not trained.

    Citations are `[@key]`; keys: of each scheme, by its label.
    """
    if not all(map(is_of_deepstack, runs)):
        return ""
    labels = list(dict.fromkeys(map(scheme_label, runs)))
    named = [f"{label} [@{keys[label]}]" if label in keys else label for label in labels]
    depths = depth_words(runs)
    size = [
        f"d_model = {listed(runs, 'model.d_model')}",
        heads(runs),
        f"d_ff = {listed(runs, 'model.d_ff')}",
        listed(runs, "model.activation"),
    ]
    families = [FAMILIES.get(str(one), str(one)) for one in values_tried(runs, "model.family")]
    sentences = [
        f"We trained {joined(families)} with N = {joined(depths)} layers ({', '.join(size)}) and "
        f"the residual schemes {joined(named)}."
        if len(labels) > 1
        else f"We trained {joined(families)} with N = {joined(depths)} layers ({', '.join(size)}) "
        f"and the residual scheme {named[0]}.",
        f"The task was {listed(runs, TASK)}, in sequences of {either(runs, 'task.seq_len')} "
        f"tokens; each run took {either(runs, STEPS)} steps of {either(runs, OPTIMIZER)} "
        f"with batches of {either(runs, 'train.batch_size')} sequences and learning rate "
        f"{rates(runs)} ({schedule(runs)}).",
    ]
    if others := other_settings(runs):
        sentences.append(f"Runs also differed in {others}.")
    if started := sum(run.get("model.start") is not None for run in runs):
        which = "All runs" if started == len(runs) else f"{started} of {len(runs)} runs"
        sentences.append(
            f"{which} began with the weights of runs trained before, whose steps and FLOPs are not "
            "among these."
        )
    by_seed = has_data_by_seed(runs)
    seeds = [str(seed) for seed in values_tried(runs, SEED)]
    word = "seed" if len(seeds) == 1 else "seeds"
    sentences.append(
        f"Each setting was trained with the {word} {joined(seeds)}, where a seed sets the initial "
        f"weights{' of other runs' * (started > 0)}{', the data' * by_seed} and the order of "
        "batches."
    )
    sentences.append(
        f"Losses are means over one held-out set{' for each seed' * by_seed} at the end of "
        "training; a run counts as learning "
        f"from context if {LEARNT}."
    )
    sentences += found.sure
    sentences.append(software(runs))
    return " ".join(sentences)


def listed(runs: Sequence[Run], key: str) -> str:
    """Return the values of a setting in words."""
    return joined([value_text(value) for value in values_tried(runs, key)])


def either(runs: Sequence[Run], key: str) -> str:
    """Return the values of a setting of which each run has one: '8, 16 or 32'."""
    return " or ".join(listed(runs, key).rsplit(" and ", 1))


def has_data_by_seed(runs: Sequence[Run]) -> bool:
    """Return whether runs that differ in the seed alone have other losses of chance."""
    floors: dict[str, set[float]] = {}
    for run in runs:
        setting = {key: value for key, value in run.flat_config.items() if key != SEED}
        if (floor := result_of(run).floor) is not None:
            floors.setdefault(repr(setting), set()).add(round(floor, FLOOR_DIGITS))
    return any(len(of_setting) > 1 for of_setting in floors.values())


def heads(runs: Sequence[Run]) -> str:
    """Return the numbers of attention heads: '1 head', '2 and 4 heads'."""
    return counted("{} heads", listed(runs, "model.n_heads"))


def rates(runs: Sequence[Run]) -> str:
    """Return the learning rates; many of them as a range with their number."""
    found = values_tried(runs, LR)
    if len(found) <= 6:
        return listed(runs, LR)
    return f"{value_text(found[0])} to {value_text(found[-1])} ({len(found)} values)"


def schedule(runs: Sequence[Run]) -> str:
    """Return schedule, warm-up and clipping in words."""
    clips = values_tried(runs, "train.clip")
    parts = [
        f"{listed(runs, 'train.schedule')} schedule",
        f"{listed(runs, 'train.warmup_steps')} steps of warm-up",
    ]
    if clips == [None]:
        parts.append("no clipping")
    else:
        parts.append(f"gradient norm clipped at {listed(runs, 'train.clip')}")
    return ", ".join(parts)


def other_settings(runs: Runs) -> str:
    """Return the other settings that vary, with their values."""
    keys = [key for key in runs.varying if key not in NOT_LISTED]
    stated = ("model.d_model", "model.d_ff", "model.n_heads", "train.batch_size", "task.seq_len")
    keys = [key for key in keys if key not in stated]
    return joined([f"{key.words} ({listed(runs, key)})" for key in keys]) if keys else ""


def software(runs: Sequence[Run]) -> str:
    """Return versions, commit and processors of the runs."""
    environments = [section(run.meta, "environment") for run in runs]
    commits = {str(section(run.meta, "git").get("commit") or "")[:12] for run in runs} - {""}
    text = f"Runs were made with deepstack [@{DEEPSTACK}] {known(environments, 'deepstack')}"
    text += f" (commit {joined(sorted(commits))})" if commits else ""
    text += f" and PyTorch {known(environments, 'torch')}"
    devices = known(
        environments, "cpu_model" if known(environments, "device") == "cpu" else "device_name"
    )
    return f"{text} on {devices}." if devices else f"{text}."


def known(environments: Sequence[Mapping[str, Any]], name: str) -> str:
    """Return the values of an entry of the environments, joined."""
    found = sorted({str(one[name]) for one in environments if one.get(name)})
    return joined(found) if found else ""
