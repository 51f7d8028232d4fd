"""Turn pydantic's errors into messages: the found value, allowed values, the nearest one."""

import re
from itertools import takewhile
from operator import ge, gt, le, lt
from typing import Any

from pydantic import ValidationError

from deepstack.base.allowed import (
    IDENTIFIER,
    PATTERNS,
    RUN_NAME,
    Schema,
    alternatives,
    describe,
    literals,
)
from deepstack.base.errors import ConfigError
from deepstack.base.registry import nearest, unknown
from deepstack.base.text import quote, shorten
from deepstack.base.yaml_reader import Node, Problem, parse_scalar
from deepstack.config.key import Key
from deepstack.config.keys import KeyPath, dotted_key, schema_at, sections, setting_keys
from deepstack.config.roles import ROLES
from deepstack.config.schema import Config
from deepstack.config.section import LONGEST_NAME, Section

MAX_PROBLEMS = 20

_NUMBERS: dict[Any, tuple[type, ...]] = {"integer": (int,), "number": (int, float)}
_LIMITS = {"minimum": ge, "exclusiveMinimum": gt, "maximum": le, "exclusiveMaximum": lt}
# Several values, as people write them.
_SEVERAL = re.compile(r".*,.*|\d+(-|\.\.+|:)\d+")

_TRUTH = {"yes": "true", "on": "true", "no": "false", "off": "false"}
_THOUSANDS = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)([kKmM])")


def raise_problems(problems: list[Problem]) -> None:
    """Raise ConfigError with one line for each problem, if any, in the order of the file."""
    if problems:
        problems = sorted(problems, key=lambda problem: position(problem.where))
        lines = list(dict.fromkeys(map(str, problems)))
        if len(lines) > MAX_PROBLEMS:
            lines = [*lines[:MAX_PROBLEMS], "... and more"]
        raise ConfigError("\n".join(lines), key=problems[0].key or None)


def validate(tree: Node, model: type[Section] = Config) -> tuple[Any, list[Problem]]:
    """Return the model that a tree describes, or None and its mistakes."""
    if not isinstance(tree.value, dict):
        text = f"found {tree.shown}; allowed `key: value` lines, such as seed: 0"
        return None, [Problem(tree.where, "", text)]
    try:
        return model.model_validate(tree.plain()), []
    except ValidationError as error:
        errors = _errors_by_path(error, tree)
    paths = sorted(errors, key=lambda path: position(tree.at(path).where))
    # of thousands, only those that are shown are explained
    return None, [_problem(path, errors[path], tree) for path in paths[: MAX_PROBLEMS + 1]]


def _errors_by_path(error: ValidationError, tree: Node) -> dict[KeyPath, Any]:
    """Return pydantic's errors, one for each path in the tree.

    A union reports each of its branches: of two errors the one deeper in the tree is kept.
    """
    errors: dict[KeyPath, Any] = {}
    for each in error.errors(include_url=False):
        errors.setdefault(_path(each["loc"], tree), each)
    above = {path[:i] for path in errors for i in range(len(path))}
    return {path: each for path, each in errors.items() if path not in above}


def _path(loc: KeyPath, tree: Node) -> KeyPath:
    """Return pydantic's location without '[key]' and the names of branches of unions."""
    path: KeyPath = ()
    for part in takewhile(lambda part: part != "[key]", loc):
        node = tree.at(path)
        # a key that is missing has a default that is wrong
        if node.at((part,)) is not node or part in schema_at(path).get("properties", ()):
            path = (*path, part)
    return path


def position(where: str) -> tuple[int, ...]:
    """Return line and column of a place, to sort by; overrides come last."""
    numbers = re.search(r":(\d{1,9}):(\d{1,9})$", where)
    return tuple(map(int, numbers.groups())) if numbers else (10**9,)


def suggest_key(path: KeyPath) -> str | None:
    """Return the known dotted key nearest to an unknown one: in its section, else in any."""
    word, section = str(path[-1]), dotted_key(path[:-1])
    if meant := Key.of_other_word(word):
        return meant
    if sibling := nearest(word, schema_at(path[:-1]).get("properties", ())):
        return f"{section}.{sibling}".strip(".")
    return Key.nearest(word, [*setting_keys(), *sections()])


def hint_for(suggestion: str | None) -> str:
    """Return '; did you mean …?', or '' for none."""
    return f"; did you mean {suggestion!r}?" if suggestion else ""


def _problem(path: KeyPath, error: Any, tree: Node) -> Problem:
    """Return the message for one of pydantic's errors."""
    node, key, kind = tree.at(path), dotted_key(path), error["type"]
    key_where = node.key_where or node.where
    if kind == "extra_forbidden":
        return Problem(key_where, key, _unknown_key(path, node))
    if error["loc"][-1] == "[key]":
        word, names = str(path[-1]), ROLES if kind == "literal_error" else ()
        allowed = ", ".join(names) or PATTERNS[IDENTIFIER]
        hint = hint_for(nearest(word, names))
        return Problem(key_where, key, f"found the key {quote(word)}; allowed {allowed}{hint}")
    if kind == "relation":
        return Problem(node.where, key, shorten(error["msg"], 200), relation=True)
    if kind == "too_short":
        text = f"found too few entries; allowed at least {error['ctx']['min_length']}"
    elif kind == "too_long":
        text = f"found too many entries; allowed at most {error['ctx']['max_length']}"
    else:
        text = _wrong_value(path, node)
    return Problem(node.where, key, text)


