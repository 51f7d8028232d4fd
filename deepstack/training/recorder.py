"""Records a run: its rows, in groups, so that training never waits; its divergence; its end."""

from __future__ import annotations

import errno
import math
import time
import traceback
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from deepstack.base.errors import (
    ChangedLogError,
    DeepstackError,
    OutOfMemoryError,
    PluginError,
    PluginFailure,
)
from deepstack.base.plugins import bug_in
from deepstack.diagnostics import Culprit
from deepstack.fast import Measured
from deepstack.fast.distributed import lost_rank
from deepstack.records import STEPS_COLUMNS, TIMING_COLUMNS, AppendLog, RunFolder
from deepstack.training.environment import memory_limit, memory_needed, peak_memory_mb
from deepstack.training.observer import LogFile, Observer

if TYPE_CHECKING:
    from deepstack.training.preflight import Prepared


LAG = 10  # steps between two reads of a GPU's results


class Divergence(NamedTuple):
    """The step, quantity and value with which a run diverged: the last row of its log."""

    step: int
    quantity: str
    value: float

    def facts(self) -> dict[str, Any]:
        """Return quantity and value as status.json has them."""
        return {"quantity": self.quantity, "value": repr(self.value)}


def cause(divergence: Divergence, place: Culprit) -> str:
    """Return 'step 3: loss is nan, first not finite in layer 2, forward' for a message."""
    step, quantity, value = divergence
    text = f"step {step}: {quantity} is {value:.4g}"
    if math.isfinite(value):
        return f"{text}, more than train.max_loss"
    if place.layer is not None:
        return f"{text}, first not finite in layer {place.layer}, {place.where}"
    named = place.where in ("embedding", "head")
    return f"{text}, first not finite in the {place.where}" if named else text


def open_logs(
    folder: RunFolder,
    columns: Mapping[str, Iterable[str]],
    resources: ExitStack,
    replay_from: int = -1,
    tolerance: float = 0.0,
) -> dict[str, AppendLog]:
    """Open steps.csv, timing.csv and further logs of a run until `resources` closes them.

    columns: name of a further log -> names of its columns.  Rows after `replay_from` that exist
    already are compared.
    """
    columns = {"steps": STEPS_COLUMNS, "timing": TIMING_COLUMNS, **columns}
    return {
        name: resources.enter_context(folder.log(name, names, replay_from, tolerance=tolerance))
        for name, names in columns.items()
    }


def sync_logs(logs: Collection[AppendLog], *, ended: bool = False) -> dict[str, str]:
    """Sync the logs to the disk and return the sha256 of each one by its file name.

    Raises ChangedLogError if a file differs from the rows written.
    """
    for log in logs:
        log.flush()
        log.check(ended=ended)
    return {log.path.name: log.sha256 for log in logs}


class PendingRow(NamedTuple):
    """A row that is not written yet; values: those of the columns `names`, on the device."""

    step: int
    lr: float
    names: list[str]
    values: Tensor


def stacked(values: Mapping[str, Tensor]) -> Tensor:
    """Copy 0-d tensors into one of fp32, (values,): the next step may write into them."""
    return torch.stack([value.float() for value in values.values()])


