"""Leaves out runs whose validation losses cannot be compared with the others of a study."""

from collections.abc import Iterable

from deepstack.base.text import counted
from deepstack.records import Run
from deepstack.runs.outcomes import task_of
from deepstack.runs.runs import Runs

MOST_NAMES = 3


def of_one_validation(runs: Runs) -> tuple[Runs, list[str]]:
    """Return the runs whose validation losses may be compared, and a line on those left out.

    Runs of earlier versions validated on the end of the text, another sample for each seed.  Where
    newer runs are beside them, they are left out.
    """
    earlier = [run for run in runs if is_of_earlier_version(run)]
    if not earlier or len(earlier) == len(runs):
        return runs, []
    names = ", ".join(run.name for run in earlier[:MOST_NAMES])
    more = f" and {len(earlier) - MOST_NAMES} more" if len(earlier) > MOST_NAMES else ""
    line = (
        f"left out: {counted('{} runs', len(earlier))} of an earlier version of deepstack, which "
        f"validated on other text ({names}{more}); --where run=NAME,… shows them alone"
    )
    return runs.keep(lambda run: run not in earlier), [line]


def validation_notes(runs: Iterable[Run]) -> list[str]:
    """Return a note on compared runs whose validation sets differ in size, or none.

    The smaller set is a part of the larger one.  No interval over seeds counts the error of the
    part that they do not share.
    """
    sizes = {
        (task_of(run), int(run.meta.get("validation", {}).get("positions", 0))) for run in runs
    }
    known = sorted(number for _, number in sizes if number)
    if len({task for task, _ in sizes}) != 1 or len(known) < 2:
        return []
    return [
        f"the validation sets have {known[0]:,} to {known[-1]:,} positions, and the intervals do "
        "not count the difference; set train.eval_batches so that all have the same"
    ]


def is_of_earlier_version(run: Run) -> bool:
    """Return whether deepstack trained a run with the validation sets of earlier versions."""
    return "data" in run.meta and "validation" not in run.meta and "hidden" not in run.meta
