"""How a run ends: its status, the message about it, and the error to raise."""

import errno
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from deepstack.base.errors import (
    ChangedLogError,
    DeepstackError,
    OutOfMemoryError,
    PluginError,
    PluginFailure,
)
from deepstack.base.plugins import bug_in
from deepstack.fast.distributed import lost_rank
from deepstack.records import write_end
from deepstack.training.claim import Prepared
from deepstack.training.observer import LogFile, Observer
from deepstack.training.resources import memory_limit

TRAINING_STEP = "the training step"


@dataclass
class RunProgress:
    """The present position of a run, for displays and for the message about its end.

    observer: learns which activity begins.
    phase: the present activity.
    step: the last completed step.
    resumed_from: the step of the checkpoint from which this process resumed the run, 0 for none.
    has_stepped: whether a training step has begun; the first one records and compiles.
    """

    observer: Observer = field(default_factory=Observer)
    phase: str = ""
    step: int = 0
    resumed_from: int = 0
    has_stepped: bool = False

    def begin(self, phase: str) -> None:
        """Begin an activity."""
        self.phase = phase
        is_step = phase == TRAINING_STEP
        self.observer.working("" if is_step and self.has_stepped else phase)
        self.has_stepped |= is_step


def is_out_of_memory(error: Exception) -> bool:
    """Return whether a GPU, the CPU's allocator (a RuntimeError) or Python ran out of memory."""
    return (
        isinstance(error, (torch.OutOfMemoryError, MemoryError))
        or (isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error))
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
    )


@contextmanager
def recorded_outcome(run: Prepared) -> Iterator[RunProgress]:
    """Yield the progress to be updated; if the block fails, record why in status.json.

    An error that deepstack raises on purpose (a full disk, for example) leaves the status
    unchanged, and the same command resumes the run.
    """
    progress = RunProgress(run.observer)
    progress.begin("building the model")
    try:
        yield progress
    except Exception as error:
        failure = failure_of(run, progress, error)
        if failure.state:
            record_end(run, failure.state, progress.step, **failure.facts)
        if failure.error is error:
            raise
        raise failure.error from error
    finally:
        run.observer.working("")


@dataclass(frozen=True)
class Failure:
    """The failure of a run.

    error: the error to raise.
    state: the state to record; None leaves the status unchanged.
    facts: further values for status.json.
    """

    error: Exception
    state: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


def failure_of(run: Prepared, progress: RunProgress, error: Exception) -> Failure:
    """Return how an error ends a run; write the traceback of a bug to log.txt.

    A PluginError before the first step of this process is a refusal, and later a failure.
    """
    if isinstance(error, ChangedLogError):
        advice = "training it again keeps its logs in aside/ and starts from step 0"
        changed = ChangedLogError(f"{error}\nthe run has failed; {advice}")
        return Failure(changed, "failed", {"error": str(error), "changed_log": True})
    if isinstance(error, PluginError) and progress.step > progress.resumed_from:
        broken = PluginFailure(str(error), key=error.key)
        return Failure(broken, "failed", {"error": str(error)})
    if isinstance(error, DeepstackError):
        return Failure(error)
    if run.plan.ranks.size > 1 and (lost := lost_rank(error)):
        return Failure(lost)
    if is_out_of_memory(error):
        return out_of_memory(run, progress, error)
    LogFile(run.folder).line(traceback.format_exc())
    facts = {"error": bug_in(error) or repr(error)}
    error.add_note(f"the traceback: {run.folder.log_path}")
    return Failure(error, "failed", facts)


def out_of_memory(run: Prepared, progress: RunProgress, error: Exception) -> Failure:
    """Return the failure of a run without memory, with its estimate and the limit."""
    estimate = round(run.plan.memory / 1e6)
    limit = round(memory_limit(run.plan.device) / 1e6)
    reason = (str(error) or "an allocation failed").splitlines()[0]  # Python's has no words
    told = OutOfMemoryError(
        f"{run.path}: out of memory in {progress.phase} after step {progress.step} "
        f"(estimate {estimate:,} MB, limit {limit:,} MB): {reason}"
    )
    facts = {
        "error": str(error),
        "phase": progress.phase,
        "estimate_mb": estimate,
        "limit_mb": limit,
    }
    return Failure(told, "out_of_memory", facts)


def record_end(
    run: Prepared,
    state: str,
    step: int,
    *,
    logs: Mapping[str, str] | None = None,
    **facts: Any,
) -> None:
    """Write how a run has ended, and tell its observer.

    logs: the sha256 of logs, where known.
    facts: further values for status.json.
    """
    runtime = run.plan.config.runtime
    kept = state not in ("diverged", *([] if runtime.keep_final_weights else ["done"]))
    write_end(run.folder, state, step, checkpoints=kept, logs=logs, **facts)
    failures = (Exception,) if state in ("failed", "out_of_memory") else ()
    with suppress(*failures):  # the observer may be what failed
        run.observer.finished(state, step)
