"""Runs the parts of several threads in one thread, in any order that the plan of a table allows."""

import ctypes
from random import Random

from deepstack.fast.native import Kernels
from deepstack.fast.native.record import RECORD

CHUNK = 64
"""Operations between two meetings of all threads, as in team.h."""


def by_turns(kernels: Kernels, seed: int, *, waits: bool = True) -> Kernels:
    """Return kernels that run the parts of a table's threads in a random order.

    A thread runs as far as its plan lets it, then another one is drawn.  An order that changes the
    numbers shows a missing wait, however fast or slow real threads are.

    waits: False for threads that never wait.
    """
    random = Random(seed)

    def run(table: int, count: int, threads: int, plan: int) -> None:
        width = 1 + threads
        plans = (ctypes.c_int32 * (count * width)).from_address(plan)
        for first in range(0, count, CHUNK):
            end, finished = min(first + CHUNK, count), [first] * threads
            while any(at < end for at in finished):
                thread = random.randrange(threads)
                others = [at for other, at in enumerate(finished) if other != thread]
                while finished[thread] < end:
                    at = finished[thread]
                    wait = plans[at * width + 1 + thread]
                    if waits and min(others, default=end) < first + wait:
                        break
                    record, part = table + at * RECORD.size, plan + 4 * at * width
                    kernels.run_part(record, thread, threads, part)
                    finished[thread] += 1

    return kernels._replace(run=run)
