"""Checks a run before it starts: every refusal, first of `lock_run` and then of `preflight`.

Two refusals come later: a checkpoint or log that is damaged shows when it is read, and a plugin
that writes into a buffer shows in its first step (`refuse_buffer_writes`).
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deepstack import config as conf
from deepstack.base import plugins
from deepstack.base.ending import Stop
from deepstack.base.errors import ConfigError, PluginError
from deepstack.config.instruments import specs
from deepstack.diagnostics import check_instruments
from deepstack.fast import FastPaths, Measured, Step, executor_notice, fast_paths_of
from deepstack.fast.distributed import RankGroup, join_ranks, parallelism
from deepstack.model import Transformer, build_model, check_scheme, shallow
from deepstack.records import ENDED, RunFolder, suggest_removal
from deepstack.runs.trackers import live_logs
from deepstack.tasks import Task, task_of
from deepstack.training.environment import (
    choose_device,
    environment_changes,
    environment_of,
    threads_of_operations,
    threads_of_run,
    torch_settings,
)
from deepstack.training.extension import Parent
from deepstack.training.folders import locked_folder, refuse_missing_plugins
from deepstack.training.observer import OBSERVERS, LogFile, Observer, Observers
from deepstack.training.optimizers import OPTIMIZERS
from deepstack.training.resources import memory_notices, refuse_full_disk
from deepstack.training.start import StartingPoint, start_of


@dataclass(frozen=True)
class LockedRun:
    """A run whose settings are checked, with its folder, which this process has locked.

    path: the run's path.
    folder: where this rank writes; temporary except on rank 0.
    state: the state that the folder records, or None for a new run.
    start: the run whose weights it begins with, or None.
    shallow: its model with at most two layers and without storage.
    stop: see `train`; it ends the compilation of kernels too.
    """

    config: conf.Config
    path: Path
    folder: RunFolder
    state: str | None
    task: Task
    start: StartingPoint | None
    device: torch.device
    ranks: RankGroup
    shallow: Transformer
    stop: Stop | None

    @property
    def has_ended(self) -> bool:
        """Whether the run is done or has diverged, so that it is not trained again."""
        return self.state in ENDED


@dataclass(frozen=True)
class Prepared(LockedRun):
    """A locked run that can start.

    threads: the CPU threads of the run.
    paths: the fast paths.
    environment: as meta.json records it.
    observer: also writes log.txt; silent on other ranks than 0.
    command: the command line, for meta.json.
    """

    threads: int
    paths: FastPaths
    environment: dict[str, Any]
    observer: Observer
    command: str


@contextmanager
def lock_run(
    config: conf.Config,
    study: str | None,
    out: Path,
    *,
    parent: Parent | None = None,
    stop: Stop | None = None,
) -> Iterator[LockedRun]:
    """Check the settings of a run, then yield it with its folder, locked inside the block.

    A refused run leaves no folder behind.

    parent: the recorded run from which a new one begins.
    stop: see `train`; it ends the wait for other ranks.

    Raises ConfigError, PluginError, ResourceError and Interrupted.
    """
    plugins.refuse_while_loading("deepstack.train")
    study_folder = out / conf.checked_study(study or conf.checked_config(config).name or "runs")
    refuse_non_utf8_path(out.absolute())
    refuse_missing_plugins(config, study_folder)
    live_logs(config.log.to)
    task = task_of(config)
    model = build_model(shallow(config), vocab_size=task.vocab_size, device="meta").model
    check_scheme(config)
    check_instruments(config.log)
    start = start_of(config, task.vocab_size)
    device = choose_device(config.runtime)
    ranks = join_ranks(device, stop or (lambda: None))
    ranks.share(config.train.batch_size)
    refuse_cut_settings(config, ranks)
    with locked_folder(config, study_folder, task, ranks, parent) as (path, folder, state):
        yield LockedRun(config, path, folder, state, task, start, device, ranks, model, stop)


@contextmanager
def preflight(
    locked: LockedRun,
    observer: Observer,
    *,
    allow_env_change: bool = False,
    command: str = "",
    saves: bool = True,
    parent: Parent | None = None,
) -> Iterator[Prepared]:
    """Check the machine and the record of a run that has not ended, and yield all its parts.

    Inside the block torch has the run's threads and determinism.

    saves: whether the run saves checkpoints, which must fit on the disk.
    parent: the recorded run from which a new one begins.

    Raises ConfigError, ResourceError and Interrupted.
    """
    config, folder, task, ranks = locked.config, locked.folder, locked.task, locked.ranks
    with (
        torch_settings(config, locked.device, ranks) as reserved,
        ExitStack() as logs,
    ):
        if ranks.is_rank0:
            registered = [make() for _, make in OBSERVERS.items()] if saves else []
            trackers = [logs.enter_context(closing(log())) for log in live_logs(config.log.to)]
            log_file: Observer = LogFile(folder)
            observer = Observers(observer, log_file, *trackers, *registered)
            if saves:
                refuse_full_disk(config, folder, task.vocab_size)
        else:
            observer = log_file = Observer()
        notices = memory_notices(config, locked.device, task) if ranks.size == 1 else []
        is_new = not folder.exists()
        record = parent.folder if parent and is_new else folder
        recorded = record.read_meta().get("environment")
        paths = fast_paths_of(
            config,
            locked.device,
            ranks,
            locked.shallow,
            observer.notify,
            recorded=recorded,
            stop=locked.stop or (lambda: None),
        )
        threads = threads_of_run(config, reserved, paths)
        torch.set_num_threads(threads_of_operations(config, threads, paths))
        executor = executor_notice(config, paths, recorded)
        environment = environment_of(config, locked.device, threads, paths, ranks)
        notices += ranks.from_rank0(
            lambda: environment_notices(record, environment, allow_env_change, executor)
        )
        if is_new:
            notices += [*task.notices, *(locked.start.fresh if locked.start else ())]
            if times := task.times_read(config):
                notices.append(conf.reading_text([times]))
            if parent and ranks.is_rank0:
                parent.begin(folder, task.data)
        for notice in notices:  # after the last refusal: the first notice writes log.txt
            observer.notify(notice)
        for line in executor:  # the kernels' name tells a user nothing
            log_file.notify(line)
        yield Prepared(
            **vars(locked),
            threads=threads,
            paths=paths,
            environment=environment,
            observer=observer,
            command=command,
        )


def notify_ended(locked: LockedRun, observer: Observer) -> None:
    """Tell the user that a run has ended already and how to train it anew."""
    how = f"to train it anew, first: {suggest_removal(locked.path)}"
    if locked.ranks.is_rank0:
        observer.notify(f"{locked.state} already, left as it is; {how}")


def refuse_non_utf8_path(out: Path) -> None:
    """Raise ConfigError for a path that is not UTF-8: safetensors cannot write to it."""
    try:
        os.fsencode(out).decode()
    except UnicodeDecodeError:
        raise ConfigError(f"{out}: this path is not UTF-8; give another with --out") from None


def refuse_cut_settings(config: conf.Config, ranks: RankGroup) -> None:
    """Raise ConfigError for settings that need a whole batch or whole matrices and have parts."""
    train, model, mode = config.train, config.model, parallelism(config, ranks)
    each, cuts_matrices = train.batch_size // ranks.size, mode == "fully_sharded"
    reason = "it needs whole matrices, and runtime.parallel=fully_sharded cuts them; "
    reason += "allowed with runtime.parallel=data"
    rules: list[tuple[str, object, str]] = [
        (
            "train.shards",
            mode and train.shards > 1,
            f"found {train.shards}, which needs one process; allowed 1, "
            f"or train.micro_batches={train.shards}",
        ),
        (
            "train.micro_batches",
            each % train.micro_batches,
            f"found {train.micro_batches}; allowed a divisor of the {each} sequences of a process",
        ),
        (
            "model.norm.kind",
            model.norm.kind == "batch" and (mode or train.parts > 1),
            "found batch, which needs one process and train.shards=1 and train.micro_batches=1; "
            "or use rms",
        ),
        (
            "model.unique_layers",
            model.unique_layers and (cuts_matrices or train.spectral_penalty),
            "it excludes runtime.parallel=fully_sharded and train.spectral_penalty; allowed null",
        ),
        ("train.optimizer", cuts_matrices and not OPTIMIZERS.of(config).elementwise, reason),
        ("train.spectral_penalty", cuts_matrices and train.spectral_penalty, reason),
        ("log.layers_on", cuts_matrices and config.log.layers_on, reason),
    ]
    for spec in specs().values():
        is_cut = cuts_matrices and spec.needs_whole_matrices
        rules.append((spec.key, is_cut and spec.interval(config.log), reason))
    for key, is_broken, text in rules:
        if is_broken:
            raise ConfigError(f"{key}: {text}", key=key)


def environment_notices(
    record: RunFolder,
    environment: Mapping[str, Any],
    allow_change: bool,
    executor: Sequence[str] = (),
) -> list[str]:
    """Return a notice of each difference from the environment in which a recorded run began.

    executor: the line on the kernels, which explains a difference of them.

    Raises ConfigError, naming every difference, unless `allow_change`.
    """
    changes = environment_changes(record.read_meta().get("environment", environment), environment)
    if changes and not allow_change:
        reasons = executor if any(change.startswith("executor") for change in changes) else ()
        raise ConfigError(
            "\n".join([
                f"{record.path} was begun in another environment: {'; '.join(changes)}",
                *reasons,
                "its numbers need not come out byte for byte; to go on all the same: "
                "--allow-env-change",
            ])
        )  # fmt: skip
    return [f"environment: {change}" for change in changes]


StepFunction = Callable[[Tensor, Tensor, float], Measured]


def refuse_buffer_writes(step: Step, model: nn.Module) -> StepFunction:
    """Return the step; it raises PluginError if it writes into a plugin's buffer.

    A checkpoint keeps parameters only, and each measurement would change the buffer again.  Only
    `Scheme.at_step` may set buffers: it derives them from the number of the step.
    """
    of_plugins = [
        module
        for module in model.modules()
        if type(module).__module__.split(".")[0] not in ("deepstack", "torch") and module._buffers
    ]

    def versions() -> list[tuple[str, int, int | None]]:
        return [
            (f"{name} of {type(module).__name__}", id(x), None if x is None else x._version)
            for module in of_plugins
            for name, x in module._buffers.items()
        ]

    def checked_step(inputs: Tensor, targets: Tensor, lr: float) -> Measured:
        before = versions()
        measured = step(inputs, targets, lr)
        for old, new in zip(before, versions(), strict=True):
            if old != new:
                raise PluginError(
                    f"a step writes into the buffer {old[0]}, which no checkpoint keeps and every "
                    "measurement would change; allowed are values that at_step sets, and parameters"
                )
        return measured

    return checked_step if of_plugins else step
