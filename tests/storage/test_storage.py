"""The harness of storage tests sees every change of a file, and finds every planted fault."""

from __future__ import annotations

import pytest
from helpers import storage_trials as trials
from helpers.sampling import some
from helpers.storage_disk import Disk, read_in
from helpers.storage_faults import FAULTS
from helpers.storage_harness import Harness


def test_the_trace_tells_all_that_happens_to_a_folder(harness: Harness) -> None:
    out = harness.new()
    disk = Disk(out)
    ended = harness.run(out)
    for call in ended.calls:
        disk.follow(call)
    assert ended.code == 0 and disk.after_cut("now") == read_in(out)
    seen = {call.kind for call in ended.calls}
    wanted = "create mkdir write resize rename unlink rmdir sync mark"
    assert seen == set(wanted.split())
    # Made by safetensors' own code, past libc.
    assert any(call.kind == "rename" and ".tmp" in call.path.name for call in ended.calls)


@pytest.mark.parametrize("name", some(FAULTS, 3, 2))
def test_a_planted_fault_is_found(name: str, harness: Harness) -> None:
    fault, faulty = FAULTS[name], harness.with_fault(name)
    # on a busy machine one of two writers may have ended before the other begins
    times = 5 if fault.trials == "two_writers" else 1
    trial = getattr(trials, fault.trials)
    assert any(next(trial(faulty, about=fault.about), None) for _ in range(times))
