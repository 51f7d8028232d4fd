"""The axes of a sweep: `grid:` and `zip:` of a file, changed by the command line."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from deepstack.config import walk
from deepstack.config.explain import hint_for, suggest_inner_key, suggest_key, validate
from deepstack.config.load import put
from deepstack.yaml_reader import MAX_DEPTH, Node, Problem, quote, quote_key, shorten

MAX_RUNS = 10_000
MAX_AXES = 32
FREE = ("task.", "model.scheme_options.", "train.lr_factors.")


@dataclass
class Axes:
    """The keys that a sweep varies: single keys, and groups of keys that go together."""

    grid: dict[str, Node] = field(default_factory=dict)
    zips: list[dict[str, Node]] = field(default_factory=list)

    def groups(self) -> list[tuple[str, dict[str, Node]]]:
        """Return every factor of the product, after its section; a key of the grid is a group."""
        grid = [("sweep.grid", {key: node}) for key, node in self.grid.items()]
        return grid + [("sweep.zip", group) for group in self.zips]

    def nodes(self) -> dict[str, Node]:
        """Return every swept key with its values."""
        return {key: node for _, group in self.groups() for key, node in group.items()}

    @property
    def total(self) -> int:
        """The number of combinations."""
        return math.prod(_length(group) for _, group in self.groups())

    def fix(self, key: str) -> None:
        """Sweep a key no longer; the rest of its group stays together."""
        self.grid.pop(key, None)
        for group in self.zips:
            group.pop(key, None)
        self.zips = [group for group in self.zips if group]

    def replace(self, key: str, node: Node) -> None:
        """Give a key other values: in its zip if it has one, else in the grid."""
        group = next((group for group in self.zips if key in group), self.grid)
        group[key] = node


def read_axes(sweep: Node) -> Axes:
    """Return the axes of a `sweep:` section without the malformed ones."""
    groups = part(sweep, "zip")
    listed = groups.value if isinstance(groups.value, list) else [groups]
    zips = [lists for lists in map(_lists, listed) if lists]
    return Axes(_lists(part(sweep, "grid")), zips)


def part(section: Node, key: str) -> Node:
    """Return the node below a key of a section, or an empty one."""
    inner = section.value.get(key) if isinstance(section.value, dict) else None
    return inner or Node(None, section.where, "nothing")


def _lists(section: Node) -> dict[str, Node]:
    inner = section.value if isinstance(section.value, dict) else {}
    return {key: node for key, node in inner.items() if isinstance(node.value, list) and node.value}


def values_of(axis: Node) -> list[Node]:
    """Return the values of a list, or a single value as a list."""
    return axis.value if isinstance(axis.value, list) else [axis]


def axis_problems(axes: Axes, tree: Node, where: str) -> list[Problem]:
    """Return every mistake in the axes.

    tree: the configuration that their values are put into.  where: the place of the sweep.
    """
    keys = [key for _, group in axes.groups() for key in group]
    if len(keys) > MAX_AXES:
        text = f"found {len(keys)} keys; allowed a grid of at most {MAX_AXES}"
        return [Problem(where, "sweep.grid", text)]
    problems = [_large_grid(axes, where)] if axes.total > MAX_RUNS else []
    seen: set[str] = set()
    for section, group in axes.groups():
        for key, node in group.items():
            text = wrong_key(key, node)
            if key in seen:
                text = text or "found the key twice among grid and zip; allowed once"
            elif any(other.startswith(key + ".") for other in keys):
                text = text or "found this key and another below it; allowed one of them"
            seen.add(key)
            if text:
                problems.append(Problem(node.key_where, quote_key(f"{section}.{key}"), text))
            elif axes.total <= MAX_RUNS:
                for value in values_of(node):
                    problems += value_problems(tree, key, value)
        problems += _group_problems(section, group)
    return problems


def wrong_key(key: str, node: Node, runtime: bool = False) -> str:
    """Return the message for a dotted key that no cell of a sweep can set, else ''.

    node: its value, or the list of its values.  runtime: whether keys of `runtime` are allowed.
    """
    path = tuple(key.split("."))
    example = "train.lr" if runtime else "model.depth"
    if key in walk.sections() or path[0] in ("name", "sweep", *(() if runtime else ("runtime",))):
        inside = suggest_inner_key(path, [value.value for value in values_of(node)])
        kind = "dotted key" if runtime else "key that makes a run differ,"
        text = f"found {quote(key)}; allowed a {kind} such as {example}"
        return text + hint_for(inside and f"{key}.{inside}")
    if key in walk.keys() or (key.startswith(FREE) and all(path) and len(path) <= MAX_DEPTH):
        return ""
    meant = suggest_key(path) if all(path) else None
    if meant and "." not in meant and len(path) > 1:
        meant = ".".join((*path[:-1], meant))
    text = f"found the unknown key {quote(key)}; allowed dotted keys such as {example}"
    return text + hint_for(meant)


def _group_problems(section: str, group: dict[str, Node]) -> list[Problem]:
    """Return the mistakes in keys that go together: unequal lists, or a row of values twice."""
    (first, lead), *others = group.items()
    size = len(values_of(lead))
    problems = [
        Problem(node.where, quote_key(f"{section}.{key}"), f"found {len(values_of(node))} values; "
                f"allowed {size}, as {first} has: the keys of a zip go together")
        for key, node in others
        if len(values_of(node)) != size
    ]  # fmt: skip
    if problems:
        return problems
    seen: set[str] = set()
    for row in zip(*map(values_of, group.values()), strict=True):
        plain = repr([value.plain() for value in row])
        if plain in seen:
            pairs = (f"{key}={node.shown}" for key, node in zip(group, row, strict=True))
            shown = shorten(", ".join(pairs)) if others else row[0].shown
            text = f"found {shown} twice; allowed once"
            problems.append(Problem(row[0].where, quote_key(f"{section}.{first}"), text))
        seen.add(plain)
    return problems


def value_problems(tree: Node, key: str, value: Node) -> list[Problem]:
    """Return the schema's complaints about one value that is put into the tree.

    A value that only does not go with another (heads that do not divide the width) is judged
    together with the rest of its combination.
    """
    _, problems = validate(put(tree, tuple(key.split(".")), value))
    inner = value.value.values() if isinstance(value.value, dict) else values_of(value)
    inside = {value.where, *(node.where for node in inner)}
    return [problem for problem in problems if problem.where in inside and not problem.relation]


def _large_grid(axes: Axes, where: str) -> Problem:
    sizes = " x ".join(f"{_length(group)} {' + '.join(group)}" for _, group in axes.groups())
    total = axes.total
    least = min(total, 10**12)  # a hostile file can ask for more than a float holds
    about = "" if total == least else "more than "
    text = f"found {about}{least:,} runs ({shorten(sizes, 100)}), {least / 86_400:,.1f} days at "
    text += f"a second each; allowed at most {MAX_RUNS:,}: give fewer values"
    return Problem(where, "sweep.grid", text)


def _length(group: dict[str, Node]) -> int:
    return max(len(values_of(node)) for node in group.values())
