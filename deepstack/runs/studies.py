"""Finds the runs below folders and groups them by study."""

import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from deepstack.base.errors import ConfigError, ResourceError
from deepstack.base.registry import unknown
from deepstack.config.identity import is_of_experiment
from deepstack.records import ENDED, Run, find_runs
from deepstack.runs.conditions import Where
from deepstack.runs.runs import Runs
from deepstack.runs.validation import is_of_earlier_version, of_one_validation

Result = TypeVar("Result")
Folders = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def list_folders(folders: Folders) -> list[str | os.PathLike[str]]:
    """Return one folder or several as a list."""
    return [folders] if isinstance(folders, str | os.PathLike) else list(folders)


def find_studies(
    folders: Sequence[str | os.PathLike[str]],
    damage_of: Callable[[Run], str | None] = Run.damage,
    where: Where = (),
    sort: str | None = None,
    last: int | None = None,
) -> tuple[dict[Path, Runs], list[str]]:
    """Group the runs below folders by study; also return a sentence for each run that is left out.

    The runs of several folders form one study, `Path()`.  Of runs with equal configuration and
    seed, it has one: the first that has ended, else the first with the most steps.  A study has
    only runs whose validation losses may be compared.

    damage_of: why a run cannot be read, or None.
    where, sort, last: as in `deepstack.load_runs`.
    """
    is_joined = len(folders) > 1
    studies: dict[Path, list[Run]] = {}
    skipped: list[str] = []
    every = Runs(run for folder in folders for run in find_runs(folder))
    chosen = every.select(where, sort, last)
    damage = {run: wrong for run in chosen if (wrong := damage_of(run))}
    readable = [run for run in chosen if run not in damage]
    counted = counted_of_equal(readable) if is_joined else {run: run for run in readable}
    for run in chosen:
        members = studies.setdefault(Path() if is_joined else run.path.parent, [])
        if run in damage:
            skipped.append(f"run {run.name} is left out: {damage[run]}")
        elif (same := counted[run]) is run:
            members.append(run)
        elif same.path.resolve() != run.path.resolve():
            skipped.append(f"{run.path} is left out: the same configuration as {same.path}")
    compared = {}
    for study, members in studies.items():
        compared[study], lines = of_one_validation(Runs(members))
        skipped += [f"{study.name}: {line}" if len(studies) > 1 else line for line in lines]
    return compared, skipped


def counted_of_equal(runs: Iterable[Run]) -> dict[Run, Run]:
    """Return for each run the one of its configuration and seed that counts.

    It is the first that has ended, else the first with the most steps.
    """
    equal: dict[str, list[Run]] = {}
    for run in runs:
        equal.setdefault(experiment_of(run), []).append(run)
    return {run: max(group, key=progress_of) for group in equal.values() for run in group}


def progress_of(run: Run) -> tuple[bool, int]:
    """Return whether a run has ended, and its number of steps if it has not."""
    has_ended = run.state in ENDED
    return has_ended, 0 if has_ended else int(run.status.get("step") or 0)


def refuse_unknown_diagnostic(name: str | None, runs: Iterable[Run]) -> None:
    """Raise ConfigError for a per-layer diagnostic that is neither recorded by a run nor known."""
    known = {key for run in runs for key in (*run.columns.get("layers", {}), *run.layer_names())}
    if name is not None and known and name not in known:
        command = "deepstack list diagnostics"
        raise ConfigError(unknown("diagnostic of these runs", name, sorted(known), command))


def use_readable(runs: Runs, skipped: list[str], use: Callable[[Runs], Result]) -> Result:
    """Return use(runs), leaving out runs of which it reads a damaged file.

    `use` is called again whenever it raises ResourceError and some of its runs are damaged; they
    are left out, and `skipped` gets a sentence for each.
    """
    readable = runs
    while True:
        try:
            return use(readable)
        except ResourceError:
            damage = {run: wrong for run in readable if (wrong := run.damage(layers=True))}
            if not damage:
                raise
            skipped += [f"run {run.name} is left out: {wrong}" for run, wrong in damage.items()]
            readable = Runs(run for run in readable if run not in damage)


def experiment_of(run: Run) -> str:
    """Return the configuration of a run as text, seed included, without names and `runtime`."""
    settings = {k: v for k, v in run.flat_config.items() if is_of_experiment(k)}
    facts = [settings, run.meta.get("plugins", []), is_of_earlier_version(run)]
    return json.dumps(facts, sort_keys=True, default=str)
