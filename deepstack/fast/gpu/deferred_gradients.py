"""Deferred weight gradients, batched over layers or run on a side stream."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor

# Limits of deferred gradients of one kind: layers and bytes.
LAYERS, BYTES = 64, 2**26
# Limits of the side stream: pending products, and the bytes they read, kept until they finish.
UNDER_WAY, BYTES_UNDER_WAY = 8, 2**29


class Lasting(Protocol):
    """An object whose parameter gradients can be added for many layers at once."""

    @staticmethod
    def add_together(left: Sequence[tuple[Any, tuple[Tensor, ...]]]) -> None:
        """Add the gradients of all objects, each given with deferred tensors of equal shapes."""


class DeferredQueue:
    """The gradients that one backward pass has deferred, by kind and shape, or runs on the side."""

    def __init__(self) -> None:
        self.left: dict[Any, list[tuple[Lasting, tuple[Tensor, ...]]]] = {}
        self.under_way: deque[tuple[torch.cuda.Event, int, Any]] = deque()

    def add(self, what: Lasting, tensors: tuple[Tensor, ...]) -> None:
        """Defer the gradient until enough of its shape are deferred."""
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
        """Run `run` on the side stream, after earlier work of the current stream."""
        now = torch.cuda.current_stream()
        other = other_stream(torch.cuda.current_device())
        other.wait_stream(now)
        with torch.cuda.stream(other):
            run(*tensors)
            size = sum(tensor.nbytes for tensor in tensors)
            self.under_way.append((other.record_event(), size, (run, tensors)))
        # Once the side stream has read the tensors, this stream may reuse their memory.
        while len(self.under_way) > UNDER_WAY or (
            len(self.under_way) > 1 and sum(s for _, s, _ in self.under_way) > BYTES_UNDER_WAY
        ):
            now.wait_event(self.under_way.popleft()[0])

    def join(self) -> None:
        """Let the current stream wait for pending work of the side stream."""
        while self.under_way:
            torch.cuda.current_stream().wait_event(self.under_way.popleft()[0])

    def end(self) -> None:
        """Wait for the side stream and add all deferred gradients."""
        self.join()
        for same in self.left.values():
            same[0][0].add_together(same)


# The queue of each running backward pass, by torch's number of the pass.
_waiting: dict[int, DeferredQueue] = {}


def later(what: Lasting, *tensors: Tensor) -> None:
    """Defer gradients, which are added before the end of the running backward pass."""
    waiting().add(what, tensors)


def beside(run: Callable[..., None], *tensors: Tensor) -> None:
    """Run run(*tensors) on the GPU concurrently with the rest of the running backward pass."""
    waiting().beside(run, tensors)


def join() -> None:
    """Let the current stream wait for all side-stream work: a graph ends here."""
    for one in _waiting.values():
        one.join()


def waiting() -> DeferredQueue:
    """Return the queue of the running backward pass."""
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
    """End the queue of a finished backward pass."""
    _waiting.pop(task).end()


def forget() -> None:
    """Discard the deferred gradients of a backward pass that ended in an error."""
    if any(one.under_way for one in _waiting.values()):
        if not torch.cuda.is_current_stream_capturing():
            join()
    _waiting.clear()


def add_rows(gradients: Sequence[Tensor | None], sums: Tensor, alpha: float = 1.0) -> None:
    """Add a row of sums to every gradient; None marks an untrained parameter."""
    pairs = [(g, s) for g, s in zip(gradients, sums, strict=True) if g is not None]
    if pairs:
        torch._foreach_add_([g for g, _ in pairs], [s for _, s in pairs], alpha=alpha)
