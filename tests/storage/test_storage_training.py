"""`deepstack train` stopped, refused and cut off in every way: the same command ends the same."""

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from helpers import storage_trials as trials
from helpers.extensions import known_words
from helpers.sampling import ROTATION, rotating, some
from helpers.storage_harness import Harness, rows_of
from helpers.storage_run import STEPS

Trials = Callable[[Harness], Iterator[str]]
FEW: dict[str, Trials] = {
    "kills": lambda harness: trials.kills(harness, trials.each(240)),
    "kills again": lambda harness: trials.kills_again(harness, trials.at_random(harness, 1)),
    "kills at the end": lambda harness: trials.kills_again(
        harness, trials.at_the_end(harness, trials.each(30))
    ),
    "random kills": lambda harness: trials.random_kills(harness, 2),
    "refusals": lambda harness: trials.refusals(
        harness, trials.each(250), kinds=trials.REFUSALS[1:3]
    ),
    "power cuts": lambda harness: trials.power_cuts(harness, trials.each(300)),
}
# One call of each kind, another one at each commit; the slow tests try a third of these lines.
SOME: dict[str, Trials] = {
    "a kill at a call of each kind": lambda harness: trials.kills(harness, trials.one_a_kind),
    "a second kill at a call of each kind": lambda harness: trials.kills_again(
        harness, trials.at_the_end(harness, trials.one_a_kind)
    ),
    "some kills again": lambda harness: trials.kills_again(
        harness, trials.at_random(harness, 20, ROTATION)
    ),
    "some random kills": lambda harness: trials.random_kills(harness, 30, ROTATION),
    "a full disk at a call of each kind": lambda harness: trials.refusals(
        harness, trials.one_a_kind, kinds=trials.REFUSALS[1:2]
    ),
    "a refusal at a call of each kind": trials.rotating_refusals,
    "a power cut at a call of each third kind": lambda harness: trials.power_cuts_after_kills(
        harness, lambda calls: trials.one_a_kind(calls)[ROTATION % 3 :: 3]
    ),
}
MANY: dict[str, Trials] = {
    "all kills": trials.kills,
    "many kills again": lambda harness: trials.kills_again(harness, trials.at_random(harness, 100)),
    "all kills at the end": lambda harness: trials.kills_again(harness, trials.at_the_end(harness)),
    "many random kills": lambda harness: trials.random_kills(harness, 200),
    "a full disk at every call": lambda h: trials.refusals(h, kinds=trials.REFUSALS[1:2]),
    "errors from every call on": lambda h: trials.refusals(h, kinds=trials.REFUSALS[4:5]),
    "more refusals": lambda harness: trials.refusals(harness, trials.each(12)),
    "all power cuts": trials.power_cuts_after_kills,
}
KINDS = [
    *some(FEW, 3),
    *rotating(SOME, 3),
    *(pytest.param(kind, marks=pytest.mark.full) for kind in MANY),
]


@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_as_if_nothing_had_been(kind: str, harness: Harness) -> None:
    assert list((FEW | SOME | MANY)[kind](harness)) == []


# --- signals --------------------------------------------------------------------------------


@pytest.mark.parametrize(("signal", "code"), [(2, 130), (15, 143), (1, 129)])
@pytest.mark.parametrize("times", [1, 2])
def test_a_signal_saves_and_a_second_ctrl_c_ends_at_once(
    signal: int, code: int, times: int, harness: Harness
) -> None:
    out = harness.new()
    ended = harness.run(out, signals=((3, signal),) * times)
    assert ended.code == code
    assert rows_of(out) == 3
    # Schedulers send SIGTERM more than once: so soon it is the same request.
    assert ended.promised == (2 if (signal, times) == (2, 2) else 3)
    assert harness.go_on(out, ended.promised) == []


