"""The steps of a configuration, and addition and removal of the defaults of options.

`deepstack.config` does not know the options of tasks, schemes, schedules, ….  A run folder stores
all options; two configurations are compared without options that equal their defaults.
"""

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from deepstack.base.errors import ConfigError
from deepstack.base.kinds import kinds_of
from deepstack.base.options import OptionsByName, validated
from deepstack.config import Config, StackSizes, step_flops, with_overrides
from deepstack.config import Task as TaskSettings
from deepstack.config.estimate import SchemeMemory
from deepstack.config.flops import StepFlops
from deepstack.model.attention import ATTENTIONS, AttentionSublayer
from deepstack.model.feed_forward import FEED_FORWARDS, FeedForwardSublayer
from deepstack.schemes import SCHEMES, scheme_flops, scheme_memory, scheme_options
from deepstack.tasks import TASKS, Task, task_of, task_options


def with_defaults(config: Config) -> Config:
    """Return the configuration with every option of its definitions, as in a run folder."""
    return _changed(config, lambda options, values: _defaults(options) | values)


def without_defaults(config: Config) -> Config:
    """Return the configuration without options equal to their first defaults, for comparing runs.

    An option that is not given has its present default, which differs from the first one if it was
    changed (`FirstDefault`).  Whole numbers become integers if the option's type allows both: 1 for
    1.0.
    """

    def shortest(options: OptionsByName, values: dict[str, Any]) -> dict[str, Any]:
        first = _as_json({key: option.first_default for key, option in options.items()})
        values = _defaults(options) | values
        values = {k: v for k, v in values.items() if k not in first or v != first[k]}
        with suppress(ConfigError):  # building the model reports invalid values
            return dict(_whole(validated(options, values, kind="", name="", section="")))
        return values

    return _changed(config, shortest)


def flops_of(config: Config, task: Task) -> StepFlops:
    """Return the FLOPs of a training step on the batches of a task."""
    of_scheme, parts = scheme_flops(config), sublayers_of(config)

    def extra(sizes: StackSizes) -> int:
        return of_scheme(sizes) + sum(part.extra_flops(sizes) for part in parts)

    return step_flops(config, task.vocab_size, extra, task.target_len)


def extra_memory(config: Config) -> SchemeMemory:
    """Return the memory that scheme and sublayers add, for `config.memory_estimate`."""
    of_scheme, parts = scheme_memory(config), sublayers_of(config)
    return lambda sizes: of_scheme(sizes) + sum(part.extra_memory(sizes) for part in parts)


def sublayers_of(config: Config) -> tuple[type[AttentionSublayer], type[FeedForwardSublayer]]:
    """Return attention and feed-forward of a configuration, with their options."""
    return ATTENTIONS.of(config), FEED_FORWARDS.of(config)


def tokens_per_step(config: Config, task: Task) -> int:
    """Return the tokens that the stacks read in a training step: of source and target, if two."""
    return config.train.batch_size * task.lengths[0]


def with_steps(config: Config, find_task: Callable[[Config], Task] = task_of) -> Config:
    """Return the configuration with the steps nearest to its `train.tokens` or `train.flops`.

    The width to which `model.parameters` leads takes its place.  A configuration that gives its
    steps and its width is returned as it is.

    find_task: Config -> its task.
    """
    if config.model.parameters is not None:
        config = with_overrides(config, {"model.d_model": config.model.d_model})
    train, budget = config.train, 0.0
    if train.tokens is not None:
        key, budget, a_step = "tokens", train.tokens, tokens_per_step(config, find_task(config))
    elif train.flops is not None:
        key, budget, a_step = "flops", train.flops, flops_of(config, find_task(config)).step
    else:
        return config
    steps = round(budget / a_step)
    if not 1 <= steps <= 10**9:
        raise ConfigError(
            f"train.{key}: found {budget:.6g}, {budget / a_step:.3g} steps of {a_step:.6g}; "
            "allowed 1 to 1e9 steps",
            key=f"train.{key}",
        )
    return with_overrides(config, {"train.steps": steps})


def option_defaults(config: Config) -> dict[str, Any]:
    """Return the default of every option of its definitions, by dotted key."""
    return {
        f"{section}.{name}": value
        for section, (options, _) in _sections(config).items()
        for name, value in _defaults(options).items()
    }


def _sections(config: Config) -> dict[str, tuple[OptionsByName, dict[str, Any]]]:
    """Return options and given values of each section; no options for a name that is unknown."""
    scheme, task = config.model.scheme, config.task.name
    sections = {
        "model.scheme_options": (
            scheme_options(scheme) if scheme in SCHEMES else {},
            config.model.scheme_options,
        )
    }
    for kind, name, values in kinds_of(config):
        sections[kind.options_key] = kind[name].options if name in kind else {}, values
    return sections | {"task": (task_options(task) if task in TASKS else {}, config.task.options())}


def _defaults(options: OptionsByName) -> dict[str, Any]:
    return _as_json({key: option.default for key, option in options.items()})


def _as_json(values: dict[str, Any]) -> dict[str, Any]:
    # Convert through JSON, as YAML reads them: a tuple in a signature becomes a list.
    return dict(json.loads(json.dumps(values)))


def _whole(value: Any) -> Any:
    """Return a value with integers for whole numbers, and lists for tuples."""
    if isinstance(value, dict):
        return {key: _whole(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_whole(part) for part in value]
    exact = isinstance(value, float) and value.is_integer() and abs(value) <= 2**53
    return int(value) if exact else value


def _changed(
    config: Config, change: Callable[[OptionsByName, dict[str, Any]], dict[str, Any]]
) -> Config:
    """Return the configuration with change(options, values) of all its definitions."""
    changed = {section: change(*both) for section, both in _sections(config).items()}
    task = TaskSettings(name=config.task.name, seq_len=config.task.seq_len, **changed.pop("task"))
    for key, values in changed.items():
        config = _with_value(config, key.split("."), values)
    return config.model_copy(update={"task": task})


def _with_value(section: Any, path: Sequence[str], value: Any) -> Any:
    """Return a copy of a section with another value at a path of keys."""
    name, *below = path
    inner = _with_value(getattr(section, name), below, value) if below else value
    return section.model_copy(update={name: inner})
