"""The usual cause of a broken rule, from the kind of the module and the quantity that breaks it."""

from collections.abc import Mapping, Sequence
from statistics import median

from deepstack.tools.coordinates.exponent_fits import Exponent
from deepstack.tools.coordinates.rules import BRANCH, Module

SOME = 0.25  # an exponent that is not 0
FEW = 4  # modules that change together
TWICE = 0.5  # the exponent by which the output grows beyond the modules before it

OUTPUT = "output multiplier"
RATE = "learning rate of a hidden matrix"
READOUT_RATE = "learning rate of the output matrix"
ATTENTION = "attention scale"
EMBEDDING_RATE = "learning rate of the embedding"
EMBEDDING_SCALE = "scale of the embedding"
INPUT_RATE = "learning rate of the input layer"
INPUT_SCALE = "scale of the input layer"
GAIN = "learning rate of norm gains"
VECTOR = "learning rate of a vector"
RESIDUAL = "residual multiplier"
INITIAL = "initial scale"
EVERY_RATE = "learning rate of every parameter"
OTHER = "a multiplier or a parameter outside of the measured modules"

AT_START = (INITIAL, EMBEDDING_SCALE, INPUT_SCALE)
"""Causes before training that the ratio of a step to the start shows."""

REMEDIES = {
    OUTPUT: "multiply the logits by base width / width; without a multiplier, start and rate of "
    "the output matrix go as 1/width",
    RATE: "Adam's rate of a matrix whose sides both grow goes as 1/width; SGD's is constant",
    READOUT_RATE: "with logits multiplied by 1/width, Adam's rate of the matrix is constant; "
    "SGD's grows as width",
    ATTENTION: "divide q·k by the width of a head, not by its root",
    EMBEDDING_RATE: "Adam's rate of an embedding does not depend on width or depth; SGD's grows as "
    "width",
    EMBEDDING_SCALE: "the start of an embedding, times its multiplier, does not depend on width",
    INPUT_RATE: "Adam's rate of the first matrix does not depend on width or depth; SGD's grows as "
    "width",
    INPUT_SCALE: "the start of the first matrix does not depend on width",
    GAIN: "Adam's rate of gains does not depend on width; SGD's grows as width",
    VECTOR: "Adam's rate of a bias or a gain does not depend on width; SGD's grows as width",
    INITIAL: "start a matrix with a deviation of 1/√(inputs), with no factor of depth",
    EVERY_RATE: "the steps of all modules grow or fall together; look for one factor of all rates",
    OTHER: "look at what the model does between this module and the one before",
}


def cause_of(
    found: Sequence[Exponent], modules: Mapping[str, Module], rows: Sequence[Exponent]
) -> str:
    """Return the usual cause of the rows that break a rule in one module.

    modules: by name.
    rows: all exponents of the check.
    """
    row, module = found[0], modules[found[0].module]
    if row.step > 0 and (common := common_cause(row, modules, rows)):
        return common
    if row.over == "width":
        return cause_in_width(row, module, rows)
    return cause_in_depth(row, module, rows)


def common_cause(
    row: Exponent, modules: Mapping[str, Module], rows: Sequence[Exponent]
) -> str | None:
    """Return the cause of steps that grow or fall together in all modules, or None.

    Gradients without the output multiplier grow with width.  Optimizers that keep the size of
    gradients pass this on to all steps; the output then grows twice.
    """
    steps = [one for one in rows if one[1:4:2] == (row.over, row.step) and one.verdict]
    own = [one for one in steps if one.quantity in ("own", "relative")]
    before = [one for one in own if modules[one.module].kind != "readout"]
    if len(before) < FEW or {one.verdict for one in before} != {row.verdict}:
        return None
    of_output = [one for one in steps if modules[one.module].is_final]
    is_twice = row.over == "width" and grows_twice(of_output, before)
    return OUTPUT if row.verdict == "grows" and is_twice else EVERY_RATE


def grows_twice(of_output: Sequence[Exponent], before: Sequence[Exponent]) -> bool:
    """Return whether the steps of the output grow faster than those of the modules before it."""
    ends = [one.exponent or 0.0 for one in of_output if one.quantity in ("own", "change")]
    typical = median(one.exponent or 0.0 for one in before)
    return bool(ends) and max(ends) - typical > TWICE


def cause_in_width(row: Exponent, module: Module, rows: Sequence[Exponent]) -> str:
    """Return the usual cause of a break in width."""
    size = exponent_of(rows, module, "width", "size")
    if module.kind == "softmax":
        return ATTENTION
    if module.is_final or module.kind in ("readout", "logits"):
        is_rate = row.quantity == "relative" or (row.quantity == "own" and row.verdict == "falls")
        return READOUT_RATE if is_rate else OUTPUT
    if module.kind in ("embedding", "input"):
        is_scale = row.quantity == "size" or (size is not None and abs(size) > SOME)
        if module.kind == "input":
            return INPUT_SCALE if is_scale else INPUT_RATE
        return EMBEDDING_SCALE if is_scale else EMBEDDING_RATE
    if module.kind == "input of a layer" and "first" in module.name:
        return EMBEDDING_SCALE if row.quantity == "size" else EMBEDDING_RATE
    if row.quantity == "size":
        return INITIAL if module.kind in ("hidden", "fixed") else OTHER
    if row.quantity == "own":
        return {"norm": GAIN, "vector": VECTOR}.get(module.kind, RATE)
    return OTHER


def cause_in_depth(row: Exponent, module: Module, rows: Sequence[Exponent]) -> str:
    """Return the usual cause of a break in depth."""
    size = exponent_of(rows, module, "depth", "size")
    if row.quantity in ("relative", "own"):
        if module.kind == "norm":
            return GAIN
        if module.kind in ("embedding", "input"):
            return EMBEDDING_RATE if module.kind == "embedding" else INPUT_RATE
        if row.quantity == "relative" and size is not None and size < -SOME:
            return INITIAL
        if module.kind == "vector":
            return VECTOR
        return RATE if module.inside else READOUT_RATE
    if row.quantity == "size" and module.kind in ("hidden", "fixed"):
        return INITIAL
    return RESIDUAL


def exponent_of(rows: Sequence[Exponent], module: Module, over: str, quantity: str) -> float | None:
    """Return the exponent of a module's quantity at its first step, or None."""
    place = module.name, over, quantity
    return next((row.exponent for row in rows if row[:3] == place), None)


def remedy(cause: str, rule: str, over: str) -> str:
    """Return a sentence on what the rule asks for."""
    a = BRANCH[rule]
    if over == "width" or a is None:
        return REMEDIES[cause]
    power = {1.0: "1/depth", 0.5: "1/√depth"}[a]
    rate = "does not depend on depth" if a == 1 else "goes as 1/√depth, in layers"
    return {
        RESIDUAL: f"multiply every branch by {power}",
        RATE: f"Adam's rate of a matrix in a layer {rate}",
        GAIN: f"Adam's rate of gains {rate}",
        VECTOR: f"Adam's rate of a bias or a gain {rate}",
        READOUT_RATE: "outside of layers no rate depends on depth",
    }.get(cause, REMEDIES.get(cause, ""))
