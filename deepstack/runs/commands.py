"""The commands that repeat a study, and those that train further runs of it."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from deepstack.base import yaml_reader
from deepstack.base.allowed import RUN_NAME
from deepstack.config.key import Key
from deepstack.config.write import one_line
from deepstack.records import Run, varying
from deepstack.records.published import is_published
from deepstack.runs.origin import START
from deepstack.runs.series import determines, varying_settings
from deepstack.runs.settings import LR, SCHEME, SEED, STEPS, order_of, setting_value, values_of

LARGEST_STUDY = 2**20  # bytes of a study file
MOST_SPLITS = 4  # settings by which runs are tried to be split into grids


def repeat_commands(runs: Sequence[Run]) -> list[str]:
    """Return the commands that train these runs; runs that are there already are skipped.

    Each takes the config.yaml of one run and lists the settings that vary; for commands of the
    user's it takes their study file.  Runs of a loop with a probe have none.
    """
    commands = [command for group in grids(runs) for command in commands_of(group)]
    return list(dict.fromkeys(commands))


def further_commands(
    runs: Sequence[Run], seeds: Sequence[int] = (), rates: Sequence[float] = ()
) -> list[str]:
    """Return the commands that train these settings with other seeds, or other rates.

    None for runs that each start with a run of their own seed, or rate: that run comes first.
    """
    other: dict[str, Sequence[Any]] = {SEED: seeds} if seeds else {LR: rates}
    keys = varying(runs)
    settings = [key for key in keys if key != START and key not in other]
    is_setting = any(key == START and type(key) is Key for key in varying_settings(runs))
    if START in keys and not is_setting and not determines(settings, START, runs):
        return []
    commands = [command for group in grids(runs) for command in commands_of(group, other)]
    return list(dict.fromkeys(commands))


def new_seeds(runs: Sequence[Run], number: int) -> list[int]:
    """Return so many seeds, the first ones that none of these runs has."""
    used = {int(run.get(SEED) or 0) for run in runs}
    return [seed for seed in range(number + len(used)) if seed not in used][:number]


def grids(runs: Sequence[Run]) -> list[list[Run]]:
    """Return the runs in groups, each of which is a full grid of the settings that vary in it."""
    if len(runs) == 0:
        return []
    keys = sorted(varying(runs), key=SEED.__eq__)  # seeds are split last
    sizes = [len(values_tried(runs, key)) for key in keys]
    combinations = {values_of(run, keys) for run in runs}
    total = 1
    for size in sizes:
        total *= size
    same_keys = len({frozenset(open_keys(run)) for run in runs}) == 1
    if not keys or (total == len(combinations) and same_keys and all_scalar(runs, keys)):
        return [list(runs)]
    splits = [split for key in keys[:MOST_SPLITS] if len(split := groups_of(runs, key)) > 1]
    if not splits:  # runs differ in a key that some lack
        return [[run] for run in runs]
    return min(([grid for group in split for grid in grids(group)] for split in splits), key=len)


def groups_of(runs: Sequence[Run], key: str) -> list[list[Run]]:
    """Return the runs of each value of a setting."""
    groups: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        groups.setdefault(values_of(run, [key]), []).append(run)
    return list(groups.values())


def open_keys(run: Run) -> list[str]:
    """Return the options of scheme and task that a run has; other schemes have other ones."""
    return [key for key in run.flat_config if key.startswith(("model.scheme_options.", "task."))]


def all_scalar(runs: Sequence[Run], keys: Sequence[str]) -> bool:
    """Return whether these settings have numbers and words, which a sweep lists with commas."""
    return not any(
        isinstance(setting_value(run, key), list | tuple | dict) for run in runs for key in keys
    )


def values_tried(runs: Sequence[Run], key: str) -> list[Any]:
    """Return the values of a setting, in their order."""
    found = {values_of(run, [key])[0]: setting_value(run, key) for run in runs}
    return sorted(found.values(), key=order_of)


def commands_of(runs: Sequence[Run], other: Mapping[str, Sequence[Any]] | None = None) -> list[str]:
    """Return the command for a grid of runs, with other values of some settings."""
    first, other = runs[0], dict(other or {})
    study = Path(os.path.abspath(first.path)).parent.name
    if not re.fullmatch(RUN_NAME, study):  # of a renamed folder: no command may write there
        return []
    if isinstance(known := first.meta.get("study_file"), dict):
        return command_of_file(runs, known, other)
    if not is_of_deepstack(first) or "command" not in first.meta:
        return []
    lists = {key: values_tried(runs, key) for key in varying(runs)} | other
    several = any(len(each) > 1 for each in lists.values())
    return [command_with(first.path / "config.yaml", lists, first, is_sweep=several)]


def command_of_file(
    runs: Sequence[Run], known: Mapping[str, Any], other: Mapping[str, Sequence[Any]]
) -> list[str]:
    """Return the command for a grid of runs of a study file; none where it is gone or was edited.

    It is typed in the folder of the first command, where the file's own commands find their files.

    known: file, folder, settings and digest, as meta.json has them.
    """
    place, file = (Path(str(known.get(name))) for name in ("folder", "file"))
    settings = known.get("settings")
    if not (isinstance(settings, dict) and settings.keys() <= runs[0].flat_config.keys()):
        return []
    if not os.path.isdir(place) or study_digest(file) != known.get("digest"):
        return []
    lists = {**{key: values_tried(runs, key) for key in settings}, **other}
    if place.samefile(Path.cwd()):
        return [command_with(file, lists, runs[0], is_sweep=True)]
    command = command_with(file, lists, runs[0], is_sweep=True, show=os.path.abspath)
    return [f"cd {shlex.quote(os.fspath(place))} && {command}"]


def study_digest(file: Path) -> str:
    """Return the sha256 of a study file without its grid and name; '' where it cannot be read."""
    if not os.path.isfile(file) or os.path.getsize(file) > LARGEST_STUDY:
        return ""
    tree, problems = yaml_reader.read(file.read_bytes(), "")
    known = {
        key: node.plain() for key, node in tree.section.items() if key not in ("sweep", "name")
    }
    text = json.dumps(known, sort_keys=True, default=str)
    return "" if problems else hashlib.sha256(text.encode()).hexdigest()


def path_of(path: Path) -> str:
    """Return a path as the user typed it, or from the current folder if that is shorter."""
    return min(os.fspath(path), os.path.relpath(path), key=len)


def command_with(
    file: Path,
    lists: Mapping[str, Sequence[Any]],
    run: Run,
    is_sweep: bool,
    show: Callable[[Path], str] = path_of,
) -> str:
    """Return the command that trains a file with these values of its settings.

    run: one of the runs, whose study and plugins the command names.
    show: path -> its text.
    """
    words = ["deepstack", "sweep" if is_sweep else "train", show(file)]
    words += [f"{key}={','.join(map(one_line, each))}" for key, each in lists.items()]
    study = Path(os.path.abspath(run.path)).parent  # "." has no name
    out = study.parent
    out = out.parent if is_published(out) else out  # no command writes there
    words += ["--study", study.name, "--out", show(out)]
    for plugin in run.meta.get("plugins") or []:
        words += ["--plugin", str(plugin.get("file"))]
    return shlex.join(words)


def is_of_deepstack(run: Run) -> bool:
    """Return whether deepstack trained this run, and not a loop of the user's with a probe."""
    settings = (SCHEME, STEPS, "train.optimizer")
    return all(run.get(key) is not None for key in settings)
