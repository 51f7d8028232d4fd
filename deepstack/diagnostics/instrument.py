"""Instruments: measurements of a run at their own interval, each with its own log."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from deepstack import config as conf
from deepstack.base.errors import ConfigError, PluginError
from deepstack.base.registry import Registry, nearest, place_of, unknown
from deepstack.config.instruments import Columns, InstrumentSpec, declare, specs
from deepstack.diagnostics.snapshot import ADDED
from deepstack.diagnostics.update import ModelUpdate
from deepstack.model import Transformer
from deepstack.model.build import Built
from deepstack.records import EVALS_COLUMNS, STEPS_COLUMNS, TIMING_COLUMNS, Run

TAKEN_COLUMNS = {*STEPS_COLUMNS, *EVALS_COLUMNS, *TIMING_COLUMNS}

FACTS = ("every", "switch", "columns", "first_step", "needs_initial", "needs_whole_matrices")

Row = Mapping[str, float | Tensor | None]
"""The values of a log's columns after a step: numbers, 0-d tensors, or None for an empty cell."""


@dataclass
class RunState:
    """A run after a step, as instruments see it.  They leave parameters and gradients unchanged.

    step: number of the step, 0 at initialisation.
    config: configuration of the run.
    built: model, on rank 0 the whole one, with its banks of parameters.
    inputs, targets: probe batch, (batch, seq).
    loss: function from logits to the mean loss on the probe batch, without label smoothing.
    optimizer: optimizer of the run.
    update: F_0 and F_t on the probe batch, as `initial` and `previous`.
    initial: initial values θ_0 by key of a bank, (depth, …), for instruments that need them.
    shared: values that the methods of instruments share at this step.
    """

    step: int
    config: conf.Config
    built: Built
    inputs: Tensor
    targets: Tensor
    loss: Callable[[Tensor], Tensor]
    optimizer: torch.optim.Optimizer
    update: ModelUpdate
    initial: Mapping[str, Tensor]
    shared: dict[str, Any] = field(default_factory=dict)

    @property
    def model(self) -> Transformer:
        """The model."""
        return self.built.model


class Instrument:
    """A measurement of a run at its own interval.  Each subclass registers itself by its name.

    `measure` returns a row of the log <name>.csv.  `of_layers` returns values of layers for the
    snapshot of the step, which diagnostics read.  An instrument has one of the two, or both.  A run
    makes one object of each instrument that its configuration turns on.  Its methods run inside of
    `measuring`: in evaluation mode, without autocast, with plain layers, whose hooks see every
    call.  One that needs no hooks may enter `state.model.with_fast_paths()`.

    columns: columns of the log: symbol, unit and one sentence each.
    every: key in `log` of the interval; by default the instrument's entry in log.instruments.
    switch: key in `log` that turns it on at that interval; by default the interval alone does.
    first_step: first step with a row, 0 or 1.
    adds: name of its value in snapshots.
    needs_initial: whether `measure` reads `state.initial`.
    needs_whole_matrices: whether it excludes runtime.parallel=fully_sharded.

    An instrument whose folder has a settings.py states these there, except for `adds`.
    """

    name: ClassVar[str]
    spec: ClassVar[InstrumentSpec]
    columns: ClassVar[Columns] = {}
    every: ClassVar[str] = ""
    switch: ClassVar[str] = ""
    first_step: ClassVar[int] = 0
    adds: ClassVar[str] = ""
    needs_initial: ClassVar[bool] = False
    needs_whole_matrices: ClassVar[bool] = False

    def __init_subclass__(cls, *, name: str, **more: Any) -> None:
        super().__init_subclass__(**more)
        cls.name = name
        INSTRUMENTS.register(name, cls)
        if cls.__module__.startswith("deepstack.") and name in specs():
            cls.spec = specs()[name]
        else:
            facts = {fact: getattr(cls, fact) for fact in FACTS}
            cls.spec = InstrumentSpec(name, **facts, module=cls.__module__)
            if cls.has_log():
                refuse_taken_names(cls)
                declare(cls.spec)
        if cls.adds:
            ADDED.add(cls.adds)

    @classmethod
    def has_log(cls) -> bool:
        """Return whether it writes rows into a log."""
        return cls.measure is not Instrument.measure

    def columns_of(self, built: Built) -> Columns:
        """Return the columns of the log for a model."""
        return self.spec.columns or {}

    def begin(self, state: RunState) -> None:
        """Prepare for a run, whose parameters are θ_0; called before a checkpoint is loaded."""

    def measure(self, state: RunState) -> Row:
        """Return a row of the log: column -> value."""
        raise NotImplementedError

    def of_layers(self, state: RunState) -> Mapping[str, Any]:
        """Return the value that it adds to the snapshot of each stack: side -> value."""
        raise NotImplementedError


