"""Completes configs, settings, their values and other names in the shell, without torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from deepstack.cli.declarations import registered
from deepstack.config.examples import example_paths

Complete = Callable[[str], list[str]]


def complete_config(incomplete: str) -> list[str]:
    """Return the examples, YAML files and folders that start like the word."""
    head, tail = os.path.split(incomplete)
    names = [name for name in sorted(example_paths()) if name.startswith(incomplete)]
    with_head = [os.path.join(head, name) for name in _names_in(head or ".") if name[0] != "."]
    matches = [path for path in with_head if os.path.basename(path).startswith(tail)]
    files = [path for path in matches if path.endswith((".yaml", ".yml"))]
    return [*names, *files, *(f"{path}/" for path in matches if os.path.isdir(path))]


def complete_setting(incomplete: str) -> list[str]:
    """Return `key=` for the start of a key, and `key=value` for the start of a value.

    A single key comes with its values, so that the shell adds no space after `=`.
    """
    from deepstack.config.walk import keys

    word = _whole_word(incomplete)
    key, equals, typed = word.partition("=")
    if equals:
        earlier, comma, start = typed.rpartition(",")
        values = [value for value in values_of(key) if value.startswith(start)]
        before = "" if incomplete != word else f"{key}="  # bash splits at `=`
        return [f"{before}{earlier}{comma}{value}" for value in values]
    matches = [each for each in keys() if each.startswith(key)]
    if len(matches) == 1 and (values := values_of(matches[0])):
        return [f"{matches[0]}={value}" for value in values]
    return [f"{each}=" for each in matches]


def complete_config_or_setting(incomplete: str) -> list[str]:
    """Return configs and settings that start like the word."""
    settings = complete_setting(incomplete)
    if "=" in _whole_word(incomplete):
        return settings
    return complete_config(incomplete) + settings


def complete_key(incomplete: str) -> list[str]:
    """Return the dotted keys that start like the word."""
    from deepstack.config.walk import keys

    return [key for key in keys() if key.startswith(incomplete)]


def complete_names(package: str, kind: str) -> Complete:
    """Return a completion of a comma-separated list of names that a package registers."""

    def complete(incomplete: str) -> list[str]:
        earlier, comma, start = incomplete.rpartition(",")
        names = registered(package, kind)
        return [f"{earlier}{comma}{name}" for name in names if name.startswith(start)]

    return complete


def complete_chart_or_folder(incomplete: str) -> list[str]:
    """Return the charts and folders that start like the word."""
    charts = [name for name in registered("plots", "chart") if name.startswith(incomplete)]
    paths = complete_config(incomplete)
    return charts + [path for path in paths if path.endswith("/")]


def values_of(key: str) -> list[str]:
    """Return the values of a setting that are a finite list, else its default."""
    from deepstack.allowed import alternatives, literals
    from deepstack.config.walk import at

    if key in ("model.scheme", "task.name"):
        return registered(*(("schemes", "") if key == "model.scheme" else ("tasks", "task")))
    schema = at(tuple(key.split(".")))
    values: list[Any] = []
    for option in alternatives(schema):
        values += [True, False] if option.get("type") == "boolean" else literals(option)
    default = schema.get("default")
    if default not in values and isinstance(default, bool | int | float | str):
        values.insert(0, default)
    return [str(value).lower() if isinstance(value, bool) else str(value) for value in values]


def _names_in(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _whole_word(incomplete: str) -> str:
    """Return the word that the user types; bash splits it at every `=`."""
    words = os.environ.get("COMP_WORDS", "").split()
    position = int(os.environ.get("COMP_CWORD") or 0)
    if 1 < position < len(words) and words[position] == "=":
        return f"{words[position - 1]}="
    if position > 2 and words[position - 1 : position] == ["="]:
        return f"{words[position - 2]}={incomplete}"
    return incomplete
