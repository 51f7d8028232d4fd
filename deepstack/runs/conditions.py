"""Conditions on runs: on their settings, states, outcomes, tags and last logged values.

A condition is a text such as `lr=0.001,0.002`, `depth>=48`, `state!=done` or `tag=good`.  A key is
a dotted setting or a column of the table of runs, and may be shortened: `lr` is train.lr.
"""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

from deepstack.base.errors import ConfigError, NothingMatchedError
from deepstack.base.registry import unknown
from deepstack.base.text import yaml_text
from deepstack.base.yaml_reader import parse_scalar, read
from deepstack.config.key import Key
from deepstack.records import LOGGED, STATES, Run, Summary
from deepstack.runs.settings import hashable, order_of

COLUMNS = ("study", "run", "state", "outcome", "tags", "note", *LOGGED)
"""The keys besides settings: columns of the table of runs."""
CONDITION = re.compile(r"\s*([^=<>!]+?)\s*(!=|<=|>=|==?|<|>)(.*)", re.DOTALL)
BETWEEN_VALUES = re.compile(r",(?![^\[]*\])")  # commas outside of brackets
ORDERS: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip
MOST_NAMES = 12  # values or keys that an error names

Where = str | Sequence[str] | Mapping[str, Any]


@dataclass(frozen=True)
class Condition:
    """One condition on runs: a key, an operator and what to compare with.

    values: texts, which are parsed; or the values themselves, if `parses` is false.
    """

    key: str
    operator: str
    values: Sequence[Any]
    parses: bool = True

    def holds(self, value: Any) -> bool:
        """Return whether a run's value meets the condition; a missing one is neither < nor >."""
        if self.operator in ORDERS:
            limit = parse_scalar(self.values[0])
            return is_number(value) and ORDERS[self.operator](value, limit)
        members, same = (
            value if self.key == "tags" else [value],
            is_equal if self.parses else is_same,
        )
        equal = any(same(member, wanted) for member in members for wanted in self.values)
        return equal == (self.operator == "=")


class Row:
    """A run with the values that conditions and orders read."""

    def __init__(self, run: Run, summary: Summary) -> None:
        self.run = run
        self.summary = one = summary
        self.values: dict[str, Any] = {
            **one.config,
            "study": one.path.parent.name,
            "run": one.path.name,
            "state": one.state,
            **one.labels._asdict(),
            **one.logged,
        }

    @cached_property
    def outcome(self) -> str:
        """The outcome of a finished run, else its state."""
        from deepstack.runs.outcomes import outcome

        if self.summary.state == "damaged" or self.run.damage():
            return "damaged"
        return outcome(self.run) or self.summary.state

    def value(self, key: str) -> Any:
        """Return the value of a setting or column, None where the run has none."""
        return self.outcome if key == "outcome" else self.values.get(key)


def select_rows(
    rows: Sequence[Row], where: Where = (), sort: str | None = None, last: int | None = None
) -> list[Row]:
    """Return the rows that meet all conditions, of these the `last` created, in order of `sort`.

    Raises NothingMatchedError if none is left, ConfigError for a wrong key or condition.
    """
    texts = texts_of(where)
    pairs = list(where.items()) if isinstance(where, Mapping) else [None] * len(texts)
    for text, pair in zip(texts, pairs, strict=True):
        condition = make_condition(*pair, rows) if pair else parse_condition(text, rows)
        matching = [row for row in rows if condition.holds(row.value(condition.key))]
        if not matching:
            raise NothingMatchedError(f"where: no run has {text}; {values_there(rows, condition)}")
        rows = matching
    if last is not None:
        if last < 1:
            raise ConfigError(f"last: found {last}; allowed 1 or more")
        newest = sorted(rows, key=lambda row: row.summary.order)[-last:]
        rows = [row for row in rows if row in newest]
    return list(rows) if sort is None else sort_rows(rows, sort, list_keys(rows), Row.value)


def sort_rows(
    rows: Sequence[Any], sort: str, keys: Sequence[str], value: Callable[[Any, str], Any]
) -> list[Any]:
    """Return rows in the order of `value(row, key)`; `-key` is descending.

    Rows without a value come last.
    """
    descending, word = sort.startswith("-"), sort.removeprefix("-")
    key = Key.look_up(word, keys, "sort")
    values = [value(row, key) for row in rows]
    known = [i for i, v in enumerate(values) if v is not None and v == v]
    known.sort(key=lambda i: order_of(values[i]), reverse=descending)
    return [rows[i] for i in [*known, *(i for i in range(len(rows)) if i not in set(known))]]


def texts_of(where: Where) -> list[str]:
    """Return conditions as texts: {'depth': [6, 48]} gives ['depth=6,48'].

    A comma inside a value becomes `?`, which matches any character.
    """
    if isinstance(where, str):
        return [where]
    if isinstance(where, Mapping):
        lists = {key: values_of(key, value) for key, value in where.items()}
        return [f"{key}={','.join(map(quoted, values))}" for key, values in lists.items()]
    return list(where)


