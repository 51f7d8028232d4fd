"""Ctrl-C in a notebook cell or a script: the first one requests a stop that saves the run."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from deepstack.errors import Interrupted

Stop = Callable[[], int | None]


@contextmanager
def stop_requests(stop: Stop | None) -> Iterator[Stop]:
    """Yield the caller's `stop`, or one that remembers the first Ctrl-C.

    After a first Ctrl-C the block ends with KeyboardInterrupt; a second one raises it at once.  A
    different SIGINT handler stays in place, and threads, which get no signals, are unaffected.
    """
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if stop or not ours or threading.current_thread() is not threading.main_thread():
        yield stop or (lambda: None)
        return
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: received[0] if received else None
    except Interrupted as error:
        raise KeyboardInterrupt(str(error)) from None
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if received:  # Ctrl-C after the last step: the run is done, but the caller must stop here
        raise KeyboardInterrupt
