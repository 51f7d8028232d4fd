"""The rules: which exponents µP, CompleteP and depth-µP allow, and when a module breaks them.

Width is the same in all three (Yang et al. 2022, arXiv:2203.03466, table 8 and appendix D.1):
outputs and their changes do not depend on width.  At the start the logits of attention and of the
model may be sums of random signs, which fall as width^(-1/2).

Depth (Dey et al. 2025, arXiv:2505.01618; Yang et al. 2023, arXiv:2310.02244): branches are
multiplied by depth^-a.  The change of a matrix in a layer, relative to its size, goes as
depth^(a-1); outside of layers it does not depend on depth.  a is 1 in CompleteP and 1/2 in
depth-µP.
"""

import math
from typing import NamedTuple

RULES = {"mup": "µP", "completep": "CompleteP", "depth-mup": "depth-µP"}
BRANCH: dict[str, float | None] = {"mup": None, "completep": 1.0, "depth-mup": 0.5}
"""The exponent a of the multiplier depth^-a of branches."""
TOLERANCE = 0.25  # half of the least distance between a right and a wrong exponent, 1/2

Range = tuple[float, float]
FLAT: Range = (0.0, 0.0)
HALF: Range = (-0.5, -0.5)
MAY_FALL: Range = (-0.5, 0.0)
"""Of sums whose terms have random signs: a narrow model, or many tokens in a batch, has both."""


class Module(NamedTuple):
    """A module, as the rules see it.

    kind: hidden, input, embedding, readout, fixed, norm or vector for parameters; softmax, input of
        a layer, logits or block without.
    inside: whether it belongs to a layer.
    is_final: whether it gives the output of the model, with all multipliers.
    grows: whether the number of its outputs grows with width.
    starts_at_zero: whether its output is 0 before training.
    """

    name: str
    kind: str
    inside: bool = False
    is_final: bool = False
    grows: bool = True
    starts_at_zero: bool = False


def allowed(rule: str, over: str, quantity: str, module: Module) -> Range | None:
    """Return the least and the greatest allowed exponent; None if the rule has none.

    quantity: size, change, own, branch, or `relative`, own over size.
    """
    if over == "width":
        return allowed_in_width(quantity, module)
    a = BRANCH[rule]
    return None if a is None else allowed_in_depth(a, quantity, module)


def allowed_in_width(quantity: str, module: Module) -> Range | None:
    """Return the allowed exponents in width.

    A multiplier may stand behind the module of an embedding or of the last matrix.  Their change is
    therefore compared with their size; the stream and the model's output show the multiplier.
    """
    is_scaled_later = module.kind in ("embedding", "input")
    is_readout = module.kind == "readout" and not module.is_final
    match quantity:
        case "size" if module.kind == "softmax":
            return MAY_FALL if module.grows else HALF
        case "size" if not is_scaled_later and not is_readout:
            return FLAT if module.grows else MAY_FALL
        case "change" if not is_readout:
            return MAY_FALL
        case "relative" if is_scaled_later:
            return FLAT
        case "relative" if is_readout:
            return (0.0, 0.5)
        case "own" if module.kind == "hidden" or (module.kind == "readout" and module.is_final):
            return MAY_FALL
        case "own" if not is_readout and (not is_scaled_later or module.starts_at_zero):
            return FLAT
    return None


def allowed_in_depth(a: float, quantity: str, module: Module) -> Range | None:
    """Return the allowed exponents in depth for branches of depth^-a.

    A size may have the multiplier of its branch, which may stand inside of a module.
    """
    match quantity:
        case "size":
            return (-a, 0.0)
        case "change":
            return (-1.0, 0.0)
        case "branch":
            return (-a, -a)
        case "relative":
            return (a - 1, a - 1) if module.inside else FLAT
        case "own" if module.starts_at_zero:
            return (-1.0, a - 1) if module.inside else FLAT
    return None


def verdict(low: float, high: float, range_: Range | None, tolerance: float) -> str:
    """Return `grows` or `falls` for an interval wholly outside of the range and the tolerance.

    Else `holds` for one wholly inside, `undecided` for one across an end, '' without a rule.
    """
    if range_ is None:
        return ""
    if math.isnan(low):
        return "undecided"
    least, most = range_[0] - tolerance, range_[1] + tolerance
    if low > most:
        return "grows"
    if high < least:
        return "falls"
    return "holds" if least <= low and high <= most else "undecided"
