"""Turn pydantic's errors into messages: the found value, allowed values, the nearest one."""

from __future__ import annotations

import re
from typing import Any

from pydantic import ValidationError

from deepstack.allowed import IDENTIFIER, PATTERNS, Schema, describe
from deepstack.config.roles import ROLES
from deepstack.config.schema import Config
from deepstack.config.section import Section
from deepstack.config.suggestions import hint_for, suggest_inner_key, suggest_key, suggest_value
from deepstack.config.walk import Path, at, dotted, keys, sections
from deepstack.errors import ConfigError
from deepstack.registry import MOST_CHOICES, nearest
from deepstack.yaml_reader import Node, Problem, quote, shorten

MAX_PROBLEMS = 20

_SEVERAL = re.compile(r".*,.*|\d+(-|\.\.\.?|:)\d+")

# Gated feed-forwards in other programs, and the activation of their gate.
_GATED = {"swiglu": "silu", "geglu": "gelu", "reglu": "relu", "glu": "sigmoid"}


def raise_problems(problems: list[Problem]) -> None:
    """Raise ConfigError with one line for each problem, if any, in the order of the file."""
    if problems:
        problems = sorted(problems, key=lambda problem: place_order(problem.where))
        lines = list(dict.fromkeys(map(str, problems)))
        if len(lines) > MAX_PROBLEMS:
            lines = [*lines[:MAX_PROBLEMS], f"... and {len(lines) - MAX_PROBLEMS} more"]
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
    problems = [_problem(path, item, tree) for path, item in wrong[:MAX_PROBLEMS]]
    for path, _ in wrong[MAX_PROBLEMS:]:  # of thousands, the rest is counted and not examined
        problems.append(Problem(tree.at(path).where, dotted(path), "found one more mistake"))
    return None, problems


def distinct_errors(error: ValidationError, data: Any) -> list[tuple[Path, dict[str, Any]]]:
    """Return pydantic's errors, one for each path in the data.

    A union reports each of its branches: of two errors the one deeper in the data is kept.
    """
    errors: dict[Path, dict[str, Any]] = {}
    for item in error.errors(include_url=False):
        errors.setdefault(_path(item["loc"], data), dict(item))
    covered = {path[:i] for path in errors for i in range(len(path))}
    return [(path, item) for path, item in errors.items() if path not in covered]


def place_order(where: str) -> tuple[int, ...]:
    """Return a sort key of a place: line and column; overrides come last."""
    position = re.search(r":(\d{1,9}):(\d{1,9})$", where)
    return tuple(map(int, position.groups())) if position else (10**9,)


def _path(loc: tuple[str | int, ...], data: Any) -> Path:
    """Return pydantic's location without the names of union branches."""
    path: Path = ()
    for part in loc:
        if part == "[key]":
            break
        if isinstance(data, dict) and part in data:
            data = data[part]
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
        elif isinstance(part, str) and part in at(path).get("properties", ()):
            data = None
        else:
            continue  # the name of a branch of a union
        path = (*path, part)
    return path


def _problem(path: Path, item: dict[str, Any], tree: Node) -> Problem:
    """Return the message for one of pydantic's errors."""
    node, key = tree.at(path), dotted(path)
    key_where = node.key_where or node.where
    if item["type"] == "extra_forbidden":
        return Problem(key_where, key, _unknown_key(path))
    if item["loc"][-1] == "[key]":
        names = ROLES if item["type"] == "literal_error" else ()
        return Problem(key_where, key, _wrong_name(str(path[-1]), names))
    if item["type"] == "relation":
        is_section = node is tree.at(path[:-1])
        where = tree.at((*path[:-1], "d_model")).where if is_section else node.where
        return Problem(where, key, shorten(item["msg"], 200), relation=True)
    sizes = {
        "too_short": ("few", "least", "min_length"),
        "too_long": ("many", "most", "max_length"),
    }
    if item["type"] in sizes:
        wrong, limit, name = sizes[item["type"]]
        text = f"found too {wrong} entries; allowed at {limit} {item['ctx'][name]}"
        return Problem(node.where, key, text + _example(at(path)))
    return Problem(node.where, key, _wrong_value(path, node))


def _unknown_key(path: Path) -> str:
    word, section = str(path[-1]), dotted(path[:-1])
    siblings = list(at(path[:-1]).get("properties", ()))
    if not siblings:
        allowed = describe(at(path[:-1]))
        return f"found {quote(word)} below a key that takes no keys; allowed {allowed}"
    full = f"{section}.{word}".strip(".")
    if "." in word and (full in keys() or full in sections()):
        first, _, rest = word.partition(".")
        return f"found a key with a dot; allowed a section `{first}:` with `{rest}:` below it"
    hint = hint_for(suggest_key(path))
    if hint and len(siblings) > MOST_CHOICES:
        return f"found the unknown key {quote(word)}{hint}"
    return f"found the unknown key {quote(word)}{hint or ';'} allowed {', '.join(siblings)}"


def _wrong_name(word: str, names: tuple[str, ...]) -> str:
    """Return the message for a key that is none of the names, or no identifier."""
    allowed = ", ".join(names) or PATTERNS[IDENTIFIER]
    return f"found the key {quote(word)}; allowed {allowed}{hint_for(nearest(word, names))}"


def _example(schema: Schema) -> str:
    return "".join(f", such as {example}" for example in schema.get("examples", ()))


def _wrong_value(path: Path, node: Node) -> str:
    """Return the message for a value that the schema refuses."""
    value, key, schema = node.value, dotted(path), at(path)
    typed = "command line" in node.where
    shown = node.shown
    if isinstance(value, list):
        shown = f"the list {shorten(str(node.plain()))}"
    elif isinstance(value, dict) and value:
        shown = "a section"
    text = f"found {shown}; allowed {describe(schema)}{_example(schema)}"
    if key == "model.activation" and (gate := _GATED.get(str(value).lower())):
        text += f"; {value} is model.activation={gate} with model.gated=true"
    elif inside := suggest_inner_key(path, [value]):
        text += f"; did you mean {key}.{inside}" + (f"={value}?" if typed else "?")
    else:
        text += hint_for(suggest_value(value, schema))
    if isinstance(value, str) and typed and _SEVERAL.fullmatch(value):
        text += "; several values make a sweep: deepstack sweep, with commas between them (0,1,2)"
    return text
