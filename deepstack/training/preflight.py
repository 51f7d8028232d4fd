"""Checks a run before it starts: every refusal, in the order in which `preflight` makes them.

Two refusals come later: a checkpoint or log that is damaged shows when it is read, and a plugin
that writes into a buffer shows in its first step (`refuse_buffer_writes`).
"""

import errno
import itertools
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from deepstack import config as conf
from deepstack.base import plugins
from deepstack.base.ending import Stop
from deepstack.base.errors import ConfigError, PluginError, ResourceError
from deepstack.fast import FastPaths, Measured, Step, fast_paths_of
from deepstack.fast.distributed import RankGroup, join_ranks, parallelism
from deepstack.integrations.tensorboard.events import require_tensorboard
from deepstack.model import build_model, check_scheme, shallow, without_defaults
from deepstack.records import ENDED, Run, RunFolder, removal
from deepstack.records.given_plugins import require_recorded
from deepstack.records.opened import followed
from deepstack.tasks import Task, task_of
from deepstack.training.environment import (
    choose_device,
    environment_changes,
    environment_of,
    memory_limit,
    memory_needed,
    torch_settings,
)
from deepstack.training.extension import Parent, inexact_extension
from deepstack.training.observer import OBSERVERS, LogFile, Observer, Observers, TensorBoardLog
from deepstack.training.start import Start, changed_source, start_of

# Upper limit of the ratio of estimated to used memory (benchmarks/memory.py).
OVERESTIMATE = 1.5
# System errors of a disk that cannot be written to.
READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENOENT)


@dataclass(frozen=True)
class Prepared:
    """A checked run: its settings, device and locked folder.

    start: the run whose weights it begins with.  path: of the run.  folder: where this rank writes,
    temporary except on rank 0.  paths: the fast paths.  environment: as meta.json records it.
    observer: also writes log.txt; silent on other ranks than 0.
    """

    config: conf.Config
    path: Path
    folder: RunFolder
    task: Task
    start: Start | None
    device: torch.device
    ranks: RankGroup
    paths: FastPaths
    environment: dict[str, Any]
    observer: Observer
    command: str


@contextmanager
def preflight(
    config: conf.Config,
    study: str | None,
    out: Path,
    observer: Observer,
    *,
    allow_env_change: bool = False,
    command: str = "",
    saves: bool = True,
    parent: Parent | None = None,
    stop: Stop | None = None,
) -> Iterator[Prepared | Run]:
    """Check everything that can stop a run, lock its folder and yield the parts of the run.

    Yields the finished run instead if the folder has one.  Inside the block the folder is locked
    and torch has the run's threads and determinism.  A refused run leaves no folder behind.

    saves: whether the run saves checkpoints, which must fit on the disk.  parent: the recorded run
    from which a new one begins.  stop: see `train`; it ends the wait for other ranks.  Raises
    ConfigError, PluginError, ResourceError and Interrupted.
    """
    plugins.refuse_while_loading("deepstack.train")
    study_folder = out / conf.checked_study(study or conf.checked_config(config).name or "runs")
    refuse_non_utf8_path(out.absolute())
    refuse_missing_plugins(config, study_folder)
    tracks = "tensorboard" in config.log.to
    if tracks:
        require_tensorboard()
    task = task_of(config)
    model = build_model(shallow(config), vocab_size=task.vocab_size, device="meta").model
    check_scheme(config)
    start = start_of(config, task.vocab_size)
    device = choose_device(config.runtime)
    ranks = join_ranks(device, stop or (lambda: None))
    ranks.share(config.train.batch_size)
    refuse_cut_settings(config, ranks)
    with (
        locked_folder(config, study_folder, task, ranks, parent) as (path, folder, state),
        torch_settings(config, device, ranks) as threads,
        closing(TensorBoardLog()) as tracker,
    ):
        if not ranks.is_rank0:
            observer = Observer()
        if state in ENDED:
            how = f"to train it anew, first: {removal(path)}"
            observer.notify(f"{state} already, left as it is; {how}")
            yield Run(path)
            return
        if ranks.is_rank0:
            registered = [make() for _, make in OBSERVERS.items()] if saves else []
            trackers = [tracker] if tracks else []
            observer = Observers(observer, LogFile(folder), *trackers, *registered)
            if saves:
                refuse_full_disk(config, folder, task.vocab_size)
        notices = memory_notices(config, device, task) if ranks.size == 1 else []
        paths = fast_paths_of(config, device, ranks, model)
        environment = environment_of(config, device, threads, paths, ranks)
        is_new = not folder.exists()
        record = parent.folder if parent and is_new else folder
        notices += ranks.from_rank0(
            lambda: environment_notices(record, environment, allow_env_change)
        )
        if is_new:
            notices += [*task.notices, *(start.fresh if start else ())]
            if parent and ranks.is_rank0:
                parent.begin(folder, task.data)
        for notice in notices:  # after the last refusal: the first notice writes log.txt
            observer.notify(notice)
        yield Prepared(
            config, path, folder, task, start, device, ranks, paths, environment, observer, command
        )


