"""The plan of a run: everything that its settings and this machine decide, before its folder.

`deepstack check`, the plan of a sweep and `train` read the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor

from deepstack import config as conf
from deepstack.base.ending import Stop
from deepstack.config.flops import StepFlops
from deepstack.diagnostics import check_instruments
from deepstack.fast import FastPaths, executor_notice, fast_paths_of
from deepstack.fast.distributed import ALONE, RankGroup, parallelism
from deepstack.model import (
    Transformer,
    build_model,
    check_scheme,
    extra_memory,
    flops_of,
    shallow,
    with_defaults,
    without_defaults,
)
from deepstack.model.build import Built
from deepstack.records import RunFolder
from deepstack.tasks import Task
from deepstack.training.evaluation import Evaluation
from deepstack.training.rule_check import check_rule
from deepstack.training.threads import ThreadRule, thread_rule

CPU = torch.device("cpu")
Weights = Callable[[], dict[str, dict[str, Tensor]]]


class RunPart:
    """A part of training that few runs have: its methods do nothing unless it overrides them.

    activity: what `act` does, for displays.
    extends: `extends` of meta.json of a run that goes on where another one ended.
    """

    activity: ClassVar[str] = ""
    extends: Mapping[str, Any] = MappingProxyType({})

    @property
    def origin(self) -> RunFolder | None:
        """The recorded run from which a new one begins, in whose environment it must train."""
        return None

    @property
    def notices(self) -> Sequence[str]:
        """Lines for the user of a new run."""
        return ()

    def facts(self) -> Mapping[str, Any]:
        """Return entries of meta.json."""
        return {}

    def enter(self, plan: RunPlan, folder: RunFolder) -> None:
        """Write into the locked folder of a new run."""

    def begin(self, plan: RunPlan, built: Built) -> None:
        """Change the model that was built, before a checkpoint is loaded."""

    def gradient(self, plan: RunPlan, built: Built) -> Callable[[], None] | None:
        """Return a function that adds a gradient which does not depend on the batch, or None."""
        return None

    def is_due(self, plan: RunPlan, step: int) -> bool:
        """Return whether `act` is called after a step; 0 is before the first one."""
        return False

    def act(self, plan: RunPlan, folder: RunFolder, step: int, weights: Weights) -> None:
        """Act after a step that did not diverge, on every rank.

        weights: returns the weights of the whole model; all ranks must call it.
        """


@dataclass(frozen=True)
class RunPlan:
    """A run before it has a folder.  A property is computed when it is first read.

    config: the settings, with a number of steps.
    task: the data of these settings.
    study: the folder of the study.
    device: of this rank.
    ranks: the processes of the run.
    parts: the parts that few runs have.
    stop: see `train`; it ends the compilation of kernels.
    """

    config: conf.Config
    task: Task
    study: Path = Path()
    device: torch.device = CPU
    ranks: RankGroup = ALONE
    parts: Sequence[RunPart] = ()
    stop: Stop = lambda: None

    @cached_property
    def name(self) -> str:
        """The name of the run's folder, unless another run has it."""
        return run_name(self.config)

    @cached_property
    def digest(self) -> str:
        """The digest of the settings, by which a checkpoint belongs to a run."""
        return conf.digest(without_defaults(self.config))

    @cached_property
    def yaml(self) -> str:
        """The content of config.yaml."""
        return conf.to_yaml(with_defaults(self.config))

    @cached_property
    def shallow(self) -> Transformer:
        """The model with at most two layers and without storage."""
        vocab_size = self.task.vocab_size
        return build_model(shallow(self.config), vocab_size=vocab_size, device="meta").model

    @cached_property
    def memory(self) -> int:
        """The estimated bytes of memory."""
        config, task = self.config, self.task
        by_scheme = extra_memory(config)
        return conf.memory_estimate(
            config, task.vocab_size, by_scheme, task.memory, task.target_len
        )

    @cached_property
    def disk(self) -> tuple[int, int]:
        """The estimated bytes on the disk when the run is done, and the most while it trains."""
        return conf.disk_estimate(self.config, self.task.vocab_size)

    @cached_property
    def flops(self) -> StepFlops:
        """The floating-point operations of a step."""
        return flops_of(self.config, self.task)

    @cached_property
    def times_read(self) -> float | None:
        """How often the run reads its text; None for data without an end."""
        return self.task.times_read(self.config)

    @property
    def reading(self) -> str:
        """How often the run reads its text, in words; empty for data without an end."""
        return conf.reading_text([self.times_read]) if self.times_read else ""

    @cached_property
    def threads(self) -> ThreadRule:
        """The rule of the CPU threads."""
        return thread_rule(self.config, self.ranks, on_gpu=self.device.type == "cuda")

    @property
    def parallel(self) -> str | None:
        """The parallelism of the ranks, 'data' or 'fully_sharded'; None for one rank."""
        return parallelism(self.config, self.ranks)

    @property
    def origin(self) -> RunFolder | None:
        """The recorded run from which this one begins."""
        return next((part.origin for part in self.parts if part.origin), None)

    @property
    def extends(self) -> Mapping[str, Any]:
        """`extends` of meta.json; empty for a run that goes on from no other one."""
        return next((part.extends for part in self.parts if part.extends), {})

    @property
    def notices(self) -> list[str]:
        """Lines for the user of a new run."""
        of_parts = (line for part in self.parts for line in part.notices)
        return [*self.task.notices, *of_parts, *([self.reading] if self.reading else ())]

    def evaluation(self, sequences: int | None = None) -> Evaluation:
        """Return the validation of the run.  sequences: the number that its record states."""
        return Evaluation(self.task, self.config, self.device, sequences)

    def fast_paths(
        self,
        notify: Callable[[str], None] = lambda line: None,
        recorded: Mapping[str, Any] | None = None,
    ) -> FastPaths:
        """Return the fast paths.  recorded: the environment in which the run began, if it did."""
        return fast_paths_of(
            self.config, self.device, self.ranks, None, notify, recorded=recorded, stop=self.stop
        )

    def executor_notice(
        self, paths: FastPaths, recorded: Mapping[str, Any] | None = None
    ) -> list[str]:
        """Return the line that says which kernels replay the steps.  recorded: see `fast_paths`."""
        return executor_notice(self.config, paths, recorded)

    def check(self) -> None:
        """Check the settings without regard to the machine.

        Raises ConfigError, and PluginError for a scheme that computes no stream.
        """
        check_scheme(self.config)
        check_rule(self.config)
        _ = self.shallow
        check_instruments(self.config.log)


def run_name(config: conf.Config) -> str:
    """Return the name of a run's folder, with or without default options in the config."""
    return conf.run_name(without_defaults(config))


def memory_needed(config: conf.Config, task: Task) -> int:
    """Return the estimated bytes of memory of a run."""
    return RunPlan(config, task).memory
