"""Takes the snapshot of every layer and the rows of instruments that are due after a step."""

import contextlib
import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import partial

import torch
from torch import Tensor

from deepstack.base.errors import ResourceError
from deepstack.config.instruments import Columns
from deepstack.diagnostics import (
    INSTRUMENTS,
    Instrument,
    ModelUpdate,
    RunState,
    evaluate,
    measuring,
    take,
)
from deepstack.diagnostics.instrument import checked_row, refusing_changes
from deepstack.diagnostics.snapshot import run_passes
from deepstack.diagnostics.spikes import Spike, SpikeFinder
from deepstack.fast import Measured, PassRecorder
from deepstack.model.banks import layer_norms
from deepstack.model.build import Built
from deepstack.model.loss import mean_loss
from deepstack.records import AppendLog, RunFolder
from deepstack.runs.spikes import SPIKES_COLUMNS, SPIKES_LOG
from deepstack.training.parts.ranks import RankModel
from deepstack.training.schedule import count_due, is_due

# Number of written records for each one that may be missing on the disk.
RECORDS_PER_PENDING = 32


class LayerRecords:
    """Records of every layer in the order of their steps, and in layers/ of a run folder.

    A file in layers/ is replaced atomically, with all records.  Replacing it for every snapshot
    would cost time that grows with the square of their number.  From 64 records on it is replaced
    when one in 32 is missing, and whenever `write` is called.

    Only `write` syncs the files to the disk, beside each checkpoint and at the end: fifty syncs can
    take as long as the snapshot.  A checkpoint holds the records as well, so that a resumed run
    writes files anew that a power cut has damaged.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self._steps: list[int] = []
        self._values: dict[str, list[Tensor]] = {}  # each (records, depth), to be joined
        self._written = self._synced = 0  # the number of records in the files, and on the disk

    def add(self, step: int, values: Mapping[str, Tensor]) -> None:
        """Add the values of every layer after a step: name -> (depth,)."""
        for name, value in values.items():
            self._values.setdefault(name, []).append(value.cpu().reshape(1, -1))
        self._steps.append(step)
        if len(self._steps) - self._written >= max(1, self._written // RECORDS_PER_PENDING):
            self._replace_files(sync=False)

    def write(self) -> None:
        """Write all records to the folder and the disk, if any are missing there."""
        if len(self._steps) > self._synced:
            self._replace_files(sync=True)
            self._synced = len(self._steps)

    def _replace_files(self, *, sync: bool) -> None:
        values = self.state()
        del values["steps"]
        self.folder.write_layers(values, self._steps, sync=sync)
        self._written = len(self._steps)

    def state(self) -> dict[str, Tensor]:
        """Return the records for a checkpoint: name -> (records, depth), and their steps."""
        for rows in self._values.values():
            rows[:] = [torch.cat(rows)]
        values = {name: rows[0] for name, rows in self._values.items()}
        return values | {"steps": torch.tensor(self._steps, dtype=torch.int64)}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Load the records that `state` returned; the folder may lack some of them."""
        self._steps = state["steps"].tolist()
        self._values = {name: [rows] for name, rows in state.items() if name != "steps"}
        self._written = self._synced = 0


