"""Records steps and snapshots of a model that runs by its fast paths (`enable_fast_paths`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from deepstack import config as conf
from deepstack.fast.capture import CapturedFunction, CapturedStep
from deepstack.fast.layers import in_parts
from deepstack.fast.replay import replaying
from deepstack.fast.rule import FastPaths
from deepstack.fast.step import Probe, StepFunction, Update, probed
from deepstack.model import Transformer

T = TypeVar("T")


def step_recorder(
    model: Transformer,
    config: conf.Config,
    paths: FastPaths,
    notify: Callable[[str], None],
    threads: int,
) -> Callable[[Update, Probe | None], StepFunction]:
    """Return `capture` of `make_step`: CUDA graph capture, replay, or neither.

    notify: receives a line after something that takes long.  threads: that replay the shards of a
    batch.
    """
    if paths.replayed:
        return partial(replaying, said=notify, threads=threads)
    if paths.captured:
        concurrent = not model.schemes[0].changes_by_step
        insist = config.runtime.cuda_graph is True
        parts = partial(in_parts, model)
        return partial(CapturedStep, said=notify, insist=insist, joint=concurrent, parts=parts)
    return probed


def captured_function(
    function: Callable[[], T],
    config: conf.Config,
    paths: FastPaths,
    notify: Callable[[str], None],
) -> Callable[[], T] | None:
    """Return a function that replays a CUDA graph of this one; None if steps are not captured.

    Its results stay in memory, and the next call overwrites them.
    """
    # a failed capture changes the random generator of dropout
    if not paths.captured or config.model.dropout:
        return None
    return CapturedFunction(function, notify)
