"""A study: a base configuration and the values that a sweep gives to some of its keys."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from deepstack.config.explain import raise_problems, validate
from deepstack.config.identity import values as values_by_key
from deepstack.config.load import (
    merge_problems,
    override_place,
    printable_path,
    read_file,
    read_tree,
    rival_lengths,
    to_node,
)
from deepstack.config.schema import Config, Where
from deepstack.config.sweep import (
    Group,
    are_nested,
    axis_problems,
    form_problems,
    idle_rules,
    matches,
    read_groups,
    read_rules,
)
from deepstack.errors import ConfigError
from deepstack.yaml_reader import Node, read


@dataclass(frozen=True)
class Override:
    """Settings for the cells that match.

    where: dotted key -> the values of which a cell has one; settings: dotted key -> value.
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
    def total(self) -> int:
        """The number of combinations, with those that are left out."""
        zipped = (max(map(len, group.values()), default=1) for group in self.zips)
        return math.prod(map(len, self.grid.values())) * math.prod(zipped)

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
        factors = [[{key: value} for value in values] for key, values in self.grid.items()]
        factors += [
            [dict(zip(group, row, strict=True)) for row in zip(*group.values(), strict=True)]
            for group in self.zips
        ]
        for parts in itertools.product(*factors):
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
    raise_problems(merge_problems(problems, [*more, *form_problems(sweep)]))
    groups = read_groups(sweep)
    # the rules of the file may refer to values that the command line has replaced
    declared = {key: node.items() for group in groups for key, node in group.items()}
    keys = []
    for override, axis in axes.items():
        key = override.partition("=")[0].strip()
        keys.append(key)
        groups = _replace_axis(groups, key, axis)
        if axis is not None:
            declared[key] = [*declared.get(key, ()), *axis.items()]
    raise_problems(axis_problems(groups, tree, sweep.where))

    def is_given(key: str) -> bool:
        return any(are_nested(key, other) for other in keys)

    rules, problems = read_rules(sweep, declared, keys, tree)
    raise_problems(problems)
    # keys on the command line win over the settings of overrides
    effective = [
        (rule, {k: node.plain() for k, node in rule.settings.items() if not is_given(k)})
        for rule in rules
    ]
    plain = [{key: node.plain() for key, node in group.items()} for group in groups]
    study = Study(
        base,
        {key: values for group in plain if len(group) == 1 for key, values in group.items()},
        tuple(group for group in plain if len(group) > 1),
        tuple(rule.where for rule in rules if rule.name == "sweep.exclude"),
        tuple(Override(rule.where, settings) for rule, settings in effective if settings),
    )
    if not set(keys) & declared.keys():
        raise_problems(idle_rules(rules, list(study.cells())))
    if study.exclude and study.size == 0:
        raise ConfigError(f"{sweep.where}: sweep.exclude: found that every run is left out")
    return study


def _several(override: str) -> Node | None:
    """Return the list of values of an override `key=a,b`; None for one value."""
    where = override_place(override)
    values, problems = read(f"[{override.partition('=')[2]}]", where)
    if problems or len(values.items()) < 2:
        return None
    return to_node(values.plain(), where)


def _replace_axis(groups: Sequence[Group], key: str, axis: Node | None) -> list[Group]:
    """Return the groups with other values for a key, or without it if the axis is None.

    Axes of other lengths of a run (`train.steps` for `train.tokens`) go.
    """
    replaced = {f"train.{other}" for other in rival_lengths(key)}
    groups = [{k: node for k, node in group.items() if k not in replaced} for group in groups]
    if axis is not None and not any(key in group for group in groups):
        groups.append({key: axis})
    for group in groups:
        if axis is None:
            group.pop(key, None)
        elif key in group:
            group[key] = axis
    return [group for group in groups if group]
