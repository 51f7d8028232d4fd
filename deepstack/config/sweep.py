"""The `sweep:` section of a file: its form, its axes and its rules, with the place of mistakes."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deepstack.config import walk
from deepstack.config.explain import hint_for, suggest_key, validate
from deepstack.config.load import put, rival_lengths
from deepstack.config.schema import MAX_RUNS, Config, Sweep, SweepFile, Where
from deepstack.registry import unknown
from deepstack.yaml_reader import MAX_DEPTH, Node, Problem, quote, quote_key

FREE = ("task.", "model.scheme_options.", "train.lr_factors.", "train.lr_exponents.")

Group = dict[str, Node]
"""One factor of the product: a key of the grid, or the keys of a zip, with their lists."""


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of configurations and studies, for editors."""
    schema, sweep = Config.model_json_schema(), Sweep.model_json_schema()
    schema["$defs"] |= sweep.pop("$defs")
    schema["properties"]["sweep"] = sweep
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def form_problems(sweep: Node) -> list[Problem]:
    """Return the mistakes in the form of a `sweep:` section."""
    return validate(Node({"sweep": sweep}, sweep.where), SweepFile)[1]


def _inner(section: Node, key: str) -> Node:
    """Return the node below a key of a section, or an empty list."""
    inner = section.section.get(key)
    return Node([], section.where) if inner is None or inner.value is None else inner


def read_groups(sweep: Node) -> list[Group]:
    """Return every factor of the product of a well-formed `sweep:` section."""
    grid = [{key: node} for key, node in _inner(sweep, "grid").section.items()]
    return grid + [dict(group.section) for group in _inner(sweep, "zip").items()]


def axis_problems(groups: Sequence[Group], tree: Node, where: str) -> list[Problem]:
    """Return every mistake in the axes.

    tree: the configuration that their values are put into.  where: the place of the sweep.
    """
    total = math.prod(max(len(node.items()) for node in group.values()) for group in groups)
    if total > MAX_RUNS:
        text = f"found {total:,} runs; allowed at most {MAX_RUNS:,}: give fewer values"
        return [Problem(where, "sweep", text)]
    problems = []
    seen: list[str] = []
    for group in groups:
        first, lead = next(iter(group.items()))
        section = "sweep.zip" if len(group) > 1 else "sweep.grid"
        for key, node in group.items():
            text = wrong_key(key)
            count, size = len(node.items()), len(lead.items())
            for other in seen:
                if are_nested(key, other) or other.removeprefix("train.") in rival_lengths(key):
                    text = text or f"found this key and {other}; allowed one of them"
            if count != size:
                text = text or f"found {count} values; allowed {size}, as {first} has"
            seen.append(key)
            if text:
                problems.append(Problem(node.key_where, quote_key(f"{section}.{key}"), text))
            else:
                for value in node.items():
                    problems += value_problems(tree, key, value)
    return problems


def wrong_key(key: str, runtime: bool = False) -> str:
    """Return the message for a dotted key that no cell of a sweep can set, else ''.

    runtime: whether keys of `runtime` are allowed.
    """
    path = tuple(key.split("."))
    if path[0] == "name" or (path[0] == "runtime" and not runtime):
        return f"found {quote(key)}, in which no two runs may differ"
    if key in walk.keys() or (key.startswith(FREE) and all(path) and len(path) <= MAX_DEPTH):
        return ""
    if inner := walk.sections().get(key):
        return f"found the section {quote(key)}; allowed a key in it: {', '.join(inner)}"
    return (
        f"found {quote(key)}; allowed a dotted key such as model.depth{hint_for(suggest_key(path))}"
    )


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
    """An entry of `exclude:`, or of `overrides:` with settings, as it stands in the file."""

    name: str
    node: Node
    where: Where
    settings: dict[str, Node] = field(default_factory=dict)


def matches(where: Where, cell: Mapping[str, Any]) -> bool:
    """Return whether a cell has one of the given values for every key."""
    return all(key in cell and cell[key] in values for key, values in where.items())


def read_rules(
    sweep: Node, declared: Mapping[str, list[Node]], given: Collection[str], tree: Node
) -> tuple[list[Rule], list[Problem]]:
    """Return the rules of a well-formed `sweep:` section, and the mistakes in them.

    declared: every swept key with the values that rules may refer to.  given: the keys that the
    command line sets, which rules may set too.  tree: the configuration.
    """
    rules: list[Rule] = []
    problems: list[Problem] = []
    for entry in _inner(sweep, "exclude").items():
        where, wrong = _match_values("sweep.exclude", entry, declared)
        rules.append(Rule("sweep.exclude", entry, where))
        problems += wrong
    swept = [key for key in declared if key not in given]
    for entry in _inner(sweep, "overrides").items():
        where, wrong = _match_values("sweep.overrides.where", entry.section["where"], declared)
        settings = entry.section["set"].section
        rules.append(Rule("sweep.overrides", entry, where, settings))
        problems += wrong
        for key, setting in settings.items():
            text = wrong_key(key, runtime=True)
            if any(are_nested(key, other) for other in swept):
                text = f"found {quote(key)}, which the sweep varies; allowed a key that it does not"
            if text:
                name = quote_key(f"sweep.overrides.set.{key}")
                problems.append(Problem(setting.key_where, name, text))
            else:
                problems += value_problems(tree, key, setting)
    return rules, problems


def _match_values(
    name: str, entry: Node, declared: Mapping[str, list[Node]]
) -> tuple[Where, list[Problem]]:
    """Return the keys and values of a partial cell, and those that the sweep does not have."""
    where: Where = {}
    problems: list[Problem] = []
    for key, node in entry.section.items():
        swept = [value.plain() for value in declared.get(key, ())]
        values = [node] if node.plain() in swept else node.items()
        where[key] = [value.plain() for value in values]
        shown_key = quote_key(f"{name}.{key}")
        if key not in declared:
            problems.append(Problem(node.key_where, shown_key, unknown("swept key", key, declared)))
            continue
        for value in values:
            if value.plain() not in swept:
                text = unknown("swept value", value.plain(), map(str, swept))
                problems.append(Problem(value.where, shown_key, text))
    return where, problems


def are_nested(key: str, other: str) -> bool:
    """Return whether two dotted keys are equal, or one is a section of the other."""
    return f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")


def idle_rules(rules: Sequence[Rule], cells: Sequence[Mapping[str, Any]]) -> list[Problem]:
    """Return the rules without effect: those that match no cell that is left."""
    problems = []
    for rule in rules:
        others = [cell for cell in cells if not matches(rule.where, cell)]
        if len(others) == len(cells):
            text = "found an entry that matches no cell; allowed one that matches some"
            problems.append(Problem(rule.node.where, rule.name, text))
        if rule.name == "sweep.exclude":
            cells = others
    return problems
