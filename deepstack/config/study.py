"""A study: a configuration, and the values that a sweep gives to some of its keys."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from deepstack.config import estimate
from deepstack.config.explain import keys, meant_key, raise_all, sections, validate
from deepstack.config.load import (
    parse_override,
    place_of,
    read_file,
    read_tree,
    relabel,
    shown_path,
    together,
    with_overrides,
)
from deepstack.config.schema import Config
from deepstack.config.yaml_reader import Node, Problem, quoted, quoted_key, shorten
from deepstack.errors import ConfigError

MAX_RUNS = 10_000
MAX_AXES = 32


@dataclass(frozen=True)
class Study:
    """base: the configuration of every run but for the swept keys; grid: their values by key."""

    base: Config
    grid: dict[str, list[Any]] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """The number of runs: one for every combination."""
        return math.prod(map(len, self.grid.values()))


def load_study(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Study:
    """The study in a YAML file; a file without `sweep:` is a study of one run.

    An override `key=a,b` makes or replaces an axis of the grid, `key=a` fixes the key.
    ConfigError has one line a problem, as `load_config`.
    """
    return parse_study(read_file(path), shown_path(path), overrides)


def parse_study(
    text: str | bytes, source: str = "<string>", overrides: Sequence[str] = ()
) -> Study:
    """The study in a YAML text; source is what its errors call it."""
    lists = [o for o in overrides if len(_values(o)) > 1]
    tree, problems = read_tree(text, source, [o for o in overrides if o not in lists])
    sweep = tree.value.pop("sweep", None) if isinstance(tree.value, dict) else None
    axes, more = _axes(sweep)
    problems += more
    fixed = [override.partition("=")[0].strip() for override in overrides if override not in lists]
    axes = {key: node for key, node in axes.items() if key not in fixed}
    for override in lists:
        key = override.partition("=")[0].strip()
        where = place_of(override)
        nodes = []
        for value in _values(override):
            parsed = parse_override(f"{key}={value}")
            if isinstance(parsed, Problem):
                problems.append(replace(parsed, where=where))
            else:
                nodes.append(relabel(parsed[1], where))
        axes[key] = Node(list(nodes), where, "a list", where)
    base, more = validate(tree)
    problems = together(problems, more)
    if len(axes) > MAX_AXES:
        text = f"found {len(axes)} keys; allowed a grid of at most {MAX_AXES}"
        problems.append(Problem(sweep.where if sweep else source, "sweep.grid", text))
        axes = {}
    total = math.prod(len(node.value) for node in axes.values() if isinstance(node.value, list))
    if total > MAX_RUNS:
        problems.append(_large_grid(axes, total, sweep.where if sweep else source))
    for key, node in axes.items():
        wrong = _wrong_axis(key, node, axes)
        problems += wrong or (_wrong_values(tree, key, node) if total <= MAX_RUNS else [])
    raise_all(problems)
    assert base is not None
    study = Study(base, {key: list(node.plain()) for key, node in axes.items()})
    _refuse_absurd(study, axes, tree)
    return study


def _values(override: str) -> list[str]:
    """The values of `key=a,b`: split at commas that stand in no bracket and no quotes."""
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


def _axes(sweep: Node | None) -> tuple[dict[str, Node], list[Problem]]:
    if sweep is None or sweep.value is None:
        return {}, []
    form = "a section with `grid:`, and below it lines such as `model.depth: [6, 48]`"
    if not isinstance(sweep.value, dict):
        return {}, [Problem(sweep.where, "sweep", f"found {sweep.shown}; allowed {form}")]
    problems = [
        Problem(node.key_where, quoted_key(f"sweep.{key}"),
                f"found the unknown key {quoted(key)}; allowed grid")
        for key, node in sweep.value.items()
        if key != "grid"
    ]  # fmt: skip
    grid = sweep.value.get("grid")
    if grid is None or grid.value is None:
        return {}, problems
    if not isinstance(grid.value, dict):
        text = f"found {grid.shown}; allowed lines such as `model.depth: [6, 48]`"
        return {}, [*problems, Problem(grid.where, "sweep.grid", text)]
    return dict(grid.value), problems


def _wrong_axis(key: str, node: Node, axes: dict[str, Node]) -> list[Problem]:
    """What is wrong with a key of the grid and the form of its values."""
    name = quoted_key(f"sweep.grid.{key}")
    path = tuple(key.split("."))
    free = ("task.", "model.scheme_options.", "train.lr_factors.")
    if key in sections() or key.split(".")[0] in ("name", "runtime", "sweep"):
        text = f"found {quoted(key)}; allowed a key that makes a run differ, such as model.depth"
        return [Problem(node.key_where, name, text)]
    if key not in keys() and not (key.startswith(free) and all(path)):
        meant = meant_key(path) if all(path) else None
        if meant and "." not in meant and len(path) > 1:
            meant = ".".join((*path[:-1], meant))
        hint = f"; did you mean {meant!r}?" if meant else ""
        text = f"found the unknown key {quoted(key)}; allowed dotted keys such as model.depth{hint}"
        return [Problem(node.key_where, name, text)]
    if key in {".".join(other.split(".")[:-1]) for other in axes}:
        text = "found this key and another below it; allowed one of them"
        return [Problem(node.key_where, name, text)]
    if not isinstance(node.value, list) or not node.value:
        shown = "an empty list" if node.value == [] else node.shown
        scalar = not isinstance(node.value, dict | list | None)
        hint = f"; did you mean [{node.shown}]?" if scalar else ""
        text = f"found {shown}; allowed a list of values, such as [6, 48]{hint}"
        return [Problem(node.where, name, text)]
    seen: set[str] = set()
    problems = []
    for value in node.value:
        plain = repr(value.plain())
        if plain in seen:
            problems.append(Problem(value.where, name, f"found {value.shown} twice; allowed once"))
        seen.add(plain)
    return problems


def _with(tree: Node, key: str, node: Node) -> Node:
    """A copy of the tree with another node at a dotted key; what is not changed is shared."""
    copied = Node(dict(tree.value) if isinstance(tree.value, dict) else {}, tree.where, tree.shown)
    at = copied
    *before, last = key.split(".")
    for part in before:
        assert isinstance(at.value, dict)
        old = at.value.get(part)
        inner = dict(old.value) if old and isinstance(old.value, dict) else {}
        at.value[part] = Node(inner, old.where if old else node.where, "a section")
        at = at.value[part]
    assert isinstance(at.value, dict)
    at.value[last] = node
    return copied


def _wrong_values(tree: Node, key: str, axis: Node) -> list[Problem]:
    """Values of an axis that the schema refuses, each in place of the base's own.

    A value that only does not go with another (heads that do not divide the width) is judged
    together with the rest of its combination.
    """
    problems: list[Problem] = []
    assert isinstance(axis.value, list)
    for value in axis.value:
        _, found = validate(_with(tree, key, value))
        inside = {value.where, *(child.where for child in _below(value))}
        problems += [p for p in found if p.where in inside and not p.relation]
    return problems


def _below(node: Node) -> list[Node]:
    inner = node.value
    return (
        list(inner.values())
        if isinstance(inner, dict)
        else inner
        if isinstance(inner, list)
        else []
    )


def _large_grid(axes: dict[str, Node], total: int, where: str) -> Problem:
    lists = {key: node.value for key, node in axes.items() if isinstance(node.value, list)}
    sizes = shorten(" x ".join(f"{len(values)} {key}" for key, values in lists.items()), 100)
    least = min(total, 10**12)  # a hostile file can ask for more than a float holds
    about = "" if total == least else "more than "
    text = f"found {about}{least:,} runs ({sizes}), {least / 86_400:,.1f} days at a second each"
    return Problem(where, "sweep.grid", f"{text}; allowed at most {MAX_RUNS:,}: give fewer values")


def _refuse_absurd(study: Study, axes: dict[str, Node], tree: Node) -> None:
    """Refuse a study whose largest combination this machine could never hold."""
    largest = {
        key: max(v or 0 for v in study.grid[key]) for key in estimate.SIZES if key in study.grid
    }
    # whether the heads divide the width is a question for each combination, and not for its size
    largest["model.n_heads"] = 1
    try:
        estimate.refuse_absurd(with_overrides(study.base, {k: v for k, v in largest.items() if v}))
    except ConfigError as error:
        key = error.key or ""
        node = axes.get(key) or tree.at(tuple(key.split(".")))
        raise ConfigError(f"{node.where}: {error}", key=error.key) from None
