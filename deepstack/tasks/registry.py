"""The registry of tasks: how a function becomes one, and how a configuration builds it."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, get_args, get_type_hints

import numpy as np

from deepstack.base.errors import ConfigError, PluginError
from deepstack.base.options import OptionsByName, options_of_function, validated
from deepstack.base.registry import Registry, place_of, refuse_no_name
from deepstack.config import Config
from deepstack.tasks.task import Task

TaskFunction = Callable[..., Task]


AnyTaskFunction = TypeVar("AnyTaskFunction", bound=TaskFunction)


TASKS: Registry[TaskFunction] = Registry("task")


_GIVEN = ("seq_len", "seed", "family")


def task(name: str) -> Callable[[AnyTaskFunction], AnyTaskFunction]:
    """Register the decorated function as a task.

    Its parameters are keyword-only: `seq_len`, `seed`, and its options, each with a type annotation
    and a default. A task for more than encoders also has `family`, a Literal of its families.
    `Annotated[float, Field(gt=0, le=1, description="...")]` states range and help text.
    Raises PluginError for any other signature.
    """

    refuse_no_name("task", name)

    def register(function: AnyTaskFunction) -> AnyTaskFunction:
        if not (function.__doc__ or "").strip():
            raise PluginError(f"task {name!r}: its function needs a docstring; lists show it")
        parameters = inspect.signature(function).parameters
        if not {"seq_len", "seed"} <= parameters.keys():
            raise PluginError(f"task {name!r}: its function needs the parameters seq_len and seed")
        for key, parameter in parameters.items():
            incomplete = parameter.empty in (parameter.annotation, parameter.default)
            if parameter.kind is not parameter.KEYWORD_ONLY or (incomplete and key not in _GIVEN):
                raise PluginError(
                    f"task {name!r}: parameter {key!r} must be keyword-only; an option also needs "
                    "a type annotation and a default"
                )
        if "family" in parameters and not get_args(get_type_hints(function)["family"]):
            raise PluginError(
                f"task {name!r}: parameter 'family' must be a Literal of the families it has "
                "batches for, as in Literal['encoder', 'decoder']"
            )
        TASKS.register(name, function)
        return function

    return register


def task_options(name: str) -> OptionsByName:
    """Return the options of task `name`, in the order of its function's parameters."""
    options = options_of_function(TASKS[name], f"task {name!r}")
    return {key: option for key, option in options.items() if key not in _GIVEN}


def task_families(name: str) -> tuple[str, ...]:
    """Return the families of models that task `name` has batches for."""
    hints = get_type_hints(TASKS[name])
    return get_args(hints["family"]) if "family" in hints else ("encoder",)


def build_task(
    name: str, options: Mapping[str, Any], *, seq_len: int, seed: int, family: str = "encoder"
) -> Task:
    """Build task `name` for a family of models, with its options validated.

    Raises ConfigError for an unknown name or a family without batches. Unknown options (with the
    nearest known one), wrong types and values out of range raise one with a line per problem.
    """
    try:
        function = TASKS[name]
    except ConfigError as error:
        raise ConfigError(str(error), key="task.name") from None
    values = validated(task_options(name), options, kind="task", name=name, section="task")
    families = task_families(name)
    if family not in families:
        able = ", ".join(other for other in TASKS if family in task_families(other))
        raise ConfigError(
            f"model.family: found {family}, for which the task {name} has no batches; "
            f"allowed with task.name={name}: {', '.join(families)}; tasks for {family}: {able}",
            key="model.family",
        )
    more = {"family": family} if "family" in inspect.signature(function).parameters else {}
    built = function(seq_len=seq_len, seed=seed, **more, **values)
    if not isinstance(built, Task):
        raise PluginError(f"task {name!r}: its function returned {type(built).__name__}, no Task")
    refuse_ill_drawn(built, seq_len, family)
    return built


def refuse_ill_drawn(task: Task, seq_len: int, family: str) -> None:
    """Raise PluginError if batches have a wrong length or depend on more than the generator."""
    batch, repeated = task.probe_batch(2), task.probe_batch(2)
    where = f"task {task.name!r}: {place_of(task.draw)}"
    if not all(np.array_equal(one, other) for one, other in zip(batch, repeated, strict=True)):
        raise PluginError(
            f"{where}draw gave two batches for one state of its generator; draw from `random` "
            "alone: no np.random, no counter, nothing remembered"
        )
    inputs, targets, _ = batch
    shapes = f"{where}draw gave inputs {inputs.shape} and targets {targets.shape}"
    if family == "encoder_decoder":
        if inputs.shape[1] != seq_len + targets.shape[1]:
            raise PluginError(f"{shapes}; allowed (2, {seq_len} + target) and (2, target)")
    elif inputs.shape != (2, seq_len) or targets.shape != (2, seq_len):
        raise PluginError(f"{shapes}; allowed (2, seq_len), here (2, {seq_len}), for both")


def task_of(config: Config) -> Task:
    """Return the task of a configuration.  Raises ConfigError as `build_task` does."""
    task = config.task
    return build_task(
        task.name,
        task.options(),
        seq_len=task.seq_len,
        seed=config.seed,
        family=config.model.family,
    )
