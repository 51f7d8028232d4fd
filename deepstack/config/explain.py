"""Turn pydantic's errors into messages: the found value, allowed values, the nearest one."""

from __future__ import annotations

import re
from itertools import chain
from operator import ge, gt, le, lt
from typing import Any

from pydantic import ValidationError

from deepstack.allowed import IDENTIFIER, PATTERNS, Schema, alternatives, describe, literals
from deepstack.config.roles import ROLES
from deepstack.config.schema import Config, KeyPath, dotted_key, schema_at, sections, setting_keys
from deepstack.config.section import Section
from deepstack.errors import ConfigError
from deepstack.registry import nearest, unknown
from deepstack.yaml_reader import Node, Problem, parse_scalar, quote, shorten

MAX_PROBLEMS = 20

# Gated feed-forwards, as papers call them, and the activation of their gate.
_GATED = {"swiglu": "silu", "geglu": "gelu", "reglu": "relu", "glu": "sigmoid"}
_NUMBERS: dict[Any, tuple[type, ...]] = {"integer": (int,), "number": (int, float)}
_LIMITS = (
    ("minimum", ge), ("exclusiveMinimum", gt), ("maximum", le), ("exclusiveMaximum", lt)
)  # fmt: skip
# Several values, as people write them.
_SEVERAL = re.compile(r".*,.*|\d+(-|\.\.+|:)\d+")


def raise_problems(problems: list[Problem]) -> None:
    """Raise ConfigError with one line for each problem, if any, in the order of the file."""
    if problems:
        problems = sorted(problems, key=lambda problem: place_order(problem.where))
        lines = list(dict.fromkeys(map(str, problems)))
        if len(lines) > MAX_PROBLEMS:
            lines = [*lines[:MAX_PROBLEMS], "... and more"]
        raise ConfigError("\n".join(lines), key=problems[0].key or None)


def validate(tree: Node, model: type[Section] = Config) -> tuple[Any, list[Problem]]:
    """Return the model that a tree describes, or None and its mistakes."""
    if not isinstance(tree.value, dict):
        text = f"found {tree.shown}; allowed `key: value` lines"
        return None, [Problem(tree.where, "", text)]
    data = tree.plain()
    try:
        return model.model_validate(data), []
    except ValidationError as error:
        wrong = distinct_errors(error, data)
    wrong.sort(key=lambda pair: place_order(tree.at(pair[0]).where))
    # of thousands, only those that are shown are examined
    return None, [_problem(path, item, tree) for path, item in wrong[: MAX_PROBLEMS + 1]]


def distinct_errors(error: ValidationError, data: Any) -> list[tuple[KeyPath, dict[str, Any]]]:
    """Return pydantic's errors, one for each path in the data.

    A union reports each of its branches: of two errors the one deeper in the data is kept.
    """
    errors: dict[KeyPath, dict[str, Any]] = {}
    for item in error.errors(include_url=False):
        errors.setdefault(_path(item["loc"], data), dict(item))
    covered = {path[:i] for path in errors for i in range(len(path))}
    return [(path, item) for path, item in errors.items() if path not in covered]


def place_order(where: str) -> tuple[int, ...]:
    """Return a sort key of a place: line and column; overrides come last."""
    position = re.search(r":(\d{1,9}):(\d{1,9})$", where)
    return tuple(map(int, position.groups())) if position else (10**9,)


def _path(loc: tuple[str | int, ...], data: Any) -> KeyPath:
    """Return pydantic's location without the names of union branches."""
    path: KeyPath = ()
    for part in loc:
        if part == "[key]":
            break
        if isinstance(data, dict) and part in data:
            data = data[part]
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
        elif isinstance(part, str) and part in schema_at(path).get("properties", ()):
            data = None
        else:
            continue  # the name of a branch of a union
        path = (*path, part)
    return path


def suggest_key(path: KeyPath) -> str | None:
    """Return the known dotted key nearest to an unknown one: in its section, else in any."""
    word, section = str(path[-1]), dotted_key(path[:-1])
    if sibling := nearest(word, schema_at(path[:-1]).get("properties", ())):
        return f"{section}.{sibling}".strip(".")
    by_name = {key.rpartition(".")[2]: key for key in reversed([*setting_keys(), *sections()])}
    near = nearest(word, by_name)
    return by_name[near] if near else None


def hint_for(suggestion: str | None) -> str:
    """Return '; did you mean …?', or '' for none."""
    return f"; did you mean {suggestion!r}?" if suggestion else ""


def _problem(path: KeyPath, item: dict[str, Any], tree: Node) -> Problem:
    """Return the message for one of pydantic's errors."""
    node, key, kind = tree.at(path), dotted_key(path), item["type"]
    key_where = node.key_where or node.where
    if kind == "extra_forbidden":
        return Problem(key_where, key, _unknown_key(path))
    if item["loc"][-1] == "[key]":
        word, names = str(path[-1]), ROLES if kind == "literal_error" else ()
        allowed = ", ".join(names) or PATTERNS[IDENTIFIER]
        hint = hint_for(nearest(word, names))
        return Problem(key_where, key, f"found the key {quote(word)}; allowed {allowed}{hint}")
    if kind == "relation":
        return Problem(node.where, key, shorten(item["msg"], 200), relation=True)
    if kind == "too_short":
        text = f"found too few entries; allowed at least {item['ctx']['min_length']}"
    elif kind == "too_long":
        text = f"found too many entries; allowed at most {item['ctx']['max_length']}"
    else:
        text = _wrong_value(path, node)
    return Problem(node.where, key, text)


def _unknown_key(path: KeyPath) -> str:
    word, schema = str(path[-1]), schema_at(path[:-1])
    siblings = schema.get("properties", ())
    if not siblings:
        return f"found {quote(word)} below a key that takes no keys; allowed {describe(schema)}"
    if not nearest(word, siblings) and (near := suggest_key(path)):
        return f"found the unknown key {quote(word)}{hint_for(near)}"
    return f"found the {unknown('key', word, siblings)}"


def _wrong_value(path: KeyPath, node: Node) -> str:
    """Return the message for a value that the schema refuses."""
    value, schema = node.value, schema_at(path)
    text = f"found {node.shown}; allowed {describe(schema)}"
    number = _meant_number(value, schema)
    if dotted_key(path) == "model.activation" and (gate := _GATED.get(str(value).lower())):
        text += f"; {value} is model.activation={gate} with model.gated=true"
    elif number is not None:
        text += f"; did you mean {number}?"
    elif isinstance(value, str):
        text += hint_for(nearest(value, map(str, chain(*map(literals, alternatives(schema))))))
        if "command line" in node.where and _SEVERAL.fullmatch(value):
            text += "; several values make a sweep: deepstack sweep, with commas between them "
            text += "(0,1,2)"
    return text


def _meant_number(value: Any, schema: Schema) -> int | float | None:
    """Return the allowed number that a value denotes: 1000 for 1e3, 12 for '12'; None for none."""
    number: Any = parse_scalar(str(value))
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    for option in alternatives(schema):
        if type(number) in _NUMBERS.get(option.get("type"), ()):
            fits = all(test(number, option[limit]) for limit, test in _LIMITS if limit in option)
            if fits and repr(number) != repr(value):
                return number
    return None
