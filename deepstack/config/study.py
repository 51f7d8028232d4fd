"""A study: a base configuration and the values that a sweep gives to some of its keys.

The `sweep:` section of a file has axes (grid, zip) and rules (exclude, overrides).  Their mistakes
are reported with their place.
"""

import itertools
import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deepstack.base.errors import ConfigError
from deepstack.base.registry import unknown
from deepstack.base.text import quote, quote_key
from deepstack.base.yaml_reader import MAX_DEPTH, Node, Problem, read
from deepstack.config.explain import hint_for, raise_problems, suggest_key, validate
from deepstack.config.identity import OPEN_SECTIONS, OPTIONS
from deepstack.config.keys import sections, setting_keys
from deepstack.config.load import (
    merge_problems,
    override_place,
    printable_path,
    put,
    read_file,
    read_tree,
    rivals,
    to_node,
)
from deepstack.config.schema import Config
from deepstack.config.schema import values as values_by_key
from deepstack.config.study_schema import MAX_RUNS, StudyFile, Where

# Keys that can be checked in each cell alone: the width for so many parameters depends on depth.
OF_EACH_CELL = ("model.parameters",)
Group = dict[str, Node]
"""One factor of the product: a key of the grid, or the keys of a zip, with their lists."""


@dataclass(frozen=True)
class Override:
    """Settings for the cells that match.

    where: dotted key -> the values of which a cell has one.
    settings: dotted key -> value.
    """

    where: Where
    settings: dict[str, Any]


@dataclass(frozen=True)
class Combination:
    """One cell of a study: the values of the swept keys, and the settings of overrides."""

    values: dict[str, Any]
    overridden: dict[str, Any] = field(default_factory=dict)

    @property
    def settings(self) -> dict[str, Any]:
        """Everything in which the cell differs from the base."""
        return self.values | self.overridden


@dataclass(frozen=True)
class Study:
    """base: the configuration of every run but for the swept keys; grid: their values by key.

    zips: keys whose lists go together, value by value, each group one more factor of the product.
    exclude: {key: values}; a cell that has one of the values for every key is left out.
    overrides: settings for the cells that match; of several the last wins.
    """

    base: Config
    grid: dict[str, list[Any]] = field(default_factory=dict)
    zips: tuple[dict[str, list[Any]], ...] = ()
    exclude: tuple[Where, ...] = ()
    overrides: tuple[Override, ...] = ()

    @property
    def _factors(self) -> list[list[dict[str, Any]]]:
        groups = [*({key: values} for key, values in self.grid.items()), *self.zips]
        return [
            [dict(zip(group, row, strict=True)) for row in zip(*group.values(), strict=True)]
            for group in groups
        ]

    @property
    def total(self) -> int:
        """The number of combinations, with those that are left out."""
        return math.prod(map(len, self._factors))

    @property
    def size(self) -> int:
        """The number of runs: one for every combination that is not left out."""
        return self.total if not self.exclude else sum(1 for _ in self.combinations())

    @property
    def keys(self) -> list[str]:
        """The swept keys."""
        return [*self.grid, *(key for group in self.zips for key in group)]

    def combinations(self) -> Iterator[Combination]:
        """Yield every cell that is not left out; the first key varies slowest."""
        # a key that the command line has fixed is swept no longer, and rules still speak of it
        base = values_by_key(self.base) if self.exclude or self.overrides else {}
        for values in self.cells():
            cell = base | values
            if any(matches(where, cell) for where in self.exclude):
                continue
            settings: dict[str, Any] = {}
            for override in self.overrides:
                if matches(override.where, cell):
                    settings |= override.settings
            yield Combination(values, settings)

    def cells(self) -> Iterator[dict[str, Any]]:
        """Yield the swept values of every cell, also of those that are left out."""
        for parts in itertools.product(*self._factors):
            yield {key: value for part in parts for key, value in part.items()}


