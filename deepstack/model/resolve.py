"""Addition and removal of the default options of a configuration's task and scheme.

`deepstack.config` does not know these defaults.  A run folder stores all options; two
configurations are compared without options that equal their defaults.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from deepstack.config import Config, Task
from deepstack.errors import ConfigError
from deepstack.options import Options, validated
from deepstack.schemes import SCHEMES, scheme_options
from deepstack.tasks import TASKS, task_options


def with_defaults(config: Config) -> Config:
    """Return the configuration with every option of its task and scheme, as in a run folder."""
    task, scheme = _defaults(config)
    return _with(config, task | config.task.options(), scheme | config.model.scheme_options)


def without_defaults(config: Config) -> Config:
    """Return the configuration without options equal to their defaults, for comparing runs.

    Whole numbers become integers if the option's type allows both: 1 for 1.0.
    """
    task, scheme = _defaults(config)
    model = config.model
    return _with(
        config,
        _shortest(_news(config.task.options(), task), _task_options(config)),
        _shortest(_news(model.scheme_options, scheme), _scheme_options(config)),
    )


def option_defaults(config: Config) -> dict[str, Any]:
    """Return the default of every option of its task and scheme, by dotted key."""
    task, scheme = _defaults(config)
    named = {f"model.scheme_options.{name}": value for name, value in scheme.items()}
    return named | {f"task.{name}": value for name, value in task.items()}


def _defaults(config: Config) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the default options of task and scheme; empty for a name that is not registered."""
    return _plain(_task_options(config)), _plain(_scheme_options(config))


def _task_options(config: Config) -> Options:
    return task_options(config.task.name) if config.task.name in TASKS else {}


def _scheme_options(config: Config) -> Options:
    return scheme_options(config.model.scheme) if config.model.scheme in SCHEMES else {}


def _plain(options: Options) -> dict[str, Any]:
    # Convert through JSON, as YAML reads them: a tuple in a signature becomes a list.
    return dict(json.loads(json.dumps({key: option.default for key, option in options.items()})))


def _news(given: dict[str, Any], usual: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in given.items() if key not in usual or value != usual[key]}


def _shortest(values: dict[str, Any], options: Options) -> dict[str, Any]:
    """Return the values with integers for whole numbers of options that allow other numbers."""
    with suppress(ConfigError):  # building the model reports invalid values
        return dict(_whole(validated(options, values, kind="", name="", section="")))
    return values


def _whole(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _whole(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_whole(part) for part in value]
    exact = isinstance(value, float) and value.is_integer() and abs(value) <= 2**53
    return int(value) if exact else value


def _with(config: Config, task: dict[str, Any], scheme: dict[str, Any]) -> Config:
    resolved = Task(name=config.task.name, seq_len=config.task.seq_len, **task)
    model = config.model.model_copy(update={"scheme_options": scheme})
    return config.model_copy(update={"task": resolved, "model": model})