INSTRUMENTS: Registry[type[Instrument]] = Registry("instrument")


def refuse_taken_names(cls: type[Instrument]) -> None:
    """Raise PluginError if the log or a column of an instrument has the name of another one."""
    if hasattr(Run, cls.name) or cls.name == "layers":
        raise PluginError(
            f"the instrument name {cls.name!r} is that of an attribute of runs; choose another name"
        )
    if not cls.columns:
        raise PluginError(f"instrument {cls.name!r}: its class has no `columns`")
    taken = {
        column
        for spec in specs().values()
        if spec.name != cls.name
        for column in spec.columns or ()
    }
    if both := sorted({*cls.columns} & (taken | TAKEN_COLUMNS)):
        raise PluginError(
            f"instrument {cls.name!r}: its column {both[0]!r} is also one of another log; choose "
            "another name"
        )


def check_instruments(log: Any) -> None:
    """Raise ConfigError for an entry of log.instruments that is unknown or has another setting."""
    settings = {name: one.spec.switch or one.spec.every for name, one in INSTRUMENTS.items()}
    allowed = [name for name, setting in settings.items() if not setting]
    for name in log.instruments:
        near = name if name in settings else nearest(name, settings)
        if name in allowed:
            continue
        if name in settings:
            text = f"found {name}, which has a setting of its own; use log.{settings[name]}"
        elif near and settings[near]:
            text = f"unknown instrument {name!r}; did you mean log.{settings[near]}?"
        else:
            text = f"{unknown('instrument', name, allowed)}; your own comes with --plugin FILE"
        raise ConfigError(f"log.instruments: {text}", key="log.instruments")


@contextmanager
def refusing_changes(instrument: Instrument, method: str, built: Built) -> Iterator[None]:
    """Raise PluginError if the block changes a parameter, or torch's random state on the CPU.

    method: of the instrument, which the block calls.

    Parameters are compared by the sum of their bits, which takes no memory.
    """
    before = sums_of_bits(built), torch.get_rng_state()
    yield
    place = f"instrument {instrument.name!r}: {place_of(getattr(type(instrument), method))}"
    if sums_of_bits(built) != before[0]:
        raise PluginError(
            f"{place}it changes parameters; allowed to restore them bit for bit before it returns"
        )
    if not torch.equal(torch.get_rng_state(), before[1]):
        raise PluginError(
            f"{place}it draws torch's global random numbers; allowed a torch.Generator with a seed"
        )


def sums_of_bits(built: Built) -> list[int]:
    """Return the sum of the bits of each parameter, read as whole numbers."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    parameters = [p.detach() for p in built.model.parameters()]
    bits = [p.view(integers[p.element_size()]) for p in parameters]
    return [int(one.sum(dtype=torch.int64)) for one in bits]


def checked_row(instrument: Instrument, row: Any, columns: Columns) -> dict[str, float | None]:
    """Return a row with numbers in the place of tensors.

    Raises PluginError if it has other columns, or tensors of other shapes.
    """
    place = place_of(type(instrument).measure)
    if not isinstance(row, Mapping) or row.keys() != columns.keys():
        found = ", ".join(map(str, row)) if isinstance(row, Mapping) else type(row).__name__
        raise PluginError(
            f"instrument {instrument.name!r}: {place}found {found or 'no columns'}; allowed its "
            f"columns: {', '.join(columns)}"
        )
    for column, value in row.items():
        if isinstance(value, Tensor) and value.numel() != 1:
            raise PluginError(
                f"instrument {instrument.name!r}: {place}found {tuple(value.shape)} for {column}; "
                "allowed one number"
            )
        if not isinstance(value, Tensor | float | int | None):
            raise PluginError(
                f"instrument {instrument.name!r}: {place}found {value!r} for {column}; allowed a "
                "number, or None for an empty cell"
            )
    return {
        name: value.item() if isinstance(value, Tensor) else value for name, value in row.items()
    }
