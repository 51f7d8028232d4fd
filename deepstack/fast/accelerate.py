"""Records steps of a model that runs by its fast paths (`enable_fast_paths`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from deepstack import config as conf
from deepstack.fast.capture import CapturedStep
from deepstack.fast.layers import in_parts
from deepstack.fast.replay import ReplayedStep
from deepstack.fast.rule import FastPaths
from deepstack.fast.step import Probe, StepFunction, Update, probed
from deepstack.model import Transformer


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
        threads = 1 if config.model.dropout else threads  # random numbers have an order
        return partial(ReplayedStep, said=notify, threads=threads)
    if paths.captured:
        concurrent = not model.schemes[0].changes_by_step
        insist = config.runtime.cuda_graph is True
        parts = partial(in_parts, model)
        return partial(CapturedStep, said=notify, insist=insist, joint=concurrent, parts=parts)
    return probed
