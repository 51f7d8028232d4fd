"""`model.start` as a setting: which training came before, whatever the names of its folders."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deepstack.config.key import SEED, Key
from deepstack.records import Run

START = Key("model.start")
Trained = Sequence[Mapping[str, Any]]


class Origin(Key):
    """The key `model.start`, whose value is the training before a run, not the folder's path.

    Runs that grow or are fine-tuned with three seeds start with three folders.  These are one
    setting if the runs before them differ in nothing but the seed, and in settings that each shares
    with its own run.

    keys: the settings but the seed in which any of the runs differs from one trained before it.
    studies: the folder's name for each training, where these tell them apart; else empty.
    """

    keys: Sequence[str] = ()
    studies: Mapping[str, str] = {}

    @classmethod
    def of_runs(cls, runs: Sequence[Run]) -> Origin:
        origin = cls(START)
        keys = {key for run in runs for one in trained_before(run) for key in one}
        origin.keys = sorted(keys - {SEED})
        names = {(origin.value_of(run), study_before(run)) for run in runs if trained_before(run)}
        if len(names) == len({name for _, name in names}) == len({code for code, _ in names}):
            origin.studies = {str(code): name for code, name in names}
        return origin

    def value_of(self, run: Run) -> str | None:
        """Return the training before a run: its study, or six hex digits of its settings.

        None for a run that starts anew, and the path for a run of an earlier version, which did not
        record the training before it.
        """
        if (path := run.flat_config.get(START)) is None:
            return None
        if not (before := trained_before(run)):
            return str(path)
        values = [[one.get(key, run.flat_config.get(key)) for key in self.keys] for one in before]
        code = hashlib.sha256(json.dumps(values, default=str).encode()).hexdigest()[:6]
        return self.studies.get(code, code)


def trained_before(run: Run) -> Trained:
    """Return how each run that was trained before this one differs from it, the last one first."""
    before: Trained = run.meta.get("start", {}).get("settings", [])
    return before


def study_before(run: Run) -> str:
    """Return the study of the run that a run starts with."""
    path = Path(run.meta["start"]["run"])
    return (path.parent if path.name == "config.yaml" else path).parent.name