class SnapshotWriter:
    """Takes snapshots and runs instruments on the probe batch, without disturbing training.

    Instruments run inside of `measuring`.  Create it before a checkpoint is loaded: it keeps the
    present parameters as θ_0.

    spikes: finds the steps that get a record besides the interval; None if the run wants none.
    """

    def __init__(
        self,
        folder: RunFolder,
        model: RankModel,
        probe: tuple[Tensor, Tensor],
        update: ModelUpdate,
        optimizer: torch.optim.Optimizer,
        fast: PassRecorder,
    ) -> None:
        config, built = model.plan.config, model.built
        self.model, self.config = model, config
        self.built, self.update = built, update
        self.inputs, self.targets = probe
        self.optimizer = optimizer
        every = config.log.layers_every
        used = [one() for one in INSTRUMENTS.values() if one.spec.interval(config.log)]
        self.measuring = [one for one in used if one.has_log()]
        self._tried: set[tuple[str, str]] = set()  # instrument and method
        self.adding = [one for one in used if one.adds and every]
        self._intervals: list[tuple[int | str, int]] = [(every, 0)] if every else []
        self._intervals += [self._interval(one) for one in self.measuring]
        self._banks = [bank for bank in built.banks if bank.in_layers]
        self._initial: dict[str, Tensor] = {}
        needs_all = any(one.spec.needs_initial for one in self.measuring)
        if every or needs_all:
            banks = built.banks.all if needs_all else self._banks
            self._initial = {bank.key: on_host(bank.values()) for bank in banks}
        self._before: list[Tensor] | None = None
        self.records = LayerRecords(folder)
        self.spikes = SpikeFinder() if config.log.layers_on == "spike" else None
        self._loss = partial(mean_loss, targets=self.targets)
        records = count_due(every, config.train.steps)
        passes = partial(run_passes, built.model, loss=self._loss)
        self._passes = fast.snapshot(passes, records, self._run_shallow_passes)
        self.logs: Mapping[str, AppendLog] = {}  # of `columns`, opened after a checkpoint is loaded
        self._begin([one for one in used if type(one).begin is not Instrument.begin])

    def _begin(self, instruments: Sequence[Instrument]) -> None:
        """Let instruments look at the model before the first step."""
        if instruments and (copy := self.model.whole()):
            with measuring(copy.model):
                for one in instruments:
                    one.begin(self._state(copy, 0))

    def _run_shallow_passes(self, tokens: Tensor) -> None:
        """Run the passes of a snapshot of two layers, whose values do not matter."""
        shallow = deepcopy(self.model.plan.shallow).to_empty(device=tokens.device)
        with torch.no_grad():
            for tensor in (*shallow.parameters(), *shallow.buffers()):
                tensor.zero_()
        run_passes(shallow, tokens, loss=self._loss)

    def columns(self) -> dict[str, Columns]:
        """Return symbol, unit and description of each column of the logs that this writes."""
        logs = {one.name: one.columns_of(self.built) for one in self.measuring}
        return logs if self.spikes is None else {**logs, SPIKES_LOG: without_step(SPIKES_COLUMNS)}

    def _interval(self, one: Instrument) -> tuple[int | str, int]:
        """Return the interval of an instrument, and the first step with a row."""
        return one.spec.interval(self.config.log), one.spec.first_step

    def _is_due(self, every: int | str, first: int, step: int) -> bool:
        return step >= first and is_due(every, step, self.config.train.steps)

    def is_due(self, step: int) -> bool:
        """Return whether a snapshot or the row of an instrument is due after this step."""
        due = (self._is_due(*interval, step) for interval in self._intervals)
        return any(due) or self._spike_at(step) is not None

    def _spike_at(self, step: int) -> Spike | None:
        found = self.spikes.spike if self.spikes else None
        return found if found and found.step == step else None

    def _layers_are_due(self, step: int) -> bool:
        is_usual = self._is_due(self.config.log.layers_every, 0, step)
        return is_usual or self._spike_at(step) is not None

    def prepare(self, step: int) -> None:
        """Copy the parameters before a step after which a snapshot is due, or may become due."""
        due = self.spikes is not None or self._layers_are_due(step)
        self._before = [bank.values().clone() for bank in self._banks] if due else None

    def follow(self, step: int, measured: Measured) -> None:
        """Look for a spike at this step, if the run wants records of them; waits for a GPU.

        A loss above train.max_loss ends the run and changes no parameter: it is left out.
        """
        if self.spikes is None or self._before is None:
            return
        changes: dict[str | None, list[Tensor]] = {}
        for bank, before in zip(self._banks, self._before, strict=True):
            changes.setdefault(bank.stack, []).append(bank.values() - before)
        norms = torch.cat([layer_norms(changes[side]) for side in self.built.model.stacks])
        of_step = torch.stack([measured.loss, measured.grad_norm]).to(norms)
        loss, grad_norm, *by_layer = torch.cat([of_step, norms]).tolist()
        is_kept = loss <= self.config.train.max_loss
        self.spikes.follow(step, loss if is_kept else math.nan, grad_norm, by_layer)

    def take(self, step: int) -> None:
        """Take the snapshot and the rows that are due at this step and write them."""
        device = self.inputs.device
        copy = self.model.whole()
        before, self._before = self._before, None
        if copy is None:
            return
        state = self._state(copy, step)
        if self._layers_are_due(step):
            self._take_layers(state, [b.to(device) for b in before] if before else None)
            before = None
        if spike := self._spike_at(step):
            self.logs[SPIKES_LOG].write(spike._asdict())
        for one in self.measuring:
            if self._is_due(*self._interval(one), step):
                with measuring(copy.model), self._trial(one, "measure", copy):
                    values = one.measure(state)
                row = checked_row(one, values, one.columns_of(copy))
                self.logs[one.name].write({"step": step, **row})

    def _trial(
        self, one: Instrument, method: str, built: Built
    ) -> contextlib.AbstractContextManager[None]:
        """Return a context that refuses a method that changes the run, at its first use."""
        if (one.name, method) in self._tried:
            return contextlib.nullcontext()
        self._tried.add((one.name, method))
        return refusing_changes(one, method, built)

    def _state(self, whole: Built, step: int) -> RunState:
        """Return the run after a step as instruments see it."""
        return RunState(
            step=step,
            config=self.config,
            built=whole,
            inputs=self.inputs,
            targets=self.targets,
            loss=self._loss,
            optimizer=self.optimizer,
            update=self.update,
            initial=self._initial,
        )

    def _take_layers(self, state: RunState, before: list[Tensor] | None) -> None:
        banks = [bank for bank in state.built.banks if bank.in_layers]
        added = {}
        for one in self.adding:
            with measuring(state.model), self._trial(one, "of_layers", state.built):
                added[one.adds] = one.of_layers(state)
        snapshots = take(
            state.model,
            banks,
            self.inputs,
            self._loss,
            before=before,
            initial=[self._initial[bank.key] for bank in banks],
            added=added,
            passes=self._passes(self.inputs) if state.built is self.built else None,
        )
        self.records.add(state.step, evaluate(snapshots, self.config.model))

    def close(self) -> None:
        """Write the pending snapshots of a failed run if the disk allows."""
        with contextlib.suppress(ResourceError):
            self.records.write()


def without_step(columns: Columns) -> Columns:
    """Return the columns of a log besides the step, which every log has."""
    return {name: facts for name, facts in columns.items() if name != "step"}


def on_host(values: Tensor) -> Tensor:
    """Return a copy in host memory: θ_0 is read only once per snapshot.

    Ranks other than 0 have no values of a sharded bank; theirs stay on the meta device.
    """
    return values.cpu() if values.is_cuda else values.clone()
