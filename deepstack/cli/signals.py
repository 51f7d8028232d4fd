"""Ctrl-C and SIGTERM: the first asks the run to stop after its step, a second one ends it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Remembers the first signal; called, it returns its number, or None."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def __call__(self) -> int | None:
        return self.signal

    def handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            raise SystemExit(128 + number)
        self.signal = number


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
