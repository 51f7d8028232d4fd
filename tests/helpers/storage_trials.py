"""Kinds of trials: each yields the faults of a training in words, nothing for a sound one.

kills         before every call, in the middle of every write and behind every other call
kills_again   at a call, and again at a call of the run that goes on: at random, or as it ends
random_kills  by the clock, again and again
refusals      a full disk, an I/O error, a quota, a short write at every call
power_cuts    behind every call, in every way of storage_disk
two_writers   started at once
"""

import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random

from helpers.sampling import ROTATION, one_of_each
from helpers.storage_calls import FAIL_ON, FAIL_ONCE, KILL_AMID, KILL_BEFORE, SHORT, Call
from helpers.storage_disk import WAYS, Disk, write_out
from helpers.storage_harness import LOGS, Ended, Harness

KILLED = -9
RESOURCES = 5
REFUSALS = (
    (SHORT, 0),
    (FAIL_ONCE, errno.ENOSPC),
    (FAIL_ON, errno.ENOSPC),
    (FAIL_ONCE, errno.EIO),
    (FAIL_ON, errno.EIO),
    (FAIL_ON, errno.EDQUOT),
)


Choice = Callable[[Sequence[Call]], Sequence[Call]]


def all_calls(calls: Sequence[Call]) -> Sequence[Call]:
    """Return every call."""
    return calls


def each(number: int) -> Choice:
    """Return a choice of every `number`-th call."""
    return lambda calls: calls[::number]


RANDOM = re.compile(r"^(\.tmp)\w+$|\.[0-9a-f]{8}(\.new)$|^(\.(?:draft|gone)-\d+)-[0-9a-f]{8}$")


def without_draft(name: str) -> str:
    """Return the name of a file without the random part that its draft has."""
    return RANDOM.sub(lambda match: match[match.lastindex or 0], name)


def kind_of(call: Call) -> tuple[str, str, bool]:
    """Return the kind of a call, the kind of its file, and whether it writes a file's first bytes.

    The kind of a file is its path without numbers and draft names.
    """
    names = [re.sub(r"\d+", "N", without_draft(name)) for name in call.path.parts[-3:]]
    if names[-1].endswith((".npy", ".npy.new")):
        names[-1] = "layers"  # the files of all diagnostics are written by one function
    return call.kind, "/".join(names), call.kind == "write" and call.place == 0


def one_a_kind(calls: Sequence[Call]) -> Sequence[Call]:
    """Return one call of each kind, up to the last checkpoint and after it.

    It is another one at another commit.
    """
    renamed = [c.number for c in calls if c.kind == "rename" and c.target.name.isdecimal()]
    return one_of_each(calls, lambda call: (kind_of(call), call.number > max(renamed, default=0)))


def chosen_calls(harness: Harness, choice: Choice, about: str) -> Sequence[Call]:
    """Return the chosen calls that have `about` in their path."""
    calls = [call for call in harness.alone.calls if call.kind != "mark"]
    about_it = {call.number for call in calls if about in f"{call.path} {call.target}"}
    assert about_it, about
    return [call for call in choice(calls) if call.number in about_it]


def kills(harness: Harness, choice: Choice = all_calls, about: str = "") -> Iterator[str]:
    """A kill at a call; then the same command."""
    chosen = chosen_calls(harness, choice, about)
    kinds = {kind_of(call) for call in chosen}
    calls = [call for call in harness.alone.calls if call.kind != "mark"]  # it has no path
    following = {call.number - 1: kind_of(call) for call in calls}
    for call in chosen:
        # Before the next call, the disk is as behind any other call.
        is_behind_another = call.kind != "write" and following.get(call.number) in kinds
        for mode in (KILL_BEFORE,) if is_behind_another else (KILL_BEFORE, KILL_AMID):
            out = harness.new()
            ended = harness.run(out, mode, call.number)
            where = f"killed at call {call.number}, mode {mode}"
            yield from continued(where, harness, out, ended, KILLED)


def continued(
    where: str, harness: Harness, out: Path, ended: Ended, code: int, least: int = 0
) -> Iterator[str]:
    """Return the problems once the run goes on; keep the folder if there are any.

    code: the expected exit code.  least: the last checkpoint of earlier processes.
    """
    if ended.code != code:
        yield f"{where}: exit {ended.code}: {ended.stderr}"
        return
    tidy = all(call.kind not in ("unlink", "rmdir") for call in ended.calls if call.failed)
    wrong = harness.go_on(out, max(least, ended.promised), tidy)
    yield from (f"{where}: {line}" for line in wrong)
    if not wrong:
        shutil.rmtree(out)


def kills_again(harness: Harness, pairs: Sequence[tuple[int, int]]) -> Iterator[str]:
    """A kill at a call, and one of the run that goes on."""
    for first, second in pairs:
        out = harness.new()
        ended = harness.run(out, KILL_BEFORE, first)
        again = harness.run(out, KILL_AMID, second)
        where = f"killed at call {first}, and {second} of the run that goes on"
        yield from continued(where, harness, out, again, again.code and KILLED, ended.promised)


def at_random(harness: Harness, count: int, seed: int = 0) -> list[tuple[int, int]]:
    """So many pairs of calls."""
    random, total = Random(seed), harness.alone.count
    return [(random.randint(1, total), random.randint(1, total)) for _ in range(count)]


def at_the_end(harness: Harness, choice: Choice = all_calls) -> list[tuple[int, int]]:
    """The call between the last checkpoint and the status 'done'; each of the run that ends so."""
    drafts = [call for call in harness.alone.calls if call.path.name.startswith(".status.json.")]
    first, out = max(call.number for call in drafts if call.kind == "create"), harness.new()
    harness.run(out, KILL_BEFORE, first)
    calls = [call for call in harness.run(out).calls if call.kind != "mark"]
    return [(first, call.number) for call in choice(calls)]