def refuse_non_utf8_path(out: Path) -> None:
    """Raise ConfigError for a path that is not UTF-8: safetensors cannot write to it."""
    try:
        os.fsencode(out).decode()
    except UnicodeDecodeError:
        raise ConfigError(f"{out}: this path is not UTF-8; give another with --out") from None


def refuse_cut_settings(config: conf.Config, ranks: RankGroup) -> None:
    """Raise ConfigError for settings that need what ranks or shards cut: a batch, or matrices."""
    train, model, mode = config.train, config.model, parallelism(config, ranks)
    cuts_matrices = mode == "fully_sharded"
    reason = "it needs whole matrices, and runtime.parallel=fully_sharded cuts them; "
    reason += "allowed with runtime.parallel=data"
    rules: list[tuple[str, object, str]] = [
        (
            "train.shards",
            mode and train.shards > 1,
            f"found {train.shards}, which needs one process; allowed 1",
        ),
        (
            "model.norm.kind",
            model.norm.kind == "batch" and (mode or train.shards > 1),
            "found batch, which needs one process and train.shards=1; or use rms",
        ),
        (
            "model.unique_layers",
            model.unique_layers and (cuts_matrices or train.spectral_penalty),
            "it excludes runtime.parallel=fully_sharded and train.spectral_penalty; allowed null",
        ),
        ("train.optimizer", cuts_matrices and train.optimizer == "muon", reason),
        ("train.spectral_penalty", cuts_matrices and train.spectral_penalty, reason),
        ("log.sharpness_every", cuts_matrices and config.log.sharpness_every, reason),
    ]
    for key, is_broken, text in rules:
        if is_broken:
            raise ConfigError(f"{key}: {text}", key=key)


def refuse_full_disk(config: conf.Config, folder: RunFolder, vocab_size: int) -> None:
    """Raise ResourceError when the files of the run will not fit on the disk."""
    _, needed = conf.disk_estimate(config, vocab_size)
    there = sum(path.stat().st_size for path in folder.path.rglob("*") if path.is_file())
    free = shutil.disk_usage(folder.path).free
    if needed > free + there:
        raise ResourceError(
            f"{folder.path}: the run needs about {needed / 1e6:,.1f} MB on the disk while it is "
            f"trained, {(free + there) / 1e6:,.1f} MB are free; give another folder with --out"
        )


def memory_notices(config: conf.Config, device: torch.device, task: Task) -> list[str]:
    """Return a notice if the memory may not suffice, else none.

    Raises ResourceError if the machine's memory cannot suffice.

    A machine out of memory stalls for all its users; a GPU out of memory only raises an error.
    """
    needed, here = memory_needed(config, task), memory_limit(device)
    if needed <= here:
        return []
    short = (
        f"about {needed / 1e6:,.0f} MB of memory are needed and {here / 1e6:,.0f} MB are here; "
        "to need less: a smaller train.batch_size or model.depth, or runtime.recompute_every=10"
    )
    if device.type == "cpu" and needed > OVERESTIMATE * conf.machine_memory():
        raise ResourceError(short)
    return [short]


def environment_notices(
    record: RunFolder, environment: Mapping[str, Any], allow_change: bool
) -> list[str]:
    """Return a notice of each difference from the environment in which a recorded run began.

    Raises ConfigError, naming every difference, unless `allow_change`.
    """
    changes = environment_changes(record.read_meta().get("environment", environment), environment)
    if changes and not allow_change:
        raise ConfigError(
            f"{record.path} was begun in another environment: {'; '.join(changes)}\n"
            "its numbers need not come out byte for byte; to go on all the same: --allow-env-change"
        )
    return [f"environment: {change}" for change in changes]


