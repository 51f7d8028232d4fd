"""Instruments as far as they need no torch: their settings, intervals, columns and memory.

The file settings.py of an instrument calls `log_settings` and `declare`.  An instrument of a plugin
declares itself by its class (`deepstack.diagnostics.Instrument`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from deepstack.config.section import Section

Columns = Mapping[str, tuple[str, str, str]]
"""Column -> symbol, unit and one sentence."""

SNAPSHOTS = "layers_every"
"""The key in `log` of the interval of snapshots."""

S = TypeVar("S", bound=Section)


class MeasurementSizes(NamedTuple):
    """Sizes from which the memory of a measurement is estimated.

    weights: all parameters, bytes.
    trained: the trained parameters, bytes.
    bank: the largest bank, bytes.
    saved: values that all layers keep for a backward pass on the probe batch, bytes.
    """

    weights: int
    trained: int
    bank: int
    saved: int


def one_gradient(sizes: MeasurementSizes) -> int:
    """Return the bytes of a backward pass on the probe batch: its gradients and saved values."""
    return sizes.trained + sizes.saved


@dataclass(frozen=True)
class InstrumentSpec:
    """The facts about an instrument that need no torch.

    name: name of the instrument; its log is <name>.csv.
    every: key in `log` of its interval; '' for its entry in log.instruments.
    switch: key in `log` that turns it on at that interval; '' if the interval alone does.
    columns: columns of its log, empty if they depend on the model.
    section: key of columns.json under which its columns are described.
    first_step: first step with a row, 0 or 1.
    needs_initial: whether it reads the initial values of all parameters.
    needs_whole_matrices: whether it excludes runtime.parallel=fully_sharded.
    memory: function that returns the bytes at the peak of a measurement.
    module: name of the module that states these facts.
    """

    name: str
    every: str = ""
    switch: str = ""
    columns: Columns | None = None
    section: str | None = "columns"
    first_step: int = 0
    needs_initial: bool = False
    needs_whole_matrices: bool = False
    memory: Callable[[MeasurementSizes], int] = one_gradient
    module: str = ""

    @property
    def key(self) -> str:
        """The dotted setting of its interval."""
        return f"log.{self.every or f'instruments.{self.name}'}"

    def interval(self, log: Any) -> int | str:
        """Return its interval in this `log` section: steps, 'log', or 0 if it is off."""
        if self.switch and not getattr(log, self.switch):
            return 0
        every: int | str = (
            getattr(log, self.every) if self.every else log.instruments.get(self.name, 0)
        )
        return every

    @property
    def is_part_of_snapshots(self) -> bool:
        """Whether its memory counts with the snapshots, of which it shares interval or values."""
        return self.every == SNAPSHOTS or self.needs_initial


_SPECS: dict[str, InstrumentSpec] = {}
_LOG_SETTINGS: dict[int, type[Section]] = {}


def declare(spec: InstrumentSpec) -> InstrumentSpec:
    """Make an instrument known to everything that works without torch; return its spec."""
    _SPECS[spec.name] = spec
    return spec


def specs() -> dict[str, InstrumentSpec]:
    """Return the known instruments by name, in alphabetical order."""
    return dict(sorted(_SPECS.items()))


def log_settings(place: int) -> Callable[[type[S]], type[S]]:
    """Return a decorator that adds the fields of a section to `log`, in the order of `place`."""

    def add(section: type[S]) -> type[S]:
        _LOG_SETTINGS[place] = section
        return section

    return add


def log_sections() -> tuple[type[Section], ...]:
    """Return the classes whose fields make up `log`, as bases: pydantic reads the last first."""
    return tuple(_LOG_SETTINGS[place] for place in sorted(_LOG_SETTINGS, reverse=True))


def switches(every: str) -> dict[str, Any]:
    """Return the settings that turn off optional instruments at an interval: key -> False."""
    return {f"log.{s.switch}": False for s in specs().values() if s.switch and s.every == every}


def without_snapshots() -> dict[str, Any]:
    """Return the settings that turn off snapshots and all that needs them: key -> value."""
    off = {"layers_every": 0, "layers_on": None, "stream_update": False, "streams": False}
    return {f"log.{key}": value for key, value in off.items()} | switches(SNAPSHOTS)
