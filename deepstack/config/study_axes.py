"""The axes of a sweep: `grid:` and `zip:` of a file, with what the command line makes of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from deepstack.config.explain import meant_inside, meant_key, validate
from deepstack.config.walk import keys, sections
from deepstack.registry import nearest
from deepstack.yaml_reader import Node, Problem, quote, quote_key, shorten

MAX_RUNS = 10_000
MAX_AXES = 32
SECTIONS = ("grid", "zip", "exclude", "overrides")
FREE = ("task.", "model.scheme_options.", "train.lr_factors.")


@dataclass
class Axes:
    """What a sweep varies: single keys, and groups of keys that go together."""

    grid: dict[str, Node] = field(default_factory=dict)
    zips: list[dict[str, Node]] = field(default_factory=list)

    def groups(self) -> list[dict[str, Node]]:
        """Every factor of the product, a key of the grid as a group of one."""
        return [*({key: node} for key, node in self.grid.items()), *self.zips]

    def named(self) -> Iterator[tuple[str, str, Node]]:
        """(name in messages, key, node) of every swept key."""
        for key, node in self.grid.items():
            yield quote_key(f"sweep.grid.{key}"), key, node
        for group in self.zips:
            for key, node in group.items():
                yield quote_key(f"sweep.zip.{key}"), key, node

    def keys(self) -> list[str]:
        """Every swept key."""
        return [key for _, key, _ in self.named()]

    @property
    def total(self) -> int:
        """The number of combinations."""
        return math.prod(max(map(_length, group.values()), default=1) for group in self.groups())

    def fixed(self, key: str) -> None:
        """Sweep a key no longer; what went together with it stays together."""
        self.grid.pop(key, None)
        for group in self.zips:
            group.pop(key, None)
        self.zips = [group for group in self.zips if group]

    def replaced(self, key: str, node: Node) -> None:
        """Give a key other values: in its zip where it has one, else as an axis of the grid."""
        for group in self.zips:
            if key in group:
                group[key] = node
                return
        self.grid[key] = node


def read_axes(sweep: Node | None) -> tuple[Axes, list[Problem]]:
    """The axes that a `sweep:` section describes, and what is wrong with its form."""
    if sweep is None or sweep.value is None:
        return Axes(), []
    form = "a section with `grid:`, and below it lines such as `model.depth: [6, 48]`"
    if not isinstance(sweep.value, dict):
        return Axes(), [Problem(sweep.where, "sweep", f"found {sweep.shown}; allowed {form}")]
    problems = []
    for key, node in sweep.value.items():
        if key not in SECTIONS:
            text = f"found the unknown key {quote(key)}; allowed {', '.join(SECTIONS)}"
            text += hint_of(nearest(key, SECTIONS))
            problems.append(Problem(node.key_where, quote_key(f"sweep.{key}"), text))
    axes = Axes()
    grid = sweep.value.get("grid")
    if grid is not None and grid.value is not None:
        if isinstance(grid.value, dict):
            axes.grid = dict(grid.value)
        else:
            text = f"found {grid.shown}; allowed lines such as `model.depth: [6, 48]`"
            problems.append(Problem(grid.where, "sweep.grid", text))
    for group in _listed(sweep.value.get("zip")):
        if not isinstance(group.value, dict) or len(group.value) < 2:
            one = isinstance(group.value, dict) and len(group.value) == 1
            shown = "one key, which belongs under grid" if one else group.shown
            text = f"found {shown}; allowed two keys or more with lists of one length, such as "
            text += "{model.depth: [6, 48], train.lr: [1e-3, 5e-4]}"
            problems.append(Problem(group.where, "sweep.zip", text))
        else:
            axes.zips.append(dict(group.value))
    return axes, problems


def _listed(section: Node | None) -> list[Node]:
    """The mappings of `zip:`, which may be one or a list of them."""
    if section is None or section.value is None:
        return []
    return section.value if isinstance(section.value, list) else [section]


def wrong_axes(axes: Axes, tree: Node, where: str) -> list[Problem]:
    """Everything that is wrong with the axes; the tree is what their values are put into."""
    named = list(axes.named())
    if len(named) > MAX_AXES:
        text = f"found {len(named)} keys; allowed a grid of at most {MAX_AXES}"
        return [Problem(where, "sweep.grid", text)]
    problems = []
    if axes.total > MAX_RUNS:
        problems.append(_large_grid(axes, where))
    swept = [key for _, key, _ in named]
    for at, (name, key, node) in enumerate(named):
        wrong = wrong_key(name, key, node) or _wrong_list(name, node) or _twice(key, swept, at)
        if isinstance(wrong, str):
            problems.append(Problem(node.key_where, name, wrong))
        elif wrong is not None:
            problems.append(wrong)
        elif axes.total <= MAX_RUNS:
            problems += wrong_values(tree, key, node)
    for key, node in axes.grid.items():
        problems += _repeated(quote_key(f"sweep.grid.{key}"), node)
    for group in axes.zips:
        problems += _wrong_zip(group)
    return problems


def wrong_key(name: str, key: str, node: Node) -> Problem | None:
    """What is wrong with a dotted key that is given values, if anything."""
    path = tuple(key.split("."))
    if key in sections() or key.split(".")[0] in ("name", "runtime", "sweep"):
        text = f"found {quote(key)}; allowed a key that makes a run differ, such as model.depth"
        values = node.value if isinstance(node.value, list) else [node]
        inside = meant_inside(path, [value.value for value in values])
        text += hint_of(inside and f"{key}.{inside}")
        return Problem(node.key_where, name, text)
    if not is_known(key):
        meant = meant_key(path) if all(path) else None
        if meant and "." not in meant and len(path) > 1:
            meant = ".".join((*path[:-1], meant))
        text = f"found the unknown key {quote(key)}; allowed dotted keys such as model.depth"
        return Problem(node.key_where, name, text + hint_of(meant))
    return None


def is_known(key: str) -> bool:
    """Whether a dotted key is one of the schema's, or an option of a task, scheme or role."""
    return key in keys() or (key.startswith(FREE) and all(key.split(".")))


