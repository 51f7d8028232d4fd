"""Ctrl-C and SIGTERM: the first asks the run to stop after its step, a second one ends it."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Schedulers, and parents that die, send SIGTERM more than once: so soon it is the same request.
SAME_SECONDS = 10.0


class StopRequest:
    """Remembers the first signal; called, it returns its number, or None."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._since = 0.0

    def __call__(self) -> int | None:
        return self.signal

    def handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.signal is not None:
            if number == signal.SIGTERM and now - self._since < SAME_SECONDS:
                return
            raise SystemExit(128 + number)
        self.signal, self._since = number, now


@contextmanager
def stop_on_signal() -> Iterator[StopRequest]:
    """Handlers inside the block, those from before afterwards."""
    request = StopRequest()
    before = {number: signal.signal(number, request.handle) for number in SIGNALS}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
