"""The rules of a sweep: cells that are left out, and cells that need other settings."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepstack.config.explain import meant_key
from deepstack.config.study_axes import Axes, hint_of, is_known, put_at, wrong_value
from deepstack.config.walk import sections
from deepstack.registry import nearest
from deepstack.yaml_reader import Node, Problem, quote, quote_key, shorten

MAX_RULES = 100

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


def same(value: Any) -> Hashable:
    """A value as it is compared: 1 equals 1.0 and not true; lists by what they hold."""
    if isinstance(value, bool):
        return "true" if value else "false", None
    if isinstance(value, list | tuple):
        return tuple(map(same, value))
    if isinstance(value, Mapping):
        return frozenset((key, same(inner)) for key, inner in value.items())
    return value


class Matcher:
    """Whether a cell has one of the given values for every key."""

    def __init__(self, where: Where) -> None:
        self._wanted = {key: {same(value) for value in values} for key, values in where.items()}

    def __call__(self, cell: Mapping[str, Any]) -> bool:
        return all(key in cell and same(cell[key]) in some for key, some in self._wanted.items())


def read_rules(
    sweep: Node | None, declared: Axes, given: Collection[str]
) -> tuple[list[Rule], list[Problem]]:
    """The rules of a `sweep:` section.

    declared: every axis that they may refer to; given: keys that the command line has the last
    word on, so that rules may set them too.
    """
    if sweep is None or not isinstance(sweep.value, dict):
        return [], []
    rules: list[Rule] = []
    problems: list[Problem] = []
    values = {key: node for _, key, node in declared.named()}
    for section, form in (
        ("exclude", "a list such as [{model.scheme: post_ln, model.depth: [500, 1000]}]"),
        ("overrides", "a list such as [{where: {model.depth: 1000}, set: {train.lr: 1e-4}}]"),
    ):
        node = sweep.value.get(section)
        if node is None or node.value is None:
            continue
        name = f"sweep.{section}"
        if not isinstance(node.value, list):
            problems.append(Problem(node.where, name, f"found {node.shown}; allowed {form}"))
            continue
        if len(node.value) > MAX_RULES:
            text = f"found {len(node.value)} entries; allowed at most {MAX_RULES}"
            problems.append(Problem(node.where, name, text))
            continue
        for entry in node.value:
            rule, wrong = _rule(name, entry, values, form, given)
            problems += wrong
            if rule is not None and not wrong:
                rules.append(rule)
    return rules, problems


def _rule(
    name: str, entry: Node, values: Mapping[str, Node], form: str, given: Collection[str]
) -> tuple[Rule | None, list[Problem]]:
    if not isinstance(entry.value, dict) or not entry.value:
        shown = "an empty section" if entry.value == {} else entry.shown
        return None, [Problem(entry.where, name, f"found {shown}; allowed {form}")]
    if name == "sweep.exclude":
        where, problems = _where(name, entry, values)
        return Rule(name, entry, where, {}), problems
    problems = []
    for key, node in entry.value.items():
        if key not in ("where", "set"):
            text = f"found the unknown key {quote(key)}; allowed where, set"
            hint = hint_of(nearest(key, ("where", "set")))
            problems.append(Problem(node.key_where, quote_key(f"{name}.{key}"), text + hint))
    if problems:
        return None, problems
    parts = {key: entry.value.get(key) for key in ("where", "set")}
    for key, part in parts.items():
        if part is None or not isinstance(part.value, dict) or not part.value:
            shown = "nothing" if part is None or part.value is None else part.shown
            at = entry.where if part is None else part.where
            problems.append(Problem(at, f"{name}.{key}", f"found {shown}; allowed {form}"))
    if problems:
        return None, problems
    assert parts["where"] is not None and parts["set"] is not None
    where, problems = _where(f"{name}.where", parts["where"], values)
    assert isinstance(parts["set"].value, dict)
    for key, node in parts["set"].value.items():
        wrong = _wrong_setting(key, [other for other in values if other not in given])
        if wrong:
            problems.append(Problem(node.key_where, quote_key(f"{name}.set.{key}"), wrong))
    return Rule(name, entry, where, dict(parts["set"].value)), problems


def _where(name: str, entry: Node, values: Mapping[str, Node]) -> tuple[Where, list[Problem]]:
    """The keys and values of a partial cell, each of them one that the sweep has."""
    where: Where = {}
    problems: list[Problem] = []
    assert isinstance(entry.value, dict)
    for key, node in entry.value.items():
        at = quote_key(f"{name}.{key}")
        if key not in values:
            text = f"found {quote(key)}, which is not swept; allowed {', '.join(values) or 'none'}"
            hint = hint_of(nearest(key, values))
            problems.append(Problem(node.key_where, at, shorten(text, 300) + hint))
            continue
        axis = values[key].value
        swept = [value.plain() for value in axis] if isinstance(axis, list) else []
        known = {same(value) for value in swept}
        whole = not isinstance(node.value, list) or same(node.plain()) in known
        some = [node] if whole else node.value
        assert isinstance(some, list)
        if not some:
            problems.append(Problem(node.where, at, "found an empty list; allowed a value or more"))
        for value in some:
            if same(value.plain()) not in known:
                words = [word for word in swept if isinstance(word, str)]
                near = nearest(value.value, words) if isinstance(value.value, str) else None
                text = f"found {value.shown}, which is not swept; allowed "
                text += shorten(", ".join(map(str, swept)), 200)
                problems.append(Problem(value.where, at, text + hint_of(near)))
        where[key] = [value.plain() for value in some]
    return where, problems


def _wrong_setting(key: str, swept: Sequence[str]) -> str | None:
    """What is wrong with a key that an override sets, if anything."""
    if key in sections() or key.split(".")[0] in ("name", "sweep"):
        return f"found {quote(key)}; allowed a dotted key such as train.lr"
    if not is_known(key):
        path = tuple(key.split("."))
        meant = meant_key(path) if all(path) else None
        if meant and "." not in meant and len(path) > 1:
            meant = ".".join((*path[:-1], meant))
        text = f"found the unknown key {quote(key)}; allowed dotted keys such as train.lr"
        return text + hint_of(meant)
    for other in swept:
        if related(key, other):
            return f"found {quote(key)}, which the sweep varies; allowed a key that it does not"
    return None


def related(key: str, other: str) -> bool:
    """Whether two dotted keys are one, or one lies within the other."""
    return key == other or key.startswith(other + ".") or other.startswith(key + ".")


def wrong_settings(rules: Sequence[Rule], tree: Node) -> list[Problem]:
    """Values of overrides that the schema refuses."""
    return [
        problem
        for rule in rules
        for key, node in rule.settings.items()
        for problem in _at_place(wrong_value(put_at(tree, key, node), key, node), rule)
    ]


def _at_place(problems: list[Problem], rule: Rule) -> Iterator[Problem]:
    for problem in problems:
        key = quote_key(f"{rule.name}.set.{problem.key}")
        yield Problem(problem.where, key, problem.text)


def idle(rules: Sequence[Rule], cells: Sequence[Mapping[str, Any]]) -> list[Problem]:
    """Rules that match no cell, an override none of those that are not left out."""
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
