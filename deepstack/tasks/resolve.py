"""A configuration with its task's own options spelled out, or left away where they are defaults.

The configuration room does not know what a task's options default to; a run folder keeps them all,
and two configurations are compared without those that say nothing new.
"""

from __future__ import annotations

import json
from typing import Any

from deepstack.config import Config, Task
from deepstack.tasks.task import TASKS, task_options


def with_defaults(config: Config) -> Config:
    """The configuration with every option of its task, as a run folder keeps it."""
    return _with_options(config, _defaults(config) | config.task.options())


def without_defaults(config: Config) -> Config:
    """The configuration without the task options that equal their defaults, as runs compare."""
    usual = _defaults(config)
    given = config.task.options().items()
    kept = {k: v for k, v in given if k not in usual or json.dumps(v) != json.dumps(usual[k])}
    return _with_options(config, kept)


def _defaults(config: Config) -> dict[str, Any]:
    if config.task.name not in TASKS:
        return {}  # the error for this name is raised where the task is built
    # Through JSON, as YAML would read them: a tuple in a signature is a list in a configuration.
    plain = {option.name: option.default for option in task_options(config.task.name)}
    return dict(json.loads(json.dumps(plain)))


def _with_options(config: Config, options: dict[str, Any]) -> Config:
    task = Task(name=config.task.name, seq_len=config.task.seq_len, **options)
    return config.model_copy(update={"task": task})
