"""The harness of storage tests finds every fault that is planted in the storage protocol."""

import pytest
from helpers import storage_trials as trials
from helpers.storage_faults import FAULTS
from helpers.storage_harness import Harness

QUICK = ("rows_written_twice", "error_of_the_disk_not_translated", "new_folders_not_synced")
"""The faults that the calls about their own files show in a second, in every rotation."""


@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.slow(turn=turn))
        for turn, name in enumerate(FAULTS)
    ],
)
def test_a_planted_fault_is_found(name: str, harness: Harness) -> None:
    """The slow tests try one call of each kind: the rotation of this commit finds every fault.

    Those about the fault's files come first.
    """
    _, trial, about = FAULTS[name]
    run, faulty = getattr(trials, trial), harness.with_fault(name)
    if trial == "two_writers":
        # on a busy machine one of two writers may have ended before the other begins
        assert any(next(run(faulty), None) for _ in range(5))
    else:
        assert any(next(run(faulty, trials.one_a_kind, where), None) for where in (about, ""))
