"""The rules of a sweep: cells that are left out, and cells that need other settings."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepstack.config.explain import hint_for
from deepstack.config.study_axes import Axes, part, value_problems, values_of, wrong_key
from deepstack.registry import nearest
from deepstack.yaml_reader import Node, Problem, quote, quote_key, shorten

Where = dict[str, list[Any]]


@dataclass(frozen=True)
class Override:
    """Settings for the cells that match.

    where: dotted key -> the values of which a cell has one; settings: dotted key -> value.
    """

    where: Where
    settings: dict[str, Any]


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


class Matcher:
    """A predicate: whether a cell has one of the given values for every key."""

    def __init__(self, where: Where) -> None:
        self._wanted = {
            key: {comparable(value) for value in values} for key, values in where.items()
        }

    def __call__(self, cell: Mapping[str, Any]) -> bool:
        return all(
            key in cell and comparable(cell[key]) in some for key, some in self._wanted.items()
        )


def read_rules(
    sweep: Node, declared: Axes, given: Collection[str]
) -> tuple[list[Rule], list[Problem]]:
    """Return the rules of a well-formed `sweep:` section, and the mistakes in them.

    declared: every axis that they may refer to.  given: the keys that the command line sets, which
    rules may set too.
    """
    rules: list[Rule] = []
    problems: list[Problem] = []
    values = declared.nodes()
    swept = [key for key in values if key not in given]
    for section in ("exclude", "overrides"):
        node = part(sweep, section)
        for entry in values_of(node) if node.value else ():
            name = f"sweep.{section}"
            cell, settings = entry, {}
            if section == "overrides":
                cell, settings = part(entry, "where"), _section(part(entry, "set"))
            where, wrong = _match_values(f"{name}.where" if settings else name, cell, values)
            problems += wrong
            for key, setting in settings.items():
                if text := _wrong_setting(key, setting, swept):
                    at = quote_key(f"{name}.set.{key}")
                    problems.append(Problem(setting.key_where, at, text))
            rules.append(Rule(name, entry, where, settings))
    return rules, problems


def _section(node: Node) -> dict[str, Node]:
    return dict(node.value) if isinstance(node.value, dict) else {}


def _match_values(
    name: str, entry: Node, values: Mapping[str, Node]
) -> tuple[Where, list[Problem]]:
    """Return the keys and values of a partial cell, and those that the sweep does not have."""
    where: Where = {}
    problems: list[Problem] = []
    for key, node in _section(entry).items():
        at = quote_key(f"{name}.{key}")
        if key not in values:
            text = f"found {quote(key)}, which is not swept; allowed {', '.join(values) or 'none'}"
            hint = hint_for(nearest(key, values))
            problems.append(Problem(node.key_where, at, shorten(text, 300) + hint))
            continue
        swept = [value.plain() for value in values_of(values[key])]
        known = {comparable(value) for value in swept}
        some = [node] if comparable(node.plain()) in known else values_of(node)
        if not some:
            problems.append(Problem(node.where, at, "found an empty list; allowed a value or more"))
        for value in some:
            if comparable(value.plain()) not in known:
                words = [word for word in swept if isinstance(word, str)]
                near = nearest(value.value, words) if isinstance(value.value, str) else None
                text = f"found {value.shown}, which is not swept; allowed "
                text += shorten(", ".join(map(str, swept)), 200)
                problems.append(Problem(value.where, at, text + hint_for(near)))
        where[key] = [value.plain() for value in some]
    return where, problems


def _wrong_setting(key: str, node: Node, swept: Sequence[str]) -> str:
    """Return the message for a key that an override cannot set, else ''."""
    text = wrong_key(key, node, runtime=True)
    if not text and any(are_nested(key, other) for other in swept):
        text = f"found {quote(key)}, which the sweep varies; allowed a key that it does not"
    return text


def are_nested(key: str, other: str) -> bool:
    """Return whether two dotted keys are equal, or one is a section of the other."""
    return key == other or key.startswith(other + ".") or other.startswith(key + ".")


def setting_problems(rules: Sequence[Rule], tree: Node) -> list[Problem]:
    """Return the values of overrides that the schema refuses."""
    return [
        Problem(problem.where, quote_key(f"{rule.name}.set.{problem.key}"), problem.text)
        for rule in rules
        for key, node in rule.settings.items()
        for problem in value_problems(tree, key, node)
    ]


def idle_rules(rules: Sequence[Rule], cells: Sequence[Mapping[str, Any]]) -> list[Problem]:
    """Return the rules without effect: those that match no cell that is left."""
    problems = []
    left = list(cells)
    for rule in rules:
        matches = Matcher(rule.where)
        over = left if rule.name == "sweep.overrides" else cells
        if not any(map(matches, over)):
            text = "found an entry that matches no cell, and so does nothing; "
            text += "allowed one that matches some, or delete it"
            problems.append(Problem(rule.node.where, rule.name, text))
        if rule.name == "sweep.exclude":
            left = [cell for cell in left if not matches(cell)]
    return problems