def quoted(value: Any) -> str:
    """Return a value as in a condition, with `?` for the commas of a text."""
    return value.replace(",", "?") if isinstance(value, str) else yaml_text(value)


def values_of(key: str, value: Any) -> list[Any]:
    """Return the values that a mapping gives for a key: the items of a collection, or the value.

    NumPy's, pandas' and torch's numbers and arrays become Python's.  Raises ConfigError for an
    iterator, which can be read only once.
    """
    value = plain(value)
    if isinstance(value, Iterator):
        kind = type(value).__name__
        raise ConfigError(f"where: {key}: found a {kind}; allowed a value or a list of values")
    is_one = isinstance(value, str | bytes | Mapping) or not isinstance(value, Collection)
    return [value] if is_one else [plain(item) for item in value]


def plain(value: Any) -> Any:
    """Return a value as Python's own: lists of arrays and tuples, texts of paths."""
    value = value.tolist() if hasattr(value, "tolist") else value
    value = os.fspath(value) if isinstance(value, os.PathLike) else value
    return [plain(item) for item in value] if isinstance(value, tuple) else value


def make_condition(word: str, value: Any, rows: Sequence[Row]) -> Condition:
    """Return the condition of a mapping's key and value or values.

    A list is also the value of a setting that is a list.  Raises ConfigError for a wrong key, state
    or outcome.
    """
    key = Key.look_up(word, list_keys(rows), "where")
    values, choices = values_of(word, value), names_of(key)
    for one in values if choices else ():
        if not (isinstance(one, str) and one in choices):
            raise ConfigError(f"where: {unknown(key, yaml_text(one), choices)}")
    values = [choices[one] for one in values] if choices else values
    return Condition(key, "=", [*values, values], parses=False)


def parse_condition(text: str, rows: Sequence[Row]) -> Condition:
    """Return the condition of a text; raise ConfigError if it has a wrong form or key."""
    match = CONDITION.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"where: found {text!r}; allowed KEY=A,B, or one of !=, <, <=, >, >= for =, such as "
            "depth=6,48 or 'lr<0.01'"
        )
    word, sign, values_text = match[1], match[2].replace("==", "="), match[3].strip()
    key = Key.look_up(word, list_keys(rows), "where")
    if sign in ORDERS and not is_number(parse_scalar(values_text)):
        raise ConfigError(f"where: found {values_text!r} after {word}{sign}; allowed one number")
    values, choices = [part.strip() for part in BETWEEN_VALUES.split(values_text)], names_of(key)
    for value in values if choices else ():
        if not any(is_equal(name, value) for name in choices):
            raise ConfigError(f"where: {unknown(key, value, choices)}")
    if choices:  # values in files, of which several may have a name that fits
        values = [meant for value in values for name, meant in choices.items()
                  if is_equal(name, value)]  # fmt: skip
    return Condition(key, sign, values)


def names_of(key: str) -> dict[str, str]:
    """Return the values of states or outcomes by name; an outcome has its word as a further name.

    Empty for other keys.
    """
    if key == "state":
        return {name: name for name in (*STATES, "damaged")}
    if key != "outcome":
        return {}
    from deepstack.runs.outcomes import OUTCOME_WORDS

    names = [*OUTCOME_WORDS, *STATES, "damaged"]
    return {name: name for name in names} | {word: v for v, word in OUTCOME_WORDS.items()}


def is_number(value: Any) -> bool:
    """Return whether a value is a number other than true and false."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_equal(value: Any, text: str) -> bool:
    """Return whether a text means a value; `*` and `?` match any characters of a text."""
    if isinstance(value, str):
        return fnmatchcase(value, text.replace("[", "[[]"))
    wanted = read(text, "where")[0].plain() if text.startswith("[") else parse_scalar(text)
    return bool(value == wanted) and isinstance(value, bool) == isinstance(wanted, bool)


def is_same(value: Any, wanted: Any) -> bool:
    """Return whether two values are equal; true and false differ from 1 and 0."""
    return bool(plain(value) == wanted) and isinstance(value, bool) == isinstance(wanted, bool)


def list_keys(rows: Iterable[Row]) -> list[str]:
    """Return the keys that conditions on these runs can have: columns, then settings."""
    return list(dict.fromkeys([*COLUMNS, *(key for row in rows for key in row.summary.config)]))


def values_there(rows: Sequence[Row], condition: Condition) -> str:
    """Return the values that runs have at a condition's key, as part of an error."""
    values = [row.value(condition.key) for row in rows]
    if condition.key == "tags":
        values = [tag for tags in values for tag in tags]
    distinct = {hashable(value): value for value in values}
    texts = [yaml_text(distinct[key]) for key in sorted(distinct, key=order_of)]
    more = f" and {len(texts) - MOST_NAMES} more" if len(texts) > MOST_NAMES else ""
    return f"{condition.key} there: {', '.join(texts[:MOST_NAMES]) or 'none'}{more}"
