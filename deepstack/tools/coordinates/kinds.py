"""The kind of each module of a check: by the sides of its matrices that grow with width."""

from collections.abc import Mapping

from torch import nn

from deepstack.tools.coordinates.cells import Cell
from deepstack.tools.coordinates.recording import INPUT, LOGITS, SOFTMAX
from deepstack.tools.coordinates.rules import Module
from deepstack.tools.coordinates.stacks import Outline, Shapes

WITHOUT_PARAMETERS = {SOFTMAX: "softmax", INPUT: "input of a layer", LOGITS: "logits"}


def modules_of(cells: list[Cell], outlines: Mapping[int, Outline]) -> list[Module]:
    """Return the modules of a check, in order of execution.

    outlines: of the models at least depth, by width.
    """
    least = min(cell.depth for cell in cells)
    widths = sorted(outlines)
    narrow, wide = (
        next(cell for cell in cells if (cell.width, cell.depth) == (width, least))
        for width in (widths[0], widths[-1])
    )
    at_zero = names_at_zero(cells)
    repeated = repeated_names(cells)
    modules = []
    for name in ordered(narrow):
        if name in repeated:
            continue
        size = narrow.order[name]
        grows = wide.order.get(name, size) > size or len(widths) == 1
        is_final, is_inside = name == narrow.final, name in narrow.inside
        path = narrow.paths.get(name)
        if path is None:
            ends = WITHOUT_PARAMETERS.items()
            kind = next((kind for end, kind in ends if name.endswith(end)), "block")
        else:
            kind = kind_of(outlines[widths[0]], outlines[widths[-1]], path, grows)
            if len(widths) == 1 and kind == "fixed":
                kind = "readout" if is_final else "hidden"
        modules.append(Module(name, kind, is_inside, is_final, grows, name in at_zero))
    return modules


def ordered(cell: Cell) -> list[str]:
    """Return the names of modules in order of execution; a softmax follows its module's parameters.

    torch's MultiheadAttention has the matrices of q and k itself.
    """
    names = list(cell.order)
    for name in cell.order:
        owner = name.removesuffix(f" {SOFTMAX}")
        if owner != name and owner in cell.paths:
            names.remove(name)
            names.insert(names.index(owner) + 1, name)
    return names


def repeated_names(cells: list[Cell]) -> set[str]:
    """Return the modules whose output is always the output of an earlier one, as of dropout."""
    return set.intersection(*(cell.same for cell in cells))


def names_at_zero(cells: list[Cell]) -> set[str]:
    """Return the modules whose output is 0 at the start, in every model."""
    sizes: dict[str, set[float]] = {}
    for cell in cells:
        for value in cell.values:
            if value.quantity == "size":
                sizes.setdefault(value.name, set()).add(value.value)
    return {name for name, found in sizes.items() if found == {0.0}}


def kind_of(narrow: Outline, wide: Outline, path: str, grows: bool) -> str:
    """Return the kind of a module with parameters.

    hidden: both sides of a matrix grow with width; input or readout: the side of the output or of
    the input; fixed: neither.
    """
    if issubclass(narrow.kinds[path], nn.Embedding | nn.EmbeddingBag):
        return "embedding"
    before, after = parameters_below(narrow, path), parameters_below(wide, path)
    matrices = [(shape, after[key]) for key, shape in before.items() if len(shape) > 1]
    if not matrices:
        return "norm" if "norm" in narrow.kinds[path].__name__.lower() else "vector"
    sides = max(sum(a != b for a, b in zip(*pair, strict=True)) for pair in matrices)
    if sides == 1:
        return "input" if grows else "readout"
    return "hidden" if sides else "fixed"


def parameters_below(outline: Outline, path: str) -> Shapes:
    """Return the shapes of the parameters of a module and of the modules in it."""
    return {
        f"{place}.{key}".removeprefix(path): shape
        for place, shapes in outline.shapes.items()
        if place == path or place.startswith(f"{path}.")
        for key, shape in shapes.items()
    }
