"""The storage protocol with a trainer of twenty lines: sound as it is, and no fault goes unseen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers import storage_calls
from helpers import storage_trials as trials
from helpers.sampling import some
from helpers.storage_disk import Disk, read_in
from helpers.storage_faults import FOUND_BY
from helpers.storage_harness import Harness, the_server

pytestmark = pytest.mark.skipif(bool(storage_calls.MISSING), reason=storage_calls.MISSING)

Trials = Callable[[Harness], Iterator[str]]
FEW: dict[str, Trials] = {
    "kills": lambda harness: trials.kills(harness, every=40),
    "kills again": lambda harness: trials.kills_again(harness, 3),
    "random kills": lambda harness: trials.random_kills(harness, 4),
    "refusals": lambda harness: trials.refusals(harness, 50, kinds=trials.REFUSALS[:3]),
    "power cuts": lambda harness: trials.power_cuts(harness, every=40),
    "two writers": trials.two_writers,
}
MANY: dict[str, Trials] = {
    "all kills": trials.kills,
    "many kills again": lambda harness: trials.kills_again(harness, 300),
    "many random kills": lambda harness: trials.random_kills(harness, 300),
    "all refusals": trials.refusals,
    "all power cuts": trials.power_cuts,
    "power cuts after kills": lambda harness: (
        line for after in range(1, 120, 7) for line in trials.power_cuts(harness, 3, after=after)
    ),
}
KINDS = [*FEW, *(pytest.param(kind, marks=pytest.mark.slow) for kind in MANY)]


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Harness:
    return Harness(the_server(), tmp_path_factory.mktemp("dummy"))


@pytest.mark.parametrize("trainer", ["dummy", "command"])
def test_the_trace_tells_all_that_happens_to_a_folder(trainer: str, tmp_path: Path) -> None:
    harness = Harness(the_server(), tmp_path, trainer)
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


@pytest.mark.parametrize("kind", KINDS)
def test_the_protocol_is_sound(kind: str, harness: Harness) -> None:
    before = harness.trials
    assert list((FEW | MANY)[kind](harness)) == []
    assert harness.trials > before


@pytest.mark.parametrize("name", some(FOUND_BY, 2))
def test_a_planted_fault_is_found(name: str, harness: Harness) -> None:
    kind, about = FOUND_BY[name]
    faulty = harness.with_fault(name)
    # on a busy machine one of two writers may have ended before the other begins
    times = 5 if kind == "two_writers" else 1
    assert any(next(getattr(trials, kind)(faulty, about=about), None) for _ in range(times))