def _twice(key: str, swept: list[str], at: int) -> str | None:
    if key in swept[:at]:
        return "found the key twice among grid and zip; allowed once"
    if any(other.startswith(key + ".") for other in swept):
        return "found this key and another below it; allowed one of them"
    return None


def _wrong_list(name: str, node: Node) -> Problem | None:
    if isinstance(node.value, list) and node.value:
        return None
    shown = "an empty list" if node.value == [] else node.shown
    scalar = not isinstance(node.value, dict | list | None)
    hint = f"; did you mean [{node.shown}]?" if scalar else ""
    text = f"found {shown}; allowed a list of values, such as [6, 48]{hint}"
    return Problem(node.where, name, text)


def _repeated(name: str, node: Node) -> list[Problem]:
    if not isinstance(node.value, list):
        return []
    seen: set[str] = set()
    problems = []
    for value in node.value:
        plain = repr(value.plain())
        if plain in seen:
            problems.append(Problem(value.where, name, f"found {value.shown} twice; allowed once"))
        seen.add(plain)
    return problems


def _wrong_zip(group: dict[str, Node]) -> list[Problem]:
    """Keys that go together: as many values each, and no row of values twice."""
    lists = {key: node.value for key, node in group.items() if isinstance(node.value, list)}
    if len(lists) < len(group) or not all(lists.values()):
        return []  # said already
    first, *others = lists
    problems = []
    for key in others:
        if len(lists[key]) != len(lists[first]):
            text = f"found {len(lists[key])} values; allowed {len(lists[first])}, as {first} has: "
            text += "the keys of a zip go together"
            problems.append(Problem(group[key].where, quote_key(f"sweep.zip.{key}"), text))
    if problems:
        return problems
    seen: set[str] = set()
    for row in zip(*lists.values(), strict=True):
        plain = repr([value.plain() for value in row])
        if plain in seen:
            shown = shorten(", ".join(f"{k}={v.shown}" for k, v in zip(lists, row, strict=True)))
            text = f"found {shown} twice; allowed once"
            problems.append(Problem(row[0].where, quote_key(f"sweep.zip.{first}"), text))
        seen.add(plain)
    return problems


def put_at(tree: Node, key: str, node: Node) -> Node:
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


def wrong_values(tree: Node, key: str, axis: Node) -> list[Problem]:
    """Values of an axis that the schema refuses, each in place of the base's own.

    A value that only does not go with another (heads that do not divide the width) is judged
    together with the rest of its combination.
    """
    assert isinstance(axis.value, list)
    return [problem for value in axis.value for problem in wrong_value(tree, key, value)]


def wrong_value(tree: Node, key: str, value: Node) -> list[Problem]:
    """What the schema says of one value in place of the base's own."""
    _, found = validate(put_at(tree, key, value))
    inside = {value.where, *(child.where for child in _below(value))}
    return [problem for problem in found if problem.where in inside and not problem.relation]


def _below(node: Node) -> list[Node]:
    inner = node.value
    if isinstance(inner, dict):
        return list(inner.values())
    return inner if isinstance(inner, list) else []


def _large_grid(axes: Axes, where: str) -> Problem:
    sizes = " x ".join(
        f"{max(map(_length, group.values()))} {' + '.join(group)}" for group in axes.groups()
    )
    total = axes.total
    least = min(total, 10**12)  # a hostile file can ask for more than a float holds
    about = "" if total == least else "more than "
    text = f"found {about}{least:,} runs ({shorten(sizes, 100)}), {least / 86_400:,.1f} days at "
    text += f"a second each; allowed at most {MAX_RUNS:,}: give fewer values"
    return Problem(where, "sweep.grid", text)


def _length(node: Node) -> int:
    return max(1, len(node.value)) if isinstance(node.value, list) else 1


def hint_of(meant: str | None) -> str:
    """'; did you mean …?' where there is something to mean."""
    return f"; did you mean {meant!r}?" if meant else ""
