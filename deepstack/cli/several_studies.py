"""The studies of a results folder, for commands that read one study."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepstack.records import ENDED
from deepstack.runs import Runs
from deepstack.runs.conditions import Where

MOST_COMMANDS = 4  # that one line of a screen names


def studies_below(
    folder: str | Path, where: Where = (), last: int | None = None
) -> dict[Path, Runs]:
    """Return the runs of each study in a folder; the study with the newest run comes first.

    where, last: as in `deepstack.load_runs`.

    Raises NothingMatchedError without runs.
    """
    studies = Runs.below(folder).select(where, None, last).by_study
    newest = {study: max(one.order for one in runs.summaries) for study, runs in studies.items()}
    return {study: studies[study] for study in sorted(newest, key=newest.__getitem__, reverse=True)}


def rows_of_studies(studies: Mapping[Path, Runs], command: str) -> list[dict[str, Any]]:
    """Return a row for each study: its runs, its newest run, and the command for it."""
    return [
        {
            "study": study.name,
            "runs": len(runs),
            "ended": sum(run.state in ENDED for run in runs),
            "newest run": max(one.order for one in runs.summaries)[0][:16],
            "command": command_for(command, study),
        }
        for study, runs in studies.items()
    ]


def command_for(command: str, study: Path) -> str:
    """Return the command to type for a study: 'deepstack plot results/quick'."""
    return shlex.join(["deepstack", command, str(study)])


def newest_note(folder: str | Path, studies: Mapping[Path, Runs]) -> str:
    """Return the line on a results folder of which the newest study is drawn."""
    newest, *others = studies
    named = [shlex.quote(str(study)) for study in others[:MOST_COMMANDS]]
    named += [f"{len(others) - MOST_COMMANDS} more"] if len(others) > MOST_COMMANDS else []
    drawn = f"{folder} has {len(studies)} studies; these charts are of the newest, {newest.name}"
    return f"{drawn}; others: {', '.join(named)}"
