"""The registry of analyses, their model, samples and settings, and the layers they change."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps

import torch
from torch import Tensor

from deepstack.base import ConfigError, Registry
from deepstack.records import Analysis, Column
from deepstack.tools.depth_use.layered import Layered, Sample

MOST_LAYERS = 128
"""Layers up to which an analysis changes each of them in turn, by default."""


@dataclass(frozen=True)
class Request:
    """The model of an analysis, its samples and its settings.

    held_out: the sample on which losses and states are taken.
    probe: the sample for Jacobians.
    training: the sample on which linear maps are fitted, or None.
    every: change every so many-th layer.
    probes, iterations: of Jacobians.
    ridge: of linear maps, relative to the mean variance of a coordinate.
    other: a second model, whose states are compared with this one's.
    seed: of random probes.
    """

    model: Layered
    held_out: Sample
    probe: Sample
    training: Sample | None = None
    every: int | None = None
    probes: int = 8
    iterations: int = 30
    ridge: float = 1e-6
    other: Layered | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in {"every": 1, "probes": 2, "iterations": 2}.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name}: found {value}; allowed {least} or more")

    @property
    def step(self) -> int:
        """The distance between the layers that are changed."""
        return self.every or math.ceil(self.model.depth / MOST_LAYERS)

    def chosen(self, result: Analysis) -> list[int]:
        """Return every so many-th layer, from 0 on, and note it if some are left out."""
        if self.step > 1:
            result.notes.append(
                f"only layers 1, {1 + self.step}, {1 + 2 * self.step}, … of {self.model.depth} are "
                "changed or compared; all of them: --every 1"
            )
        return list(range(0, self.model.depth, self.step))


Measure = Callable[[Request, Analysis], None]
MEASURES: Registry[Measure] = Registry("analysis")
COLUMNS: dict[str, Mapping[str, Column]] = {}
"""The columns of each analysis."""
USED: dict[str, Sequence[str]] = {}
"""The settings of a request that each analysis reads, of those that not all do."""
REFUSALS: dict[str, Callable[[Request], None]] = {}
"""Of each analysis, the function that raises ConfigError for a request that does not fit."""


def measure(
    name: str,
    columns: Mapping[str, Column],
    *,
    targets: bool = False,
    training: bool = False,
    uses: Sequence[str] = (),
) -> Callable[[Measure], Measure]:
    """Register a function that measures and adds its values to an Analysis with these columns.

    targets, training: whether the request needs them.  A request that does not fit raises
        ConfigError.
    uses: which of every, probes and other it reads.
    """

    def refuse(request: Request) -> None:
        if targets and request.held_out.targets is None:
            raise ConfigError(f"{name}: found no targets, which a loss needs; give targets=…")
        if training and request.training is None:
            raise ConfigError(f"{name}: found no training batches; give training=…")

    def register(function: Measure) -> Measure:
        @wraps(function)
        def checked(request: Request, result: Analysis) -> None:
            refuse(request)
            function(request, result)

        MEASURES.register(name, checked)
        COLUMNS[name], REFUSALS[name] = columns, refuse
        USED[name] = [*uses, *["training_batches"] * training]
        return checked

    return register


def measure_all(names: Sequence[str], request: Request) -> dict[str, Analysis]:
    """Return name -> result of these analyses, in the order of their names.

    If one of several fails with ConfigError, its result is empty, and its note has the reason.
    Raises ConfigError if none can be measured, and before measuring if a request does not fit.
    """
    results, errors = {}, []
    chosen = list(dict.fromkeys(names))
    for name in chosen:
        REFUSALS[name](request)
    with request.model.ready():
        for name in chosen:
            results[name] = Analysis(known=COLUMNS[name])
            try:
                MEASURES[name](request, results[name])
            except ConfigError as error:
                errors.append(error)
                results[name] = Analysis(notes=[f"{name} is not measured: {error}"])
    if errors and len(errors) == len(results):
        raise errors[0]
    return results


def numbers(values: Sequence[Tensor | float]) -> Tensor:
    """Return 0-d tensors or floats as one tensor on the CPU, in double precision."""
    return torch.stack([torch.as_tensor(value, dtype=torch.float64).cpu() for value in values])
