"""Ctrl-C in a notebook's cell or a script: the first asks for an end that saves."""

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
    """The caller's own `stop`, or one that remembers the first Ctrl-C.

    Then the block ends as KeyboardInterrupt, which a second Ctrl-C raises at once.  Who handles
    Ctrl-C otherwise, and a thread, which is not told of signals, keep to their own way.
    """
    if stop is not None:
        yield stop
        return
    asked: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not ours or threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: asked[0] if asked else None
    except Interrupted as error:
        raise KeyboardInterrupt(str(error)) from None
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if asked:  # after the last step: the run is done, what would come after it is not wanted
        raise KeyboardInterrupt