def random_kills(harness: Harness, wanted: int, seed: int = 0) -> Iterator[str]:
    """SIGKILL after a random time, until a run is done; new runs until so many are killed."""
    random, length, killed = Random(seed), harness.alone.seconds, 0
    while killed < wanted:
        out, least, times, code = harness.new(), 0, list[float](), KILLED
        while code == KILLED and len(times) < 8:
            times.append(random.uniform(0, length))
            ended = harness.run(out, sent=[(times[-1], -KILLED)])
            least, code = max(least, ended.promised), ended.code
            killed += code == KILLED
        yield from continued(f"killed after {times}", harness, out, ended, code and KILLED, least)


def refusals(
    harness: Harness,
    choice: Choice = all_calls,
    about: str = "",
    kinds: Sequence[tuple[int, int]] = REFUSALS,
) -> Iterator[str]:
    """The disk refuses: exit 5 and one line; once it accepts writes, the same command works."""
    for call in chosen_calls(harness, choice, about):
        for mode, error in kinds:
            name = errno.errorcode.get(error, "short")
            out = harness.new()
            ended = harness.run(out, mode, call.number, error)
            where = f"{name} at call {call.number}, mode {mode}"
            refused = [call for call in ended.calls if call.failed == error and error]
            for line in answered(ended, refused, os.strerror(error)):
                yield f"{where}: {line}"
            yield from continued(where, harness, out, ended, ended.code)


def rotating_refusals(harness: Harness) -> Iterator[str]:
    """One kind of refusal at one call of each kind, both chosen by ROTATION."""
    for number, call in enumerate(chosen_calls(harness, one_a_kind, "")):
        kind = REFUSALS[(ROTATION + number) % len(REFUSALS)]
        yield from refusals(harness, lambda calls, call=call: [call], kinds=[kind])


def answered(ended: Ended, refused: Sequence[Call], cause: str) -> Iterator[str]:
    """Return the problems of exit code and message after refused calls."""
    about = f"after {[(call.kind, call.path.name) for call in refused[:3]]}"
    # Files that are only to be removed (an old checkpoint, a draft) may stay.
    if ended.code == 0 and all(call.kind in ("unlink", "rmdir") for call in refused):
        return
    line = rf"deepstack: /\S+: .*{re.escape(cause)}.* \(\d+ MB free\)\n"
    if ended.code != RESOURCES or not re.fullmatch(line, ended.stderr):
        yield f"exit {ended.code}, no line with path, cause and space {about}: {ended.stderr}"


def power_cuts(
    harness: Harness,
    choice: Choice = all_calls,
    about: str = "",
    after: int = 0,
    seed: int = 0,
    tried: set[int] | None = None,
) -> Iterator[str]:
    """Try each content that a power cut behind a call may leave; then the same command.

    after: the run that is cut goes on after a kill behind this call; the killed process had synced
    as much as its calls say.
    tried: contents of disks that need no further trial.
    """
    out, promise = harness.new(), 0
    tried = set() if tried is None else tried
    disk = Disk(out)
    if after:
        killed = harness.run(out, KILL_AMID, after)
        promise = killed.promised
        for call in killed.calls:
            disk.follow(call)
    calls = harness.run(out).calls
    files = [call for call in calls if call.kind != "mark"]
    chosen = [call for call in choice(files) if about in f"{call.path} {call.target}"]
    numbers = {call.number for call in (*chosen, files[-1])}
    for call in calls:
        disk.follow(call)
        if call.kind == "mark":
            promise = max(promise, call.place)
        if call.kind == "mark" or call.number not in numbers:
            continue
        for way in WAYS[1:]:
            found = disk.after_cut(way, seed + call.number)
            content = hash((promise, frozenset(map(comparable, found.items()))))
            if content in tried:
                continue
            tried.add(content)
            left = harness.new()
            write_out(found, left)
            # The names of old checkpoints may come back: no promise is broken by that.
            wrong = harness.go_on(left, promise, tidy=False)
            where = f"power cut ({way}) behind {call.kind} {call.path.name} (call {call.number})"
            yield from (f"{where}: {line}" for line in wrong)
            shutil.rmtree(left)


def comparable(file: tuple[Path, bytes | None]) -> tuple[str, bytes | None]:
    """Return name and content of a file without times, process ids and draft names."""
    path, data = file
    if data is not None and path.suffix in ("", ".json", ".new", ".txt", ".csv"):
        if path.name not in LOGS and "checkpoint" not in path.parts:
            data = re.sub(rb"\d+", b"N", data)
    return "/".join(map(without_draft, path.parts)), data


def power_cuts_after_kills(harness: Harness, choice: Choice = all_calls) -> Iterator[str]:
    """Power cuts of a run, and of runs that go on after a kill; no content of a disk twice."""
    tried = set[int]()
    for after in (0, 50, 150, 250):
        yield from power_cuts(harness, choice, after=after, tried=tried)


def two_writers(harness: Harness, about: str = "") -> Iterator[str]:
    """Two at once: one works, the other is refused; the files equal one process's."""
    out = harness.new()
    both = harness.run_all([harness.job(out), harness.job(out)])
    began = [ended for ended in both if any(call.kind == "mark" for call in ended.calls)]
    if len(began) != 1:
        yield f"{len(began)} of two processes worked on the run: exits {[e.code for e in both]}"
    yield from harness.different(out)
