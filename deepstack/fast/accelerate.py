"""Makes a finished model run by its fast paths: the only entry to this package for training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from deepstack import config as conf
from deepstack.fast.capture import CapturedFunction, capture
from deepstack.fast.gpu.available import makes_kernels
from deepstack.fast.layers import enable_fast_paths, in_parts
from deepstack.fast.replay import replaying
from deepstack.fast.rule import FastPaths
from deepstack.fast.shards import Loss
from deepstack.fast.step import Probe, Step, StepFunction, Update, make_step, probed
from deepstack.model.build import Built
from deepstack.parameters import Bank, global_norm

T = TypeVar("T")


@dataclass(frozen=True)
class Accelerated:
    """A model that runs by its fast paths; makes its training step."""

    built: Built
    optimizer: torch.optim.Optimizer
    config: conf.Config
    paths: FastPaths
    notify: Callable[[str], None]
    threads: int = 1

    def make_step(
        self,
        loss: Loss,
        probe: Probe | None,
        share: Callable[[Tensor], Tensor] | None = None,
        norm_of: Callable[[Sequence[Bank]], Tensor] = global_norm,
    ) -> Step:
        """Return the training step, followed by the measurement `probe`; see `step.make_step`."""
        train, built = self.config.train, self.built
        return make_step(
            loss,
            built.banks,
            built.trained,
            self.optimizer,
            clip=train.clip,
            max_loss=train.max_loss,
            alive=torch.ones((), device=built.trained[0].parameters[0].device),
            shards=train.shards,
            probe=probe,
            share=share,
            norm_of=norm_of,
            project=built.projection(),
            capture=self._recorder(),
        )

    def _recorder(self) -> Callable[[Update, Probe | None], StepFunction]:
        """Return the function that records a step: CUDA graph capture, replay, or neither."""
        if self.paths.replayed:
            return partial(replaying, said=self.notify, threads=self.threads)
        if self.paths.captured:
            model = self.built.model
            concurrent = not model.schemes[0].changes_by_step
            insist = self.config.runtime.cuda_graph is True
            parts = partial(in_parts, model)
            return partial(capture, said=self.notify, insist=insist, joint=concurrent, parts=parts)
        return probed

    def capture_function(self, function: Callable[[], T]) -> Callable[[], T] | None:
        """Return a function that replays a CUDA graph of this one; None if steps are not captured.

        Its results stay in memory, and the next call overwrites them.
        """
        # a failed capture changes the random generator of dropout
        if not self.paths.captured or self.config.model.dropout:
            return None
        return CapturedFunction(function, self.notify)


def accelerate(
    built: Built,
    optimizer: torch.optim.Optimizer,
    config: conf.Config,
    paths: FastPaths,
    notify: Callable[[str], None],
    threads: int = 1,
) -> Accelerated:
    """Make a model run by the chosen fast paths and return the maker of its training step.

    optimizer: made with `capturable` where the step is captured or replayed.  notify: receives a
    line before or after something that takes long.  threads: that replay the shards of a batch.
    """
    every = conf.recompute_every(config)
    if every and config.runtime.recompute_every == "auto":
        notify(f"memory is short: layers are computed twice (runtime.recompute_every={every})")
    enable_fast_paths(built.model, paths, every, notify)
    on_gpu = built.trained[0].parameters[0].is_cuda
    if paths.fused and on_gpu and makes_kernels():
        notify("Triton makes kernels; seconds, once on a machine")
    if paths.compiled and on_gpu:  # tell torch's compiler too
        torch.use_deterministic_algorithms(torch.are_deterministic_algorithms_enabled())
    return Accelerated(built, optimizer, config, paths, notify, threads)
