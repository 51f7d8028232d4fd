"""Finds the runs below folders and groups them by study."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from deepstack.records import Run, find_runs
from deepstack.records.run import NOT_THE_EXPERIMENT


def find_studies(
    folders: Sequence[str | os.PathLike[str]],
) -> tuple[dict[Path, list[Run]], list[str]]:
    """The runs that are looked at together, by study, and a sentence for each that is left out.

    Those of several folders are looked at as one study, `Path()`; of runs with one configuration,
    seed included, the first alone is taken.
    """
    together = len(folders) > 1
    studies: dict[Path, list[Run]] = {}
    skipped: list[str] = []
    seen: dict[str, Run] = {}
    for run in [run for folder in folders for run in find_runs(folder)]:
        members = studies.setdefault(Path() if together else run.path.parent, [])
        if together and (same := seen.setdefault(experiment_of(run), run)) is not run:
            if same.path.resolve() != run.path.resolve():
                skipped.append(f"{run.path} is left out: the same configuration as {same.path}")
        elif wrong := run.damage(layers=True):
            skipped.append(f"run {run.name} is left out: {wrong}")
        else:
            members.append(run)
    return studies, skipped


def experiment_of(run: Run) -> str:
    """What makes a run this one: its configuration, seed included, without names and `runtime`."""
    kept = {k: v for k, v in run.config.items() if k not in NOT_THE_EXPERIMENT}
    return json.dumps([kept, run.meta.get("plugins", [])], sort_keys=True, default=str)
