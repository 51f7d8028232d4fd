"""Completes configs, settings, their values and other names in the shell, without torch."""

import os
from collections import Counter
from collections.abc import Callable, Iterable
from glob import escape, glob
from typing import Any

from deepstack.base.allowed import alternatives, literals
from deepstack.base.errors import ConfigError
from deepstack.cli import cursor
from deepstack.cli.listing import names_of, names_of_setting, short_table
from deepstack.config.keys import schema_at, setting_keys
from deepstack.config.load import example_paths

Complete = Callable[[str], list[str]]


def starting(names: Iterable[str], incomplete: str) -> list[str]:
    """Return the names that start like the word."""
    return [name for name in names if name.startswith(incomplete)]


def complete_config(incomplete: str) -> list[str]:
    """Return the examples, YAML files and folders that start like the word."""
    paths = sorted(glob(f"{escape(incomplete)}*"))
    files = [path for path in paths if path.endswith((".yaml", ".yml"))]
    folders = [f"{path}/" for path in paths if os.path.isdir(path)]
    return [*starting(sorted(example_paths()), incomplete), *files, *folders]


def complete_setting(incomplete: str) -> list[str]:
    """Return `key=` for the start of a key, and `key=value` for the start of a value.

    A single key comes with its values, so that the shell adds no space after `=`.
    """
    key, equals, _ = (cursor.split_key + incomplete).partition("=")
    if equals:
        return complete_value(incomplete, values_of(key))
    matches = starting(setting_keys(), key)
    if len(matches) == 1 and (values := values_of(matches[0])):
        return [f"{matches[0]}={value}" for value in values]
    return [f"{each}=" for each in matches]


def complete_value(incomplete: str, values: Iterable[str]) -> list[str]:
    """Return the values that continue the last one of `a,b` or `key=a,b`."""
    key, equals, typed = incomplete.rpartition("=")
    earlier, comma, start = typed.rpartition(",")
    return [f"{key}{equals}{earlier}{comma}{one}" for one in starting(values, start)]


def complete_where(incomplete: str) -> list[str]:
    """Return `key=` for the start of a key or of its last part, `key=value` if a value began."""
    from deepstack.config.key import Key
    from deepstack.runs.conditions import names_of

    key, equals, _ = (cursor.split_key + incomplete).partition("=")
    if not equals:
        return [f"{name}=" for name in starting(keys_of_runs(), key)]
    try:
        key = Key.look_up(key.removesuffix("!"), keys_of_runs(short=False), "where")
    except ConfigError:
        return []
    values = list(names_of(key)) or (values_of(key) if "." in key or key == "seed" else [])
    return complete_value(incomplete, values)


def complete_sort(incomplete: str) -> list[str]:
    """Return the columns and settings that start like the word, after a `-` for descending."""
    minus = "-" * incomplete.startswith("-")
    return starting([f"{minus}{one}" for one in keys_of_runs()], incomplete)


def keys_of_runs(short: bool = True) -> list[str]:
    """Return the columns and settings of runs; short: also last parts that one setting has."""
    from deepstack.runs.conditions import COLUMNS

    lasts = Counter(key.rpartition(".")[2] for key in setting_keys()) if short else {}
    unique = [last for last, count in lasts.items() if count == 1]
    return list(dict.fromkeys([*COLUMNS, *unique, *setting_keys()]))


def complete_config_or_setting(incomplete: str) -> list[str]:
    """Return configs and settings that start like the word."""
    configs = [] if "=" in cursor.split_key + incomplete else complete_config(incomplete)
    return configs + complete_setting(incomplete)


def complete_key(incomplete: str) -> list[str]:
    """Return the dotted keys that start like the word."""
    return starting(setting_keys(), incomplete)


def complete_names(kind: str, **cells: str) -> Complete:
    """Return a completion of a comma-separated list of names of a kind of `deepstack list`.

    cells: values of columns of the rows that count.
    """

    def complete(incomplete: str) -> list[str]:
        rows = [row for row in short_table(kind) if cells.items() <= row.items()]
        return complete_value(incomplete, dict.fromkeys(row["name"] for row in rows))

    return complete


def complete_chart_or_folder(incomplete: str) -> list[str]:
    """Return the charts and folders that start like the word."""
    folders = [path for path in complete_config(incomplete) if path.endswith("/")]
    return starting(names_of("charts"), incomplete) + folders


def values_of(key: str) -> list[str]:
    """Return the values of a setting that are a finite list, else its default."""
    if names := names_of_setting(key):
        return names
    schema = schema_at(tuple(key.split(".")))
    values: list[Any] = []
    for option in alternatives(schema):
        values += [True, False] if option.get("type") == "boolean" else literals(option)
    default = schema.get("default")
    if default not in values and isinstance(default, bool | int | float | str):
        values.insert(0, default)
    return [str(value).lower() if isinstance(value, bool) else str(value) for value in values]
