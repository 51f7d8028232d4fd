"""Gradients that nothing waits for: added for many layers by one kernel, or beside other work."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor

# How many layers' are left at the most, and how many bytes of one kind.
LAYERS, BYTES = 64, 2**26
# Products, and bytes that they read, that may still be under way beside: they are kept as long.
UNDER_WAY, BYTES_UNDER_WAY = 8, 2**29


class Lasting(Protocol):
    """What has parameters whose gradients can be added for many layers at once."""

    @staticmethod
    def add_together(left: Sequence[tuple[Any, tuple[Tensor, ...]]]) -> None:
        """Add the gradients of all, each with the tensors that it has left, of equal shapes."""


class DeferredQueue:
    """What one backward pass has left for later, by kind and shape, or has under way beside."""

    def __init__(self) -> None:
        self.left: dict[Any, list[tuple[Lasting, tuple[Tensor, ...]]]] = {}
        self.under_way: deque[tuple[torch.cuda.Event, int, Any]] = deque()

    def add(self, what: Lasting, tensors: tuple[Tensor, ...]) -> None:
        """Leave it, until there are enough of its shape."""
        key = type(what), tensors[0].dtype, *(tensor.shape for tensor in tensors)
        same = self.left.setdefault(key, [])
        same.append((what, tensors))
        if len(same) < LAYERS and len(same) * sum(t.nbytes for t in tensors) < BYTES:
            return
        run = partial(what.add_together, self.left.pop(key))
        if tensors[0].is_cuda:
            self.beside(run, ())
        else:
            run()

    def beside(self, run: Callable[..., None], tensors: tuple[Tensor, ...]) -> None:
        """Run it on a stream of its own, after what this one was given until now."""
        now = torch.cuda.current_stream()
        other = other_stream(torch.cuda.current_device())
        other.wait_stream(now)
        with torch.cuda.stream(other):
            run(*tensors)
            size = sum(tensor.nbytes for tensor in tensors)
            self.under_way.append((other.record_event(), size, (run, tensors)))
        # What others read may be freed, and its memory used again here, once they have.
        while len(self.under_way) > UNDER_WAY or (
            len(self.under_way) > 1 and sum(s for _, s, _ in self.under_way) > BYTES_UNDER_WAY
        ):
            now.wait_event(self.under_way.popleft()[0])

    def join(self) -> None:
        """Let this stream wait for what is under way."""
        while self.under_way:
            torch.cuda.current_stream().wait_event(self.under_way.popleft()[0])

    def end(self) -> None:
        """Add what is left."""
        self.join()
        for same in self.left.values():
            same[0][0].add_together(same)


# Of every backward pass under way, by torch's number of it.
_waiting: dict[int, DeferredQueue] = {}


def later(what: Lasting, *tensors: Tensor) -> None:
    """Add gradients some time before the end of the backward pass under way."""
    waiting().add(what, tensors)


def beside(run: Callable[..., None], *tensors: Tensor) -> None:
    """run(*tensors) on the GPU at the same time as what follows in the backward pass under way."""
    waiting().beside(run, tensors)


def join() -> None:
    """Wait, on this stream, for what backward passes have under way beside: a graph ends here."""
    for one in _waiting.values():
        one.join()


def waiting() -> DeferredQueue:
    """That of the backward pass under way."""
    task = torch._C._current_graph_task_id()
    if task not in _waiting:
        _waiting[task] = DeferredQueue()
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(partial(end, task))
    return _waiting[task]


@cache
def other_stream(device: int, use: str = "gradients") -> torch.cuda.Stream:
    """A stream of this process beside the one that works, one for each use: libraries keep memory
    for each, which torch may free with a graph that was captured on it."""
    return torch.cuda.Stream(device)


def end(task: int) -> None:
    """A backward pass has come to its end."""
    _waiting.pop(task).end()


def forget() -> None:
    """A backward pass ended in an error: what it has left for later is of no use."""
    if any(one.under_way for one in _waiting.values()):
        if not torch.cuda.is_current_stream_capturing():
            join()
    _waiting.clear()


def add_rows(gradients: Sequence[Tensor | None], sums: Tensor, alpha: float = 1.0) -> None:
    """Add a row of sums to every gradient; None: of what is not trained."""
    pairs = [(g, s) for g, s in zip(gradients, sums, strict=True) if g is not None]
    if pairs:
        torch._foreach_add_([g for g, _ in pairs], [s for _, s in pairs], alpha=alpha)
