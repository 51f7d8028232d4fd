"""Names of modules that are equal over depths: numbers of layers become first, middle and late.

A change adds up over layers, so that its size depends on the share of all layers that lie before a
module.  Each name has one share at all depths: `first` none, `middle` half, and `late` the share
before the last layer of the shallowest model, 3 of 4 layers or 48 of 64.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import nn

from deepstack.model import plain_name

Shapes = dict[str, tuple[int, ...]]


class Outline(NamedTuple):
    """The parts of a model that its check needs before any run.

    children: path of a module -> name and signature of each of its children.
    shapes: path of a module -> shapes of its own parameters by name.
    kinds: path of a module -> its class.
    """

    children: dict[str, list[tuple[str, Hashable]]]
    shapes: dict[str, Shapes]
    kinds: dict[str, type[nn.Module]]


class Stack(NamedTuple):
    """A module whose number of children depends on depth: prefix, layers of `unit`, suffix.

    least: number of layers of the shallowest model.
    """

    prefix: int
    unit: int
    suffix: int
    least: int = 1

    def layers(self, count: int) -> int:
        """Return the number of layers among so many children."""
        return (count - self.prefix - self.suffix) // self.unit

    def places(self, count: int) -> dict[str, int]:
        """Return the measured layers among so many children, from 0, by their names."""
        layers = self.layers(count)
        shares = {"first": 0, "middle": self.least // 2, "late": self.least - 1}
        distinct = {share: name for name, share in reversed(shares.items())}
        return {name: round(layers * share / self.least) for share, name in distinct.items()}


class Names(NamedTuple):
    """The names of a model's modules in a check.

    keys: path -> names that are equal over depths; none where a layer is not measured.
    layers: paths of the measured layers.
    inside: paths of all modules in layers.
    """

    keys: dict[str, tuple[str, ...]]
    layers: set[str]
    inside: set[str]


def outline_of(model: nn.Module) -> Outline:
    """Return the outline of a model."""
    outline = Outline({}, {}, {})
    for name, module in model.named_modules():
        path = plain_name(name)
        children = [(child, signature(part)) for child, part in module.named_children()]
        outline.children[path] = children
        own = module.named_parameters(recurse=False)
        outline.shapes[path] = {key: tuple(p.shape) for key, p in own}
        outline.kinds[path] = type(module)
    return outline


def signature(module: nn.Module) -> Hashable:
    """Return a value that two layers share if they have equal classes and shapes."""
    shapes = tuple((name, tuple(p.shape)) for name, p in module.named_parameters())
    return tuple(type(part).__qualname__ for part in module.modules()), shapes


def find_stacks(outlines: Mapping[int, Outline]) -> dict[str, Stack]:
    """Return path -> stack for the modules whose number of children depends on depth.

    Members of a list that do not repeat are layers each.
    """
    ordered = [outlines[depth] for depth in sorted(outlines)]
    shallow, deep = ordered[0], ordered[-1]
    stacks: dict[str, Stack] = {}
    for path, children in deep.children.items():  # a module before the modules in it
        kept = all(path in outline.children for outline in ordered)
        if not kept or is_below(path, stacks):
            continue
        if 0 < len(shallow.children[path]) < len(children):
            lists = [[kind for _, kind in one.children[path]] for one in ordered]
            numbered = Stack(0, 1, 0) if all(name.isdigit() for name, _ in children) else None
            stack = next(fitting(sorted(lists, key=len)), numbered)
            if stack is not None:
                stacks[path] = stack._replace(least=stack.layers(len(lists[0])))
    return stacks


def is_below(path: str, stacks: Mapping[str, Stack]) -> bool:
    """Return whether a module lies in a stack: its path names other modules at other depths."""
    return any(path.startswith(f"{stack}.") or not stack for stack in stacks)


def fitting(lists: Sequence[Sequence[Hashable]]) -> Iterator[Stack]:
    """Yield the ways to read lists of children, by rising length, as layers that repeat."""
    short, long = lists[0], lists[-1]
    for unit in range(1, len(long) - len(short) + 1):
        for ends in range(len(short) - unit + 1):
            for prefix in range(ends + 1):
                stack = Stack(prefix, unit, ends - prefix)
                layer = long[prefix : prefix + unit]
                if all(reads(one, long, layer, stack) for one in lists):
                    yield stack


def reads(
    one: Sequence[Hashable], long: Sequence[Hashable], layer: Sequence[Hashable], stack: Stack
) -> bool:
    """Return whether a list is the prefix of `long`, repeated layers, and the suffix of `long`."""
    end = len(one) - stack.suffix
    count, rest = divmod(end - stack.prefix, stack.unit)
    return (
        rest == 0
        and list(one[: stack.prefix]) == list(long[: stack.prefix])
        and list(one[end:]) == list(long[len(long) - stack.suffix :])
        and list(one[stack.prefix : end]) == list(layer) * count
    )


def names_of(outline: Outline, stacks: Mapping[str, Stack]) -> Names:
    """Return the names of the modules of one model."""
    names = Names({"": ("",)}, set(), set())

    def visit(path: str) -> None:
        children = outline.children[path]
        for index, (child, _) in enumerate(children):
            below = f"{path}.{child}" if path else child
            stack = stacks.get(path)
            inner, is_layer = labels(index, len(children), child, stack)
            outer = names.keys[path]
            names.keys[below] = tuple(
                ".".join(filter(None, (start, end))) for start in outer for end in inner
            )
            if is_layer or path in names.inside:
                names.inside.add(below)
            if is_layer and names.keys[below]:
                names.layers.add(below)
            visit(below)

    visit("")
    return names


def labels(index: int, count: int, child: str, stack: Stack | None) -> tuple[tuple[str, ...], bool]:
    """Return the names of a child, and whether it is a layer of a stack."""
    if stack is None or index < stack.prefix:
        return (child,), False
    if index >= count - stack.suffix:
        return (str(index - count) if child.isdigit() else child,), False
    layer, part = divmod(index - stack.prefix, stack.unit)
    end = f".{part}" if stack.unit > 1 else ""
    return tuple(f"{name}{end}" for name, at in stack.places(count).items() if at == layer), True
