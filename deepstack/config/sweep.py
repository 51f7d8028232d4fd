"""The `sweep:` section of a file: its form, its axes and its rules, with the place of mistakes."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from deepstack.config import walk
from deepstack.config.explain import distinct_errors, validate
from deepstack.config.load import put, rival_lengths
from deepstack.config.schema import Config
from deepstack.config.suggestions import hint_for, suggest_full_key, suggest_inner_key
from deepstack.registry import nearest
from deepstack.yaml_reader import MAX_DEPTH, Node, Problem, quote, quote_key, shorten

MAX_RUNS, MAX_AXES, MAX_RULES = 10_000, 32, 100
FREE = ("task.", "model.scheme_options.", "train.lr_factors.", "train.lr_exponents.")

Where = dict[str, list[Any]]
"""A partial cell: dotted key -> the values of which a cell has one."""
Group = dict[str, Node]
"""One factor of the product: a key of the grid, or the keys of a zip, with their lists."""

Values = Annotated[list[Any], Field(min_length=1)]
Lists = Annotated[dict[str, Values], Field(min_length=2)]
Settings = Annotated[dict[str, Any], Field(min_length=1)]
_FORM = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class SweepOverride(BaseModel):
    """Settings for the cells that match."""

    model_config = _FORM

    where: Settings
    """A key with a value, or with a list: any of them."""
    set: Settings
    """Dotted keys with their values in these cells."""


class Sweep(BaseModel):
    """Makes the file a study: one run for every combination of the values."""

    model_config = _FORM

    grid: dict[str, Values] = {}
    """A dotted key with its values: `model.depth: [6, 48]`."""
    zip: Lists | list[Lists] = []
    """Lists that go together: one group of keys, or a list of groups."""
    exclude: Annotated[list[Settings], Field(max_length=MAX_RULES)] = []
    """Partial cells; every cell that matches one is left out."""
    overrides: Annotated[list[SweepOverride], Field(max_length=MAX_RULES)] = []
    """Settings for the cells that match; of several the last wins."""


_FORMS = {
    "": "a section with `grid:`, and below it lines such as `model.depth: [6, 48]`",
    "grid": "lines such as `model.depth: [6, 48]`",
    "zip": "two keys or more with lists of one length, such as {model.depth: [6, 48], "
    "train.lr: [1e-3, 5e-4]}",
    "exclude": "a list such as [{model.scheme: post_ln, model.depth: [500, 1000]}]",
    "overrides": "a list such as [{where: {model.depth: 1000}, set: {train.lr: 1e-4}}]",
}


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of configurations and studies, for editors."""
    schema, sweep = Config.model_json_schema(), Sweep.model_json_schema()
    schema["$defs"] |= sweep.pop("$defs")
    schema["properties"]["sweep"] = sweep
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def form_problems(sweep: Node, given: Collection[str]) -> list[Problem]:
    """Return the mistakes in the form of a `sweep:` section.

    given: the keys whose values the command line replaces.
    """
    data = sweep.plain()
    if isinstance(data, dict):
        data = {key: value for key, value in data.items() if value is not None}
    try:
        Sweep.model_validate({} if data is None else data)
    except ValidationError as error:
        return [
            _form_problem(path, item, sweep)
            for path, item in distinct_errors(error, data)
            if not (_is_axis(path) and path[-1] in given)
        ]
    return []


def _is_axis(path: walk.Path) -> bool:
    return len(path) > 1 and path[0] in ("grid", "zip") and isinstance(path[-1], str)


def _form_problem(path: walk.Path, item: dict[str, Any], sweep: Node) -> Problem:
    node, position = sweep.at(path), sweep.at(path).where
    missing = item["type"] == "missing"
    words = [part for part in (*path, item["loc"][-1] if missing else 0) if isinstance(part, str)]
    shown = "nothing" if missing else node.shown
    if node.value in ({}, []):
        shown = shown.replace("a ", "an empty ")
    allowed = _FORMS.get(words[0] if words else "", "")
    if item["type"] == "extra_forbidden":
        fields = list((SweepOverride if len(path) > 1 else Sweep).model_fields)
        shown, position = f"the unknown key {quote(str(path[-1]))}", node.key_where
        allowed = ", ".join(fields) + hint_for(nearest(str(path[-1]), fields))
    elif item["type"] == "too_long" and isinstance(node.value, list):
        shown, allowed = f"{len(node.value)} entries", f"at most {MAX_RULES}"
    elif _is_axis(path):
        allowed = "a list of values, such as [6, 48]"
        if not isinstance(node.value, dict | list | None):
            allowed += f"; did you mean [{node.shown}]?"
    elif path[:1] == ("zip",) and isinstance(node.value, dict) and len(node.value) == 1:
        shown = "one key, which belongs under grid"
    return _problem(position, ".".join(["sweep", *words]), f"found {shown}; allowed {allowed}")


def _problem(where: str, key: str, text: str) -> Problem:
    return Problem(where, quote_key(key), text)