class Recorder:
    """Writes steps.csv and timing.csv; finds the step at which a run diverged.

    must_be_finite: columns whose first value that is not finite is a divergence, besides the loss.
    """

    def __init__(
        self,
        logs: Mapping[str, AppendLog],
        device: torch.device,
        max_loss: float,
        observer: Observer,
        must_be_finite: Sequence[str] = ("grad_norm", "model_update"),
    ) -> None:
        self.steps, self.timing = logs["steps"], logs["timing"]
        self.device, self.max_loss, self.observer = device, max_loss, observer
        self.must_be_finite = must_be_finite
        self.lag = 1 if device.type == "cpu" else LAG
        self.divergence: Divergence | None = None
        self._pending: list[PendingRow] = []
        self._last: tuple[PendingRow, Measured] | None = None  # its probe may not be measured yet
        self._clock = time.perf_counter()

    def add(self, step: int, lr: float, measured: Measured) -> None:
        """Keep the row of step t; write all rows once there are `lag` of them.

        The row begins with the values of the step, at θ_{t-1}.  The values of the probe follow, at
        θ_t: now, or with `settle` when step t + 1 is added, beside which the probe has run.
        """
        self._add_probe()  # to row t - 1
        of_step = {"loss": measured.loss, "grad_norm": measured.grad_norm}
        self._last = PendingRow(step, lr, [*of_step], stacked(of_step)), measured
        if measured.settle is None:
            self._add_probe()  # to row t
        if len(self._pending) >= self.lag:
            self._write()

    def _add_probe(self) -> None:
        """Complete the last row with the values of its probe, unless that is done."""
        if self._last is None:
            return
        (step, lr, names, values), (_, _, probe, _) = self._last
        self._last = None
        values = torch.cat([values, stacked(probe)])
        self._pending.append(PendingRow(step, lr, [*names, *probe], values))

    def flush(self) -> None:
        """Write all pending rows, up to and including the one that diverged."""
        if self._last and (settle := self._last[1].settle) and not self.divergence:
            settle()
        self._add_probe()
        self._write()

    def _write(self) -> None:
        if not self._pending or self.divergence:
            self._pending = []  # the diverged row is the last one
            return
        rows = torch.stack([row.values for row in self._pending]).tolist()
        # A GPU runs behind the host, so that only the time of all pending steps is known.
        before, self._clock = self._clock, time.perf_counter()
        milliseconds = (self._clock - before) * 1000 / len(rows)
        memory = peak_memory_mb(self.device)
        for (step, lr, names, _), values in zip(self._pending, rows, strict=True):
            row = {"step": step, "lr": lr, **dict(zip(names, values, strict=True))}
            self.steps.write(row)
            self.timing.write({"step": step, "step_ms": milliseconds, "peak_memory_mb": memory})
            self.observer.stepped(step, {**row, "step_ms": milliseconds})
            if reason := self._diverged(row):
                self.divergence = Divergence(step, *reason)
                break
        self._pending = []

    def _diverged(self, row: dict[str, float]) -> tuple[str, float] | None:
        if not row["loss"] <= self.max_loss:  # False for a loss that is NaN
            return "loss", row["loss"]
        for name in self.must_be_finite:
            if not abs(row[name]) < float("inf"):
                return name, row[name]
        return None

    def pause(self) -> None:
        """Exclude the time since the last row, of an evaluation or snapshot, from the next step."""
        self._clock = time.perf_counter()

    def release(self) -> None:
        """Release the last step's tensors."""
        self._last = None


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
    progress = Progress()
    try:
        yield progress
    except ChangedLogError as error:
        record_failure(run, "failed", progress.step, error=str(error), changed_log=True)
        advice = "training it again keeps its logs in aside/ and starts from step 0"
        raise ChangedLogError(f"{error}\nthe run has failed; {advice}") from error
    except PluginError as error:
        if progress.step == progress.resumed_from:
            raise
        record_failure(run, "failed", progress.step, error=str(error))
        raise PluginFailure(str(error), key=error.key) from error
    except DeepstackError:
        raise
    except Exception as error:
        if run.ranks.size > 1 and (lost := lost_rank(error)):
            raise lost from error
        if is_out_of_memory(error):
            raise out_of_memory(run, progress, error) from error
        LogFile(run.folder).line(traceback.format_exc())
        record_failure(run, "failed", progress.step, error=bug_in(error) or repr(error))
        error.add_note(f"the traceback: {run.folder.log_path}")
        raise


def record_failure(run: Prepared, state: str, step: int, **facts: Any) -> None:
    """Write the status of a run that has failed, and tell its observer."""
    run.folder.write_status(state, step, **facts)
    with suppress(Exception):  # the observer may be what failed
        run.observer.finished(state, step)


def out_of_memory(run: Prepared, progress: Progress, error: Exception) -> OutOfMemoryError:
    """Write the status out_of_memory and return the error to report."""
    estimate = round(memory_needed(run.config, run.task) / 1e6)
    limit = round(memory_limit(run.device) / 1e6)
    record_failure(
        run,
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
