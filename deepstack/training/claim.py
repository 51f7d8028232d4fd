"""Claims the folder of a planned run: locks it, and compares its record with the plan."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deepstack.base.errors import ConfigError
from deepstack.fast import FastPaths
from deepstack.records import ENDED, RunFolder, suggest_removal
from deepstack.runs.trackers import live_logs
from deepstack.training.environment import (
    environment_changes,
    environment_of,
    torch_settings,
)
from deepstack.training.folders import locked_folder
from deepstack.training.observer import OBSERVERS, LogFile, Observer, Observers
from deepstack.training.plan import RunPlan
from deepstack.training.resources import memory_notices, refuse_full_disk


@dataclass(frozen=True)
class Claim:
    """A planned run with its folder, which this process has locked.

    path: the run's path.
    folder: where this rank writes; temporary except on rank 0.
    state: the state that the folder records, or None for a new run.
    """

    plan: RunPlan
    path: Path
    folder: RunFolder
    state: str | None

    @property
    def has_ended(self) -> bool:
        """Whether the run is done or has diverged, so that it is not trained again."""
        return self.state in ENDED


@dataclass(frozen=True)
class Prepared(Claim):
    """A claimed run that can start.

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
def claim(plan: RunPlan) -> Iterator[Claim]:
    """Yield a run with its folder, locked inside the block; a refused run leaves none behind.

    Raises ConfigError and ResourceError.
    """
    with locked_folder(plan) as (path, folder, state):
        yield Claim(plan, path, folder, state)


@contextmanager
def prepare(
    claimed: Claim,
    observer: Observer,
    *,
    allow_env_change: bool = False,
    command: str = "",
    saves: bool = True,
) -> Iterator[Prepared]:
    """Compare the machine and the record of a run that has not ended with its plan; yield it ready.

    Inside the block torch has the run's threads and determinism.

    saves: whether the run saves checkpoints, which must fit on the disk.

    Raises ConfigError, ResourceError and Interrupted.
    """
    plan, folder, ranks = claimed.plan, claimed.folder, claimed.plan.ranks
    config = plan.config
    with (
        torch_settings(config, plan.device, ranks),
        ExitStack() as logs,
    ):
        if ranks.is_rank0:
            registered = [make() for _, make in OBSERVERS.items()] if saves else []
            trackers = [logs.enter_context(closing(log())) for log in live_logs(config.log.to)]
            log_file: Observer = LogFile(folder)
            observer = Observers(observer, log_file, *trackers, *registered)
            if saves:
                refuse_full_disk(plan, folder)
        else:
            observer = log_file = Observer()
        notices = memory_notices(plan) if ranks.size == 1 else []
        is_new = not folder.exists()
        record = plan.origin if plan.origin and is_new else folder
        recorded = record.read_meta().get("environment")
        paths = plan.fast_paths(observer.notify, recorded)
        torch.set_num_threads(plan.threads.of_operation(paths))
        executor = plan.executor_notice(paths, recorded)
        environment = environment_of(plan, paths)
        notices += ranks.from_rank0(
            lambda: environment_notices(record, environment, allow_env_change, executor)
        )
        if is_new:
            notices += plan.notices
            for part in plan.parts if ranks.is_rank0 else ():
                part.enter(plan, folder)
        for notice in notices:  # after the last refusal: the first notice writes log.txt
            observer.notify(notice)
        for line in executor:  # the kernels' name tells a user nothing
            log_file.notify(line)
        yield Prepared(
            **vars(claimed),
            threads=plan.threads.of_run(paths),
            paths=paths,
            environment=environment,
            observer=observer,
            command=command,
        )


def notify_ended(claimed: Claim, observer: Observer) -> None:
    """Tell the user that a run has ended already and how to train it anew."""
    how = f"to train it anew, first: {suggest_removal(claimed.path)}"
    if claimed.plan.ranks.is_rank0:
        observer.notify(f"{claimed.state} already, left as it is; {how}")


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