def _inner(section: Node, key: str) -> Node:
    """Return the node below a key of a section, or an empty one."""
    return section.section.get(key) or Node(None, section.where, "nothing")


def read_groups(sweep: Node) -> list[Group]:
    """Return every factor of the product of a `sweep:` section, without malformed axes."""
    grid = [{key: node} for key, node in _inner(sweep, "grid").section.items()]
    zips = [group.section for group in _inner(sweep, "zip").items()]
    groups = (
        {key: node for key, node in group.items() if isinstance(node.value, list) and node.value}
        for group in (*grid, *zips)
    )
    return [group for group in groups if group]


def section_of(group: Group) -> str:
    """Return the section of a group in messages."""
    return "sweep.zip" if len(group) > 1 else "sweep.grid"


def _length(group: Group) -> int:
    return max(len(node.items()) for node in group.values())


def axis_problems(groups: Sequence[Group], tree: Node, where: str) -> list[Problem]:
    """Return every mistake in the axes.

    tree: the configuration that their values are put into.  where: the place of the sweep.
    """
    keys = [key for group in groups for key in group]
    if len(keys) > MAX_AXES:
        text = f"found {len(keys)} keys; allowed a grid of at most {MAX_AXES}"
        return [_problem(where, "sweep.grid", text)]
    problems = []
    if (total := math.prod(map(_length, groups))) > MAX_RUNS:
        sizes = shorten(
            " x ".join(f"{_length(group)} {' + '.join(group)}" for group in groups), 100
        )
        least = min(total, 10**12)  # a hostile file can ask for more than a float holds
        text = f"found {'' if total == least else 'more than '}{least:,} runs ({sizes}), "
        text += f"{least / 86_400:,.1f} days at a second each; allowed at most {MAX_RUNS:,}: "
        problems.append(_problem(where, "sweep.grid", text + "give fewer values"))
    seen: set[str] = set()
    for group in groups:
        for key, node in group.items():
            text = wrong_key(key, node)
            if key in seen:
                text = text or "found the key twice among grid and zip; allowed once"
            elif other := next((o for o in seen if o[6:] in rival_lengths(key)), ""):
                text = text or f"found this key and {other}; allowed one of them"
            elif any(other.startswith(key + ".") for other in keys):
                text = text or "found this key and another below it; allowed one of them"
            seen.add(key)
            if text:
                problems.append(_problem(node.key_where, f"{section_of(group)}.{key}", text))
            elif total <= MAX_RUNS:
                for value in node.items():
                    problems += value_problems(tree, key, value)
        problems += _group_problems(group)
    return problems


def wrong_key(key: str, node: Node, runtime: bool = False) -> str:
    """Return the message for a dotted key that no cell of a sweep can set, else ''.

    node: its value, or the list of its values.  runtime: whether keys of `runtime` are allowed.
    """
    path = tuple(key.split("."))
    example = "train.lr" if runtime else "model.depth"
    if key in walk.sections() or path[0] in ("name", "sweep", *(() if runtime else ("runtime",))):
        inside = suggest_inner_key(path, [value.value for value in node.items()])
        kind = "dotted key" if runtime else "key that makes a run differ,"
        text = f"found {quote(key)}; allowed a {kind} such as {example}"
        return text + hint_for(inside and f"{key}.{inside}")
    if key in walk.keys() or (key.startswith(FREE) and all(path) and len(path) <= MAX_DEPTH):
        return ""
    meant = suggest_full_key(path) if all(path) else None
    text = f"found the unknown key {quote(key)}; allowed dotted keys such as {example}"
    return text + hint_for(meant)


def _group_problems(group: Group) -> list[Problem]:
    """Return the mistakes in keys that go together: unequal lists, or a row of values twice."""
    (first, lead), *others = group.items()
    size, section = len(lead.items()), section_of(group)
    problems = [
        _problem(node.where, f"{section}.{key}", f"found {count} values; allowed {size}, as "
                 f"{first} has: the keys of a zip go together")
        for key, node in others
        if (count := len(node.items())) != size
    ]  # fmt: skip
    if problems:
        return problems
    seen: set[str] = set()
    for row in zip(*map(Node.items, group.values()), strict=True):
        plain = repr([value.plain() for value in row])
        if plain in seen:
            pairs = (f"{key}={node.shown}" for key, node in zip(group, row, strict=True))
            shown = shorten(", ".join(pairs)) if others else row[0].shown
            text = f"found {shown} twice; allowed once"
            problems.append(_problem(row[0].where, f"{section}.{first}", text))
        seen.add(plain)
    return problems


def value_problems(tree: Node, key: str, value: Node) -> list[Problem]:
    """Return the schema's complaints about one value that is put into the tree.

    A value that only does not go with another (heads that do not divide the width) is judged
    together with the rest of its combination.
    """
    _, problems = validate(put(tree, tuple(key.split(".")), value))
    inner = value.value.values() if isinstance(value.value, dict) else value.items()
    inside = {value.where, *(node.where for node in inner)}
    return [problem for problem in problems if problem.where in inside and not problem.relation]