def _unknown_key(path: KeyPath, node: Node) -> str:
    word, siblings = str(path[-1]), schema_at(path[:-1])["properties"]
    text = f"found the {unknown('key', word, siblings)}"
    if nested := _nested_form(word, dotted_key(path[:-1])):
        return f"found the key {quote(word)}; files nest their keys: {nested}"
    if nearest(word, siblings) and not Key.of_other_word(word):
        return text
    if near := suggest_key(path):
        return f"found the unknown key {quote(word)}{hint_for(near)}"
    is_value = not isinstance(node.value, dict | list) and re.fullmatch(IDENTIFIER, word)
    if path[:-1] in ((), ("model",)) and is_value:
        return f"{text}; an option of a scheme: model.scheme_options.{word}"
    return text


def _nested_form(word: str, section: str) -> str | None:
    """Return a dotted key of a section as nested YAML, 'model: {depth: …}'; None for no setting."""
    known = {*setting_keys(), *sections()}
    full = f"{section}.{word}".strip(".")
    key = next((key for key in (full, word) if key in known), None) if "." in word else None
    if key is None:
        return None
    within = f"{section}." if section else ""
    first, *others = key.removeprefix(within).split(".")
    return f"{first}: " + "".join(f"{{{other}: " for other in others) + "…" + "}" * len(others)


def _wrong_value(path: KeyPath, node: Node) -> str:
    """Return the message for a value that the schema refuses, with the value that was meant."""
    schema = schema_at(path)
    meant = _meant_value(path, node, schema)
    hint = f"did you mean {meant}?" if meant else _next_step(path, node, schema)
    text = f"found {node.shown}; allowed {describe(schema)}"
    return f"{text}; {hint}" if hint else text


def _meant_value(path: KeyPath, node: Node, schema: Schema) -> str:
    """Return the text that a refused value was meant to be, or ''."""
    value, key, options = node.value, dotted_key(path), list(alternatives(schema))
    kinds = {option.get("type") for option in options}
    if (number := _meant_number(value, schema)) is not None:
        return str(number)
    if section := _meant_section(key, value, options):
        return section
    if type(value) in (int, float) and "array" in kinds:
        return f"[{value}]"
    if not isinstance(value, str):
        return ""
    items = [choice for option in options for choice in literals(option.get("items", {}))]
    if is_typed(node) and (value in items or ("," in value and "array" in kinds)):
        return f"{key}=[{value}]"
    if "boolean" in kinds and value in _TRUTH:
        return _TRUTH[value]
    return _meant_word(value, options)


def _meant_word(value: str, options: list[Schema]) -> str:
    """Return the name or the choice that a refused word was meant to be, or ''."""
    if any(option.get("pattern") == RUN_NAME for option in options):
        name = re.sub(r"[^A-Za-z0-9._]+", "_", value).strip("._")
        return repr(name) if 0 < len(name) <= LONGEST_NAME else ""
    near = nearest(value, [str(choice) for option in options for choice in literals(option)])
    return repr(near) if near else ""


def _next_step(path: KeyPath, node: Node, schema: Schema) -> str:
    """Return what to type for a value without a near one: a command, or an example."""
    value, key, example = node.value, dotted_key(path), schema.get("default")
    if is_typed(node) and isinstance(value, str) and _SEVERAL.fullmatch(value):
        return "several values make a sweep: deepstack sweep, with commas between them (0,1,2)"
    if type(example) not in (int, float):
        return ""
    return (
        f"for example {key}={example}" if is_typed(node) else f"for example {path[-1]}: {example}"
    )


def is_typed(node: Node) -> bool:
    """Return whether a value stands on the command line and not in a file."""
    return node.where.endswith("command line")


def _meant_section(key: str, value: Any, options: list[Schema]) -> str:
    """Return the text that was meant by a value in place of a section, or ''."""
    keys: Schema = next((one["properties"] for one in options if "properties" in one), {})
    if isinstance(value, list) and keys:
        return "the same lines without '-'"
    word, _, rest = str(value).partition(" ")
    name = word.rstrip(":=")
    if name in keys and rest:
        return repr(shorten(f"{name}: {rest.lstrip(':= ')}"))
    named = [inner for inner, one in keys.items() if value in literals(one)]
    is_name = isinstance(value, str) and word.isidentifier() and word not in keys
    if not named and "kind" in keys and is_name:  # a definition, whose names are open
        named = ["kind"]
    return f"{key}.{named[0]}={value}" if named else ""


def in_thousands(text: str) -> float | None:
    """Return the number of a text such as 786k or 1.5M, None for any other text."""
    parts = _THOUSANDS.fullmatch(text)
    return parts and float(parts[1]) * {"k": 1e3, "m": 1e6}[parts[2].lower()]


def _meant_number(value: Any, schema: Schema) -> int | float | None:
    """Return the allowed number that a value denotes: 1000 for 1e3, 12 for '12'; None for none."""
    number: Any = parse_scalar(str(value))
    if thousands := in_thousands(str(value)):
        number = thousands
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    for option in alternatives(schema):
        if type(number) in _NUMBERS.get(option.get("type"), ()):
            is_allowed = all(
                test(number, option[key]) for key, test in _LIMITS.items() if key in option
            )
            if is_allowed and repr(number) != repr(value):
                return number
    return None
