"""Records in status.json how a run ends, whatever ends it."""

from __future__ import annotations

import errno
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from deepstack import config as conf
from deepstack.distributed import lost_rank
from deepstack.errors import (
    ChangedLogError,
    DeepstackError,
    OutOfMemoryError,
    PluginError,
    PluginFailure,
)
from deepstack.plugins import bug_in
from deepstack.schemes import scheme_memory
from deepstack.tasks import Task
from deepstack.training.environment import memory_limit
from deepstack.training.observer import LogFile

if TYPE_CHECKING:
    from deepstack.training.preflight import Prepared


def memory_needed(config: conf.Config, task: Task) -> int:
    """Return the estimated bytes of memory of a run."""
    return conf.memory_estimate(config, task.vocab_size, scheme_memory(config), task.memory)


@dataclass
class Progress:
    """The present position of a run, for the message about its end.

    phase: the present activity.  step: the last completed step.  resumed_from: the step of the
    checkpoint from which this process resumed the run, 0 for none.
    """

    phase: str = "building the model"
    step: int = 0
    resumed_from: int = 0


def is_out_of_memory(error: Exception) -> bool:
    """Return whether a GPU, the CPU's allocator (a RuntimeError) or Python ran out of memory."""
    return (
        isinstance(error, (torch.OutOfMemoryError, MemoryError))
        or (isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error))
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
    )


@contextmanager
def recorded_outcome(run: Prepared) -> Iterator[Progress]:
    """Yield the progress to be updated; if the block fails, record why in status.json.

    The states are failed and out_of_memory; the run itself writes done, diverged and interrupted.
    An error that deepstack raises on purpose (a full disk, for example) leaves the status
    unchanged, and the same command resumes the run.  A PluginError after the first step of this
    process marks the run as failed.
    """
    progress, folder = Progress(), run.folder
    try:
        yield progress
    except ChangedLogError as error:
        folder.write_status("failed", progress.step, error=str(error), changed_log=True)
        advice = "training it again keeps its logs in aside/ and starts from step 0"
        raise ChangedLogError(f"{error}\nthe run has failed; {advice}") from error
    except PluginError as error:
        if progress.step == progress.resumed_from:
            raise
        folder.write_status("failed", progress.step, error=str(error))
        raise PluginFailure(str(error), key=error.key) from error
    except DeepstackError:
        raise
    except Exception as error:
        if run.ranks.size > 1 and (lost := lost_rank(error)):
            raise lost from error
        if is_out_of_memory(error):
            raise out_of_memory(run, progress, error) from error
        LogFile(folder).line(traceback.format_exc())
        folder.write_status("failed", progress.step, error=bug_in(error) or repr(error))
        error.add_note(f"the traceback: {folder.log_path}")
        raise


def out_of_memory(run: Prepared, progress: Progress, error: Exception) -> OutOfMemoryError:
    """Write the status out_of_memory and return the error to report."""
    estimate = round(memory_needed(run.config, run.task) / 1e6)
    limit = round(memory_limit(run.device) / 1e6)
    run.folder.write_status(
        "out_of_memory",
        progress.step,
        error=str(error),
        phase=progress.phase,
        estimate_mb=estimate,
        limit_mb=limit,
    )
    return OutOfMemoryError(
        f"{run.path}: out of memory in {progress.phase} after step {progress.step} "
        f"(estimate {estimate:,} MB, limit {limit:,} MB): {str(error).splitlines()[0]}"
    )