@dataclass(frozen=True)
class Rule:
    """An entry of `exclude:` or `overrides:` as it stands in the file."""

    name: str
    node: Node
    where: Where
    settings: dict[str, Node]


def comparable(value: Any) -> Hashable:
    """Return a value for comparison: 1 equals 1.0 and not true; lists compare by their values."""
    if isinstance(value, bool):
        return "true" if value else "false", None
    if isinstance(value, list | tuple):
        return tuple(map(comparable, value))
    if isinstance(value, Mapping):
        return frozenset((key, comparable(inner)) for key, inner in value.items())
    return value


def matcher(where: Where) -> Callable[[Mapping[str, Any]], bool]:
    """Return the predicate whether a cell has one of the given values for every key."""
    wanted = {key: set(map(comparable, values)) for key, values in where.items()}
    return lambda cell: all(
        key in cell and comparable(cell[key]) in some for key, some in wanted.items()
    )


def read_rules(
    sweep: Node, declared: Mapping[str, list[Node]], given: Collection[str]
) -> tuple[list[Rule], list[Problem]]:
    """Return the rules of a well-formed `sweep:` section, and the mistakes in them.

    declared: every swept key with the values that rules may refer to.  given: the keys that the
    command line sets, which rules may set too.
    """
    rules: list[Rule] = []
    problems: list[Problem] = []
    swept = [key for key in declared if key not in given]
    for section in ("exclude", "overrides"):
        node = _inner(sweep, section)
        for entry in node.items() if node.value else ():
            name, at = f"sweep.{section}", f"sweep.{section}"
            cell, settings = entry, Node({}, "", "")
            if section == "overrides":
                cell, settings, at = _inner(entry, "where"), _inner(entry, "set"), f"{name}.where"
            where, wrong = _match_values(at, cell, declared)
            problems += wrong
            for key, setting in settings.section.items():
                text = wrong_key(key, setting, runtime=True)
                if not text and any(are_nested(key, other) for other in swept):
                    text = f"found {quote(key)}, which the sweep varies; allowed a key that it "
                    text += "does not"
                if text:
                    problems.append(_problem(setting.key_where, f"{name}.set.{key}", text))
            rules.append(Rule(name, entry, where, settings.section))
    return rules, problems


def _match_values(
    name: str, entry: Node, declared: Mapping[str, list[Node]]
) -> tuple[Where, list[Problem]]:
    """Return the keys and values of a partial cell, and those that the sweep does not have."""
    where: Where = {}
    problems: list[Problem] = []
    for key, node in entry.section.items():
        if key not in declared:
            text = f"found {quote(key)}, which is not swept; allowed "
            text = shorten(text + (", ".join(declared) or "none"), 300)
            text += hint_for(nearest(key, declared))
            problems.append(_problem(node.key_where, f"{name}.{key}", text))
            continue
        swept = [value.plain() for value in declared[key]]
        known = set(map(comparable, swept))
        some = [node] if comparable(node.plain()) in known else node.items()
        if not some:
            text = "found an empty list; allowed a value or more"
            problems.append(_problem(node.where, f"{name}.{key}", text))
        for value in some:
            if comparable(value.plain()) not in known:
                words = [word for word in swept if isinstance(word, str)]
                near = nearest(value.value, words) if isinstance(value.value, str) else None
                text = f"found {value.shown}, which is not swept; allowed "
                text += shorten(", ".join(map(str, swept)), 200) + hint_for(near)
                problems.append(_problem(value.where, f"{name}.{key}", text))
        where[key] = [value.plain() for value in some]
    return where, problems


def are_nested(key: str, other: str) -> bool:
    """Return whether two dotted keys are equal, or one is a section of the other."""
    return key == other or key.startswith(other + ".") or other.startswith(key + ".")


def setting_problems(rules: Sequence[Rule], tree: Node) -> list[Problem]:
    """Return the values of overrides that the schema refuses."""
    return [
        _problem(problem.where, f"{rule.name}.set.{problem.key}", problem.text)
        for rule in rules
        for key, node in rule.settings.items()
        for problem in value_problems(tree, key, node)
    ]


def idle_rules(rules: Sequence[Rule], cells: Sequence[Mapping[str, Any]]) -> list[Problem]:
    """Return the rules without effect: those that match no cell that is left."""
    problems = []
    left = list(cells)
    for rule in rules:
        matches = matcher(rule.where)
        over = left if rule.name == "sweep.overrides" else cells
        if not any(map(matches, over)):
            text = "found an entry that matches no cell, and so does nothing; "
            text += "allowed one that matches some, or delete it"
            problems.append(_problem(rule.node.where, rule.name, text))
        if rule.name == "sweep.exclude":
            left = [cell for cell in left if not matches(cell)]
    return problems
