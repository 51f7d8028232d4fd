"""What a task is: a pure function of (seed, step) to a batch, and the numbers to compare with."""

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from deepstack.errors import ConfigError, PluginError
from deepstack.registry import Registry, unknown

IGNORE = -100
"""Target of a position where nothing is predicted (the default of torch's cross-entropy)."""

# The second word of every random seed. A task that draws something else from the seed, once (the
# Markov chain), uses STRUCTURE, so that no stream repeats another.
TRAIN, VALIDATION, PROBE, STRUCTURE = 1, 2, 3, 4


class Batch(NamedTuple):
    """Sequences to predict in; all three arrays are (batch, seq).

    inputs: int64, the tokens that the model is shown.
    targets: int64, the true token, or IGNORE where nothing is predicted.
    masked: bool, the predicted positions that show [MASK].
    """

    inputs: NDArray[np.int64]
    targets: NDArray[np.int64]
    masked: NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Task:
    """batch = draw(random(seed, stream, index)): the same step gives the same batch, always.

    Nothing is remembered between batches, so a resumed run needs no random state of the task.

    name, vocab_size: as the model and the run folder need them; tokens are 0..vocab_size-1.
    seed: of the run.
    draw: (random, batch_size, held_out) -> Batch. `held_out` asks for data never trained on.
    references: losses in nats that the training loss is compared with.
    data: what was trained on (name, sha256, bytes), as recorded with the run.
    exact_loss: Batch -> the least expected loss, in nats, at that very batch's predicted positions.
    """

    name: str
    vocab_size: int
    seed: int
    draw: Callable[[np.random.Generator, int, bool], Batch]
    references: dict[str, float] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    exact_loss: Callable[[Batch], float] | None = None

    def train_batch(self, step: int, batch_size: int) -> Batch:
        """The batch of training step `step`: a pure function of (seed, step, batch_size)."""
        return self._batch(TRAIN, step, batch_size, held_out=False)

    def validation_batch(self, index: int, batch_size: int) -> Batch:
        """Held-out batch number `index`, the same at every evaluation of a run."""
        return self._batch(VALIDATION, index, batch_size, held_out=True)

    def probe_batch(self, batch_size: int) -> Batch:
        """The fixed held-out batch on which the model update is measured."""
        return self._batch(PROBE, 0, batch_size, held_out=True)

    def optimal_loss(self, batch: Batch) -> float | None:
        """Mean of -ln P(true | all that is shown) over the predicted positions, in nats.

        None where the task's law is not known exactly.
        """
        return None if self.exact_loss is None else self.exact_loss(batch)

    def _batch(self, stream: int, index: int, batch_size: int, *, held_out: bool) -> Batch:
        random = np.random.default_rng([self.seed, stream, index])
        return self.draw(random, batch_size, held_out)


class Option(NamedTuple):
    """One option of a task, as `deepstack list tasks` shows it."""

    name: str
    type: str
    default: Any
    description: str


TaskFunction = Callable[..., Task]
AnyTaskFunction = TypeVar("AnyTaskFunction", bound=TaskFunction)

TASKS: Registry[TaskFunction] = Registry("task")

_GIVEN = ("seq_len", "seed")


def task(name: str) -> Callable[[AnyTaskFunction], AnyTaskFunction]:
    """Writing a function under `@task(name)` registers it as a task.

    Its parameters are keyword-only: `seq_len` and `seed`, which every task is given, and its own
    options, each with a type annotation and a default. `Annotated[float, Field(gt=0, le=1,
    description="...")]` states range and help text. Raises PluginError where that is not so.
    """

    def register(function: AnyTaskFunction) -> AnyTaskFunction:
        if not (function.__doc__ or "").strip():
            raise PluginError(f"task {name!r}: its function needs a docstring; lists show it")
        parameters = inspect.signature(function).parameters
        for given in _GIVEN:
            if given not in parameters:
                raise PluginError(f"task {name!r}: its function needs a parameter {given!r}")
        for key, parameter in parameters.items():
            if parameter.kind is not parameter.KEYWORD_ONLY:
                raise PluginError(f"task {name!r}: parameter {key!r} must be keyword-only")
            bare = parameter.annotation is parameter.empty or parameter.default is parameter.empty
            if bare and key not in _GIVEN:
                raise PluginError(
                    f"task {name!r}: option {key!r} needs a type annotation and a default"
                )
        TASKS.register(name, function)
        return function

    return register