def load_study(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Study:
    """Return the study in a YAML file; a file without `sweep:` is a study of one run.

    An override `key=a,b` makes or replaces an axis of the grid, or the key's values in a zip;
    `key=a` fixes the key.  Raises ConfigError as `load_config`.
    """
    return parse_study(read_file(path), printable_path(path), overrides)


def parse_study(
    text: str | bytes, source: str = "<string>", overrides: Sequence[str] = ()
) -> Study:
    """Return the study in a YAML text.  source: its name in messages."""
    axes = {override: _several(override) for override in overrides}
    tree, problems = read_tree(text, source, [each for each in overrides if axes[each] is None])
    sweep = tree.section.pop("sweep", None) or Node({}, source)
    base, more = validate(tree)
    _, wrong_form = validate(Node({"sweep": sweep}, sweep.where), StudyFile)
    raise_problems(merge_problems(problems, [*more, *wrong_form]))
    groups: list[Group] = [{key: node} for key, node in _inner(sweep, "grid").section.items()]
    groups += [dict(group.section) for group in _inner(sweep, "zip").items()]
    # the rules of the file may refer to values that the command line has replaced
    declared = {key: node.items() for group in groups for key, node in group.items()}
    override_keys = []
    for override, axis in axes.items():
        key = override.partition("=")[0].strip()
        override_keys.append(key)
        groups = _replace_axis(groups, key, axis)
        if axis is not None:
            declared[key] = [*declared.get(key, ()), *axis.items()]
    raise_problems(axis_problems(groups, sweep.where))

    rules, problems = read_rules(sweep, declared, override_keys)
    raise_problems(problems)
    plain = [{key: node.plain() for key, node in group.items()} for group in groups]
    study = Study(
        base,
        {key: values for group in plain if len(group) == 1 for key, values in group.items()},
        tuple(group for group in plain if len(group) > 1),
        tuple(rule.where for rule in rules if rule.name == "sweep.exclude"),
        tuple(Override(rule.where, rule.settings) for rule in rules if rule.settings),
    )
    if not set(override_keys) & declared.keys():
        raise_problems(idle_rules(rules, list(study.cells())))
    if study.exclude and study.size == 0:
        raise ConfigError(f"{sweep.where}: sweep.exclude: found that every run is left out")
    return study


def _several(override: str) -> Node | None:
    """Return the list of values of an override `key=a,b`; None for one value of most keys."""
    where = override_place(override)
    key, _, text = override.partition("=")
    values, problems = read(f"[{text}]", where)
    if problems or len(values.items()) < (1 if key.strip() in OF_EACH_CELL else 2):
        return None
    return to_node(values.plain(), where)


def _replace_axis(groups: Sequence[Group], key: str, axis: Node | None) -> list[Group]:
    """Return the groups with other values for a key, or without it if the axis is None.

    Axes of keys that it replaces (`train.steps` for `train.tokens`) go.
    """
    replaced = rivals(key)
    groups = [{k: node for k, node in group.items() if k not in replaced} for group in groups]
    if axis is not None and not any(key in group for group in groups):
        groups.append({key: axis})
    for group in groups:
        if axis is None:
            group.pop(key, None)
        elif key in group:
            group[key] = axis
    return [group for group in groups if group]


def _inner(section: Node, key: str) -> Node:
    """Return the node below a key of a section, or an empty list."""
    inner = section.section.get(key)
    return Node([], section.where) if inner is None or inner.value is None else inner


def axis_problems(groups: Sequence[Group], where: str) -> list[Problem]:
    """Return every mistake in the axes.  where: the place of the sweep."""
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
                if are_exclusive(key, other):
                    text = text or f"found this key and {other}; allowed one of them"
            if count != size:
                text = text or f"found {count} values; allowed {size}, as {first} has"
            seen.append(key)
            if text:
                problems.append(Problem(node.key_where, quote_key(f"{section}.{key}"), text))
            else:
                problems += [p for value in node.items() for p in value_problems(key, value)]
    return problems


def wrong_key(key: str, runtime: bool = False) -> str:
    """Return the message for a dotted key that no cell of a sweep can set, else ''.

    runtime: whether keys of `runtime` are allowed.
    """
    path = tuple(key.split("."))
    if path[0] == "name" or (path[0] == "runtime" and not runtime):
        return f"found {quote(key)}, in which no two runs may differ"
    section = key.partition(f"{OPTIONS}.")[0] + OPTIONS
    is_open = section in setting_keys() or key.startswith(OPEN_SECTIONS)
    if key in setting_keys() or (is_open and all(path) and len(path) <= MAX_DEPTH):
        return ""
    if inner := sections().get(key):
        return f"found the section {quote(key)}; allowed a key in it: {', '.join(inner)}"
    hint = hint_for(suggest_key(path))
    return f"found {quote(key)}; allowed a dotted key such as model.depth{hint}"


def value_problems(key: str, value: Node) -> list[Problem]:
    """Return the schema's complaints about one value of a key.

    A value that only does not go with another (heads that do not divide the width) is judged
    together with the rest of its combination.
    """
    _, problems = validate(put(Node({}, value.where), tuple(key.split(".")), value))
    return [problem for problem in problems if not problem.relation]


@dataclass(frozen=True)
class Rule:
    """An entry of `exclude:`, or of `overrides:` with settings, as it stands in the file."""

    name: str
    node: Node
    where: Where
    settings: dict[str, Any] = field(default_factory=dict)


def matches(where: Where, cell: Mapping[str, Any]) -> bool:
    """Return whether a cell has one of the given values for every key."""
    return all(key in cell and cell[key] in values for key, values in where.items())


def read_rules(
    sweep: Node, declared: Mapping[str, list[Node]], given: Collection[str]
) -> tuple[list[Rule], list[Problem]]:
    """Return the rules of a well-formed `sweep:` section, and the mistakes in them.

    declared: every swept key with the values that rules may refer to.
    given: the keys that the command line sets; rules may set them too, and the command line wins.
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
        settings = {}
        for key, setting in entry.section["set"].section.items():
            text = wrong_key(key, runtime=True)
            if any(are_exclusive(key, other) for other in swept):
                text = f"found {quote(key)}, which the sweep varies; allowed a key that it does not"
            if text:
                name = quote_key(f"sweep.overrides.set.{key}")
                wrong.append(Problem(setting.key_where, name, text))
            else:
                wrong += value_problems(key, setting)
            if not any(are_exclusive(key, other) for other in given):
                settings[key] = setting.plain()
        rules.append(Rule("sweep.overrides", entry, where, settings))
        problems += wrong
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


def are_exclusive(key: str, other: str) -> bool:
    """Return whether two dotted keys replace one another: a key and its section, or rivals."""
    nested = f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")
    return nested or other in rivals(key)


def idle_rules(rules: Sequence[Rule], cells: Sequence[Mapping[str, Any]]) -> list[Problem]:
    """Return the rules without effect: those that match no cell that is left."""
    problems = []
    text = "found an entry that matches no cell; allowed one that matches some"
    for rule in rules:
        others = [cell for cell in cells if not matches(rule.where, cell)]
        if len(others) == len(cells):
            problems.append(Problem(rule.node.where, rule.name, text))
        if rule.name == "sweep.exclude":
            cells = others
    return problems
