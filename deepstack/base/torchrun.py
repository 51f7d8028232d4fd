"""Reads from the environment which rank torchrun gave this process.

Schedulers, containers and notebooks set the same variables, also where no other process exists.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from deepstack.base.ending import Stop
from deepstack.base.errors import ConfigError, Interrupted, ResourceError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
VARIABLES = (
    *NEEDED, "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE",
    "ROLE_NAME",
)  # fmt: skip
PREFIX = "TORCHELASTIC_"
# A rank that waits longer than this for another one at the start says so.
PATIENCE_SECONDS = 5.0
POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Launch:
    """The place of this process among the ranks of one run.

    rank: 0 <= rank < size.
    local_rank: number of the process on its host.
    on_host: number of ranks on this host.
    address: host and port at which the ranks meet.
    """

    rank: int
    size: int
    local_rank: int
    on_host: int
    address: str


has_joined = False
"""Whether this process has met the other ranks of its run."""


def launch() -> Launch | None:
    """Return this process's place among several ranks; None for a process that trains alone.

    A group of one rank is a process alone.  Raises ConfigError for a variable that is not a number.
    """
    if not set(NEEDED) <= os.environ.keys() or os.environ["WORLD_SIZE"].strip() == "1":
        return None
    numbers = {"LOCAL_WORLD_SIZE": 1}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
        text = os.environ.get(name, "1").strip()
        if not text.isdecimal():
            raise ConfigError(
                f"the environment variable {name}: found {text!r}; allowed a number, as torchrun "
                f"sets it; for one process, first: unset {' '.join(NEEDED)}"
            )
        numbers[name] = int(text)
    return Launch(
        numbers["RANK"],
        numbers["WORLD_SIZE"],
        numbers["LOCAL_RANK"],
        numbers["LOCAL_WORLD_SIZE"],
        f"{os.environ['MASTER_ADDR']}:{numbers['MASTER_PORT']}",
    )


def is_rank0() -> bool:
    """Return whether this process is the one that prints the result of a run."""
    here = launch()
    return here is None or here.rank == 0


def speaker() -> str | None:
    """Return the words before an error of this process, or None if another rank reports it.

    All ranks raise the same error.  Until they have met, none can know that another one exists.
    """
    try:
        here = launch()
    except ConfigError:  # the error to report
        return ""
    if here is None or here.rank == 0:
        return ""
    if has_joined:
        return "" if here.local_rank == 0 else None
    return f"rank {here.rank} of {here.size}: "


def without_launch() -> dict[str, str]:
    """Return the environment for a process that trains alone, whatever launched this one."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in VARIABLES and not name.startswith(PREFIX)
    }


def forget_launch() -> None:
    """Remove the launcher's variables from the environment of this process."""
    for name in os.environ.keys() - without_launch().keys():
        del os.environ[name]


def meet(launch: Launch, stop: Stop, timeout: timedelta) -> Store:
    """Return the store of the ranks once all of them have reached it.

    After PATIENCE_SECONDS every rank names on stderr the ranks that it waits for: a rank without a
    launcher has no rank 0 that would report it.  torch waits in C++, where Python handles no
    signal, so another thread waits.

    timeout: how long a rank waits.

    Raises Interrupted, and ResourceError if they cannot meet.
    """
    from torch.distributed.rendezvous import rendezvous

    future: Future[Store] = Future()
    absent = "rank 0" if launch.rank else "the other ranks"

    def reach() -> None:
        nonlocal absent
        try:
            store, _, _ = next(rendezvous("env://", timeout=timeout))
            store.set(f"deepstack/{launch.rank}", "")
            for rank in range(launch.size):
                absent = f"rank {rank}"
                store.wait([f"deepstack/{rank}"])
            future.set_result(store)
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=reach, daemon=True).start()
    since, is_told = time.monotonic(), False
    here = f"rank {launch.rank} of {launch.size}"
    alone = f"for one process, first: unset {' '.join(NEEDED)}"
    while not wait([future], POLL_SECONDS).done:
        if number := stop():
            raise Interrupted(f"interrupted while waiting for {absent}", number)
        if not is_told and time.monotonic() - since > PATIENCE_SECONDS:
            is_told = True
            with suppress(OSError):
                line = f"{here} waits for {absent} at {launch.address}; {alone}"
                print(line, file=sys.stderr, flush=True)
    try:
        return future.result()
    except (RuntimeError, ValueError) as error:  # torch's classes of errors derive from them
        reason = str(error).split("\n")[0]
        raise ResourceError(
            f"{here} cannot meet the others at {launch.address}: {reason}; {alone}"
        ) from error