def task_options(name: str) -> list[Option]:
    """The options of task `name`, in the order in which its function has them."""
    function = TASKS[name]
    return [
        Option(
            name=key,
            type=_describe(annotation),
            default=default,
            description=FieldInfo.from_annotation(annotation).description or "",
        )
        for key, (annotation, default) in _signature(name, function).items()
    ]


def build_task(name: str, options: Mapping[str, Any], *, seq_len: int, seed: int) -> Task:
    """Task `name` with its options validated.

    Raises ConfigError for an unknown name, and one with a line per problem for unknown options
    (with the nearest known one), wrong types and values out of range.
    """
    function = TASKS[name]
    known = _signature(name, function)
    problems: dict[str, str] = {}
    values = {}
    for key, value in options.items():
        if key not in known:
            problems[key] = unknown(f"{name} option", key, sorted(known))
            continue
        annotation = known[key][0]
        try:
            values[key] = _adapter(name, key, annotation).validate_python(value)
        except ValidationError as error:
            own = [e["msg"] for e in error.errors() if e["type"] == "value_error"]
            reason = "".join(f"; {text.removeprefix('Value error, ')}" for text in own)
            problems[key] = f"found {_show(value)}; allowed {_describe(annotation)}{reason}"
    if problems:
        lines = [f"task.{key}: {problem}" for key, problem in problems.items()]
        raise ConfigError("\n".join(lines), key=f"task.{next(iter(problems))}")
    built = function(seq_len=seq_len, seed=seed, **values)
    if not isinstance(built, Task):
        raise PluginError(f"task {name!r}: its function returned {type(built).__name__}, no Task")
    return built


def choose_positions(
    random: np.random.Generator, batch_size: int, seq_len: int, rate: float
) -> NDArray[np.bool_]:
    """True at exactly max(1, round(rate seq_len)) positions of each row, all sets equally likely.

    Returns (batch, seq).
    """
    count = max(1, round(rate * seq_len))
    keys = random.random((batch_size, seq_len))
    # Compared with the count-th smallest key, not indexed by argpartition: the order within a
    # partition depends on the processor, and the same seed must give the same batch everywhere.
    bound = np.partition(keys, count - 1, axis=1)[:, count - 1 : count]
    return keys <= bound


def _signature(name: str, function: TaskFunction) -> dict[str, tuple[Any, Any]]:
    """Option -> (annotation, default)."""
    try:
        hints = get_type_hints(function, include_extras=True)
    except Exception as error:  # whatever evaluating a user's annotation raises
        raise PluginError(f"task {name!r}: its annotations cannot be read: {error}") from error
    return {
        key: (hints[key], parameter.default)
        for key, parameter in inspect.signature(function).parameters.items()
        if key not in _GIVEN
    }


def _adapter(name: str, key: str, annotation: Any) -> TypeAdapter[Any]:
    try:
        return TypeAdapter(annotation, config=ConfigDict(strict=True, allow_inf_nan=False))
    except PydanticUserError as error:
        raise PluginError(f"task {name!r}: option {key!r}: {error.message}") from error


def _show(value: Any) -> str:
    """A value as YAML would have it, cut where it is long."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


_WORDS = {int: "integer", float: "number", str: "string", bool: "true or false", NoneType: "null"}
_SIGNS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


def _describe(annotation: Any, bounds: Mapping[str, Any] | None = None) -> str:
    """An annotation in words: "number > 0, <= 1", "non-empty string or null"."""
    bounds = bounds or {}
    if get_origin(annotation) is Annotated:
        info = FieldInfo.from_annotation(annotation)
        names = (*_SIGNS, "min_length", "max_length")
        found = {n: getattr(m, n) for m in info.metadata for n in names if hasattr(m, n)}
        return _describe(info.annotation, found)
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return " or ".join(_describe(part, bounds) for part in inside)
    if origin is Literal:
        return " or ".join(_show(choice) for choice in inside)
    least, most = bounds.get("min_length"), bounds.get("max_length")
    if origin is not None and inside:
        size = f"{most} values" if least == most is not None else "values"
        return f"list of {size}, each {_describe(inside[0])}"
    word = _WORDS.get(annotation, getattr(annotation, "__name__", str(annotation)))
    if annotation is str and least:
        return f"non-empty {word}"
    ranges = ", ".join(f"{sign} {bounds[n]:g}" for n, sign in _SIGNS.items() if n in bounds)
    return f"{word} {ranges}" if ranges and annotation in (int, float) else word
