"""The harness of storage tests finds every fault that is planted in the storage protocol."""

import pytest
from helpers import storage_trials as trials
from helpers.sampling import some
from helpers.storage_faults import FAULTS
from helpers.storage_harness import Harness


@pytest.mark.parametrize("name", some(FAULTS, 3, 2))
def test_a_planted_fault_is_found(name: str, harness: Harness) -> None:
    _, trial, about = FAULTS[name]
    faulty = harness.with_fault(name)
    # on a busy machine one of two writers may have ended before the other begins
    times = 5 if trial == "two_writers" else 1
    assert any(next(getattr(trials, trial)(faulty, about=about), None) for _ in range(times))