@contextmanager
def locked_folder(
    config: conf.Config, study: Path, task: Task, ranks: RankGroup, parent: Parent | None
) -> Iterator[tuple[Path, RunFolder, str | None]]:
    """Yield the path of the run, the folder to write to, and the state of the run.

    Rank 0 locks the run's folder until the end of the block.  Other ranks need not even see its
    disk: they write to a temporary folder, which nobody reads.
    """
    with ExitStack() as stack:

        def lock() -> list[str | None]:
            refuse_foreign_link(study)
            folder = choose_folder(config, study, task, parent=parent)
            try:
                stack.enter_context(folder.lock())
            except ResourceError as error:
                if getattr(error.__cause__, "errno", None) not in READ_ONLY:
                    raise
                with suppress(ResourceError):
                    if (state := folder.read_state()) in ENDED:  # nothing to write
                        return [str(folder.path), state]
                raise ResourceError(f"{error}; give another folder with --out") from error
            try:
                return [str(folder.path), folder.read_state()]
            except ResourceError as error:
                how = f"to train it anew, first: {removal(folder.path)}"
                raise ResourceError(f"{error}; {how}") from error

        path, state = ranks.from_rank0(lock)
        folder = path
        if not ranks.is_rank0:
            folder = stack.enter_context(TemporaryDirectory(prefix="deepstack-"))
        yield Path(path), RunFolder(folder), state


def refuse_foreign_link(study: Path) -> None:
    """Raise ResourceError if a study's folder is a link, but for the user's own one to a folder."""
    if study.is_symlink() and followed(study) == study:
        why = "a link that leads nowhere, or a link that another user made"
        raise ResourceError(f"{study} is {why}; nothing is written there")


def run_name(config: conf.Config) -> str:
    """Return the name of a run's folder, with or without default options in the config."""
    return conf.run_name(without_defaults(config))


def refuse_missing_plugins(config: conf.Config, study: Path) -> None:
    """Raise PluginError if this configuration was trained here with a plugin that is not loaded."""
    for folder in same_runs(study, config):
        try:
            require_recorded(folder, folder.read_meta().get("plugins", []))
        except PluginError as error:
            raise PluginError(
                f"{error}, or, to train with the file that is there: {removal(folder.path)}"
            ) from None


def choose_folder(
    config: conf.Config,
    study: Path,
    task: Task,
    taken: Collection[str] = (),
    parent: Parent | None = None,
) -> RunFolder:
    """Return the folder where this run was trained before, else the first free one.

    taken: names reserved for other runs.  parent: the run from which this one begins.  Raises
    ConfigError if the run could resume, but its data have changed; a run that has ended stays, and
    a new one starts beside it.
    """
    extends = parent.extends if parent else {}
    for folder in same_runs(study, config):
        meta = folder.read_meta()
        if inexact_extension(meta.get("extends")) != inexact_extension(extends):
            continue
        if not (changed := changed_source(meta, task.data, config)):
            return folder
        if folder.checkpoints() and folder.read_status().get("state") not in ENDED:
            key, source, was, now = changed
            raise ConfigError(
                f"{source} has changed since the checkpoint of {folder.path}: its sha256 was "
                f"{was[:12]}…, is {now[:12]}…; put the old one back, or begin another run with "
                "--study",
                key=key,
            )
    return free_folder(study, run_name(config), taken)


def same_runs(study: Path, config: conf.Config) -> Iterator[RunFolder]:
    """Yield a study's runs of this config, except for names, runtime and defaults."""
    for path in sorted(study.glob(f"{run_name(config)}*")):
        folder = RunFolder(path)
        try:
            stored = conf.load_config(folder.config_path) if folder.exists() else None
        except ConfigError:
            continue  # written by another version, whose settings are not ours
        if stored and conf.same_experiment(without_defaults(stored), without_defaults(config)):
            yield folder


def free_folder(study: Path, name: str, taken: Collection[str]) -> RunFolder:
    """Return the first folder of that name, or with a number, that no run has or reserves."""
    numbered = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    folders = (RunFolder(study / one) for one in numbered if one not in taken)
    return next(folder for folder in folders if not folder.exists())


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