@pytest.mark.parametrize(
    "times",
    [2, pytest.param(20, marks=pytest.mark.slow), pytest.param(100, marks=pytest.mark.full)],
)
def test_signals_at_any_moment(times: int, harness: Harness) -> None:
    """One signal or two at random times; signals before the handlers are not distinguished."""
    random, length = Random(ROTATION), harness.alone.seconds
    for _ in range(times):
        out, number = harness.new(), random.choice((2, 15))
        first, gap = random.uniform(0, length), random.choice((None, 0.0, 0.01))
        sent = [first] if gap is None else [first, first + gap]
        ended = harness.run(out, sent=[(seconds, number) for seconds in sent])
        where = f"signal {number} after {sent}"
        if ended.first not in (None, STEPS + 1):  # training had begun
            assert ended.code in (0, 128 + number), f"{where}: exit {ended.code}: {ended.stderr}"
        assert harness.go_on(out, ended.promised) == [], where


# --- one folder, several processes ----------------------------------------------------------


@pytest.mark.parametrize(
    ("starters", "rounds"),
    [
        (3, 2),
        pytest.param(8, 5, marks=pytest.mark.slow),
        pytest.param(20, 20, marks=pytest.mark.full),
    ],
)
def test_one_process_of_several_works_and_the_others_are_refused_in_two_seconds(
    starters: int, rounds: int, harness: Harness
) -> None:
    """The working one is stopped once it is alone, and the next round resumes from it."""
    settings = ("train.steps=100000", "train.eval_every=0", "log.layers_every=0")
    settings += (*known_words(["log.attribution_every=0"]), "train.eval_batches=1")
    harness = replace(harness, settings=settings, scratch=harness.scratch / f"{starters}")
    out = harness.new()
    assert harness.run(out, signals=((1, 15),)).code == 143
    for number in range(rounds):
        jobs = [harness.job(out, pause=0.02) for _ in range(starters)]
        every = harness.run_all(jobs, holds=True)
        assert [ended.code for ended in every if ended.first is not None] == [143], number
        for ended in (ended for ended in every if ended.first is None):
            assert ended.code == 5, (number, ended.stderr)
            assert {call.kind for call in ended.calls} <= {"sync"}, ended.calls
            assert re.search(r"^deepstack: /\S+ is in use by process \d+ on \S+$", ended.stderr)
            assert ended.seconds < 2 or starters > 3
    rows = rows_of(out)
    alone = harness.new()
    assert harness.run(alone, signals=((rows, 15),)).code == 143
    logs = [next(folder.glob("*/*/steps.csv")).read_bytes() for folder in (out, alone)]
    assert rows > rounds and logs[0] == logs[1]


# --- a disk that is full ---------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 4 MB in memory; needs root."""
    disk = tmp_path / "small"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)]
    if not shutil.which("mount") or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("cannot mount a small disk here (needs root)")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize(
    "rooms",
    [
        (0, 160),
        pytest.param(range(0, 400, 40), marks=pytest.mark.slow),
        pytest.param(range(0, 400, 8), marks=pytest.mark.full),
    ],
)
def test_a_full_disk_ends_the_run_and_space_lets_it_continue(
    rooms: Sequence[int], small_disk: Path, harness: Harness
) -> None:
    codes = [code_on_full_disk(harness, small_disk, room) for room in rooms]
    assert codes[0] == 5


def code_on_full_disk(harness: Harness, disk: Path, room: int) -> int:
    """Run on a disk with so many KB free, and once more when there is space; the first code."""
    out = disk / "results"
    out.mkdir()
    filler = disk / "filler"
    filler.write_bytes(bytes(shutil.disk_usage(disk).free - 1024 * room))
    ended = harness.run(out, None)
    assert ended.code in (0, 5), ended.stderr
    assert ended.code == 0 or re.fullmatch(r"deepstack: .*\bMB\b.*\n", ended.stderr), ended.stderr
    subprocess.run(["mount", "-o", "remount,size=16m", str(disk)], check=True)
    assert harness.go_on(out, 0, tidy=False) == []
    shutil.rmtree(out)
    filler.unlink()
    subprocess.run(["mount", "-o", "remount,size=4m", str(disk)], check=True)
    return ended.code
