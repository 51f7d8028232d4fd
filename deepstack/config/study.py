"""A study: a base configuration and the values that a sweep gives to some of its keys."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from deepstack.config import too_large
from deepstack.config.explain import raise_problems, validate
from deepstack.config.load import (
    explain_external_probe,
    merge_problems,
    override_place,
    parse_override,
    printable_path,
    read_file,
    read_tree,
    refuse_absurd_tree,
    relabel,
    with_overrides,
)
from deepstack.config.schema import Config
from deepstack.config.study_axes import Axes, axis_problems, read_axes, values_of
from deepstack.config.study_rules import (
    Matcher,
    Override,
    Rule,
    Where,
    are_nested,
    idle_rules,
    read_rules,
    setting_problems,
)
from deepstack.config.study_schema import form_problems
from deepstack.errors import ConfigError
from deepstack.yaml_reader import Node, Problem


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
        excluded = [Matcher(where) for where in self.exclude]
        overrides = [(Matcher(override.where), override.settings) for override in self.overrides]
        # a key that the command line has fixed is swept no longer, and rules still speak of it
        spoken = {key for where in self.exclude for key in where}
        spoken |= {key for override in self.overrides for key in override.where}
        fixed = {key: value_at(self.base, key) for key in spoken - {*self.keys}}
        for values in _product(self.grid, self.zips):
            cell = fixed | values if fixed else values
            if any(matches(cell) for matches in excluded):
                continue
            settings: dict[str, Any] = {}
            for matches, more in overrides:
                if matches(cell):
                    settings |= more
            yield Combination(values, settings)


def value_at(config: Config, key: str) -> Any:
    """Return the value at a dotted key, or None."""
    node: Any = config.model_dump()
    for part in key.split("."):
        node = node.get(part) if isinstance(node, dict) else None
    return node


def _product(
    grid: Mapping[str, Sequence[Any]], zips: Sequence[Mapping[str, Sequence[Any]]]
) -> Iterator[dict[str, Any]]:
    factors = [[{key: value} for value in values] for key, values in grid.items()]
    factors += [
        [dict(zip(group, row, strict=True)) for row in zip(*group.values(), strict=True)]
        for group in zips
    ]
    for parts in itertools.product(*factors):
        yield {key: value for part in parts for key, value in part.items()}


def load_study(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Study:
    """Return the study in a YAML file; a file without `sweep:` is a study of one run.

    An override `key=a,b` makes or replaces an axis of the grid, or the key's values in a zip;
    `key=a` fixes the key.  Raises ConfigError as `load_config`.
    """
    with explain_external_probe(path):
        return parse_study(read_file(path), printable_path(path), overrides)


def parse_study(
    text: str | bytes, source: str = "<string>", overrides: Sequence[str] = ()
) -> Study:
    """Return the study in a YAML text.  source: its name in messages."""
    lists = [o for o in overrides if len(_values(o)) > 1]
    tree, problems = read_tree(text, source, [o for o in overrides if o not in lists])
    sweep = tree.value.pop("sweep", None) if isinstance(tree.value, dict) else None
    sweep = sweep or Node(None, source, "nothing")
    keys = [override.partition("=")[0].strip() for override in overrides]
    problems += form_problems(sweep, keys)
    axes = read_axes(sweep)
    declared = Axes(dict(axes.grid), [dict(group) for group in axes.zips])
    for key, override in zip(keys, overrides, strict=True):
        if override not in lists:
            axes.fix(key)
    for override in lists:
        key, node, more = _axis(override)
        problems += more
        axes.replace(key, node)
        # the rules of the file may refer to values that the command line has replaced
        before = declared.nodes().get(key)
        both = [*values_of(before), *values_of(node)] if before else node.value
        declared.replace(key, replace(before or node, value=both))
    base, more = validate(tree)
    problems = merge_problems(problems, more)
    problems += axis_problems(axes, tree, sweep.where)
    # rules are read where the axes that they speak of are sound
    rules, more = ([], []) if problems else read_rules(sweep, declared, keys)
    problems += more
    if not problems:
        problems += setting_problems(rules, tree)
    raise_problems(problems)
    assert base is not None
    if rules and not set(keys) & declared.nodes().keys():
        raise_problems(idle_rules(rules, list(_product(*_plain(axes)))))
    study = _study(base, axes, rules, keys)
    if study.exclude and study.size == 0:
        raise ConfigError(f"{sweep.where}: sweep.exclude: found that every run is left out")
    _refuse_absurd(study, axes, tree)
    return study


def _axis(override: str) -> tuple[str, Node, list[Problem]]:
    """Return key, values and mistakes of an override `key=a,b`."""
    key, where = override.partition("=")[0].strip(), override_place(override)
    nodes, problems = [], []
    for value in _values(override):
        parsed = parse_override(f"{key}={value}")
        if isinstance(parsed, Problem):
            problems.append(replace(parsed, where=where))
        else:
            nodes.append(relabel(parsed[1], where))
    return key, Node(list(nodes), where, "a list", where), problems


def _plain(axes: Axes) -> tuple[dict[str, list[Any]], tuple[dict[str, list[Any]], ...]]:
    grid, *zips = (
        {key: node.plain() for key, node in group.items()} for group in (axes.grid, *axes.zips)
    )
    return grid, tuple(zips)


def _study(base: Config, axes: Axes, rules: Sequence[Rule], given: Sequence[str]) -> Study:
    """Return the study; keys on the command line win over the settings of an override."""
    overrides = []
    for rule in rules:
        settings = {
            key: node.plain()
            for key, node in rule.settings.items()
            if not any(are_nested(key, other) for other in given)
        }
        if settings:
            overrides.append(Override(rule.where, settings))
    grid, zips = _plain(axes)
    exclude = tuple(rule.where for rule in rules if rule.name == "sweep.exclude")
    return Study(base, grid, zips, exclude, tuple(overrides))


def _values(override: str) -> list[str]:
    """Return the values of `key=a,b`: the text split at commas outside of brackets and quotes."""
    parts, level, quote = [""], 0, ""
    for letter in override.partition("=")[2]:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter in "[{":
            level += 1
        elif letter in "]}":
            level -= 1
        elif letter == "," and level == 0:
            parts.append("")
            continue
        parts[-1] += letter
    return parts


def _refuse_absurd(study: Study, axes: Axes, tree: Node) -> None:
    """Refuse a study with a run that this machine could never hold."""
    for sizes in _largest(study):
        try:
            config = with_overrides(study.base, sizes)
        except ConfigError:
            continue  # sizes that only other swept values allow, as a family allows decoder_depth
        refuse_absurd_tree(config, tree, axes.nodes())


def _largest(study: Study) -> Iterator[dict[str, Any]]:
    """Yield the sizes of the cells that can be the largest, in order of falling product."""
    size_sets = {
        tuple(sorted((k, v) for k, v in cell.settings.items() if k in too_large.SIZES and v))
        for cell in study.combinations()
    }
    # whether the heads divide the width is a question for each combination, and not for its size
    sized = [{**dict(sizes), "model.n_heads": 1} for sizes in size_sets]
    sized.sort(key=lambda sizes: -math.prod(map(float, sizes.values())))
    cells: list[dict[str, Any]] = []
    for sizes in sized:
        if not any(_is_covered(sizes, larger) for larger in cells[:50]):  # enough for a grid
            cells.append(sizes)
            yield sizes


def _is_covered(sizes: Mapping[str, float], larger: Mapping[str, float]) -> bool:
    """Return whether two cells have the same sizes, and none of the first is the larger one."""
    return sizes.keys() == larger.keys() and all(sizes[key] <= larger[key] for key in sizes)
