"""Handles Ctrl-C, SIGTERM and SIGHUP: the first stops the run after its step, a second at once."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from deepstack.base.ending import SIGNALS

# Schedulers, terminals and dying parents send SIGTERM and SIGHUP more than once. A repetition
# within this time is the same request.
SAME_SECONDS = 10.0


class StopRequest:
    """Stores the first signal; a call returns its number, or None.

    code: the exit code of a second signal, which ends the process.

    Required by test_a_second_ctrl_c_ends_the_process_whatever_it_interrupts.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self.code: int | None = None
        self.since = 0.0

    def __call__(self) -> int | None:
        if self.code is not None:  # a library has swallowed its exception
            raise SystemExit(self.code)
        return self.signal

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Store a first signal; end the process at a second one."""
        if self.signal is None:
            self.signal, self.since = number, time.monotonic()
        elif number == signal.SIGINT or time.monotonic() - self.since >= SAME_SECONDS:
            self.code = 128 + number
            raise SystemExit(self.code)


@contextmanager
def stop_on_signal(request: StopRequest | None = None) -> Iterator[StopRequest]:
    """Install signal handlers that stay until the process ends, soon after the block.

    The work is saved by then: a second SIGTERM is still the same request, and a finished run exits
    with 0. SIGHUP stays ignored if it was ignored at the start, as under nohup.

    request: of an earlier part of the work, whose signal counts for this part too.
    """
    request = request or StopRequest()
    for number in SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, request.handle)
    try:
        yield request
    finally:
        request()  # a library may turn SystemExit into another exception


@contextmanager
def paused_by_ctrl_z() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns True once after each Ctrl-Z in the block.

    The block stops this process itself, after it has stopped what it has started.  Where SIGTSTP is
    ignored at the start, as in a shell without job control, it stays so.
    """
    requests: list[int] = []
    if signal.getsignal(signal.SIGTSTP) is signal.SIG_IGN:
        yield lambda: False
        return
    before = signal.signal(signal.SIGTSTP, lambda number, frame: requests.append(number))

    def pause() -> bool:
        found = bool(requests)
        requests.clear()
        return found

    try:
        yield pause
    finally:
        signal.signal(signal.SIGTSTP, before)


@contextmanager
def ended_by_ctrl_c() -> Iterator[None]:
    """End the block at Ctrl-C, as its normal end: the command exits with 0."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with suppress(KeyboardInterrupt):
        yield
