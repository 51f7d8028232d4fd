"""The likely cause of a difference: the fault that gives the block's numbers, digit by digit.

Each hypothesis is the reference with one fault.  Some have a constant, which is fitted.  The first
whose F equals the block's within the tolerance is the cause; simple faults come first.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from deepstack.schemes import NORMS, SCHEMES, hyper_connections
from deepstack.tools.conform import mutations as change
from deepstack.tools.conform.equations import equations
from deepstack.tools.conform.hypothesis import STARTS, Hypothesis, inside_of, scopes
from deepstack.tools.conform.reference import Reference, place, scheme_place
from deepstack.tools.conform.sublayer_causes import inside, layouts

EPSILONS = (1e-12, 1e-8, 1e-6, 1e-5, 1e-3, 0.0)


def hypotheses(reference: Reference) -> Iterator[Hypothesis]:
    """Yield the faults that a block may have, simple ones first."""
    yield from coefficients(reference)
    yield from missing_norms(reference)
    yield from norm_formulas(reference)
    yield from inside(reference)
    yield from layouts(reference)
    yield from mixing(reference)
    yield from wirings(reference)
    yield from depths(reference)


def coefficients(reference: Reference) -> Iterator[Hypothesis]:
    """Yield another coefficient of the stream, of the branch, or of the branch's input."""
    line = scheme_place(reference, "alpha", "setup", "residual", "layer")
    own = scheme_place(reference, "residual", "layer")
    run = partial(inside_of, reference)

    def same(z: Tensor) -> Tensor:
        return z

    for words, chosen in scopes(reference):

        def skip(c: float, chosen: Any = chosen) -> Any:
            return change.residuals(reference, chosen, change.scaled_skip(c))

        def after(c: float, chosen: Any = chosen) -> Any:
            return change.branches(reference, chosen, same, lambda y: c * y)

        def before(c: float, chosen: Any = chosen) -> Any:
            return change.branches(reference, chosen, lambda z: c * z, same)

        yield Hypothesis(
            f"skip{words}", f"the residual stream{words} is multiplied by {{c}}", line,
            run(skip), STARTS,
        )  # fmt: skip
        yield Hypothesis(
            f"branch{words}", f"the branch{words} is multiplied by {{c}}", own, run(after), STARTS
        )
        yield Hypothesis(
            f"branch input{words}", f"the sublayer's input{words} is multiplied by {{c}}", own,
            run(before), STARTS,
        )  # fmt: skip


def norm_groups(reference: Reference) -> Iterator[tuple[str, list[Any]]]:
    """Yield norms by name over all layers, all norms beside sublayers, and one layer's."""
    names = dict.fromkeys(name for name, _ in reference.norms)
    for name in names:
        yield name, [key for key in reference.norms if key[0] == name]
    beside = [key for key in reference.norms if key[1] and "_norm" in key[0]]
    if len({name for name, _ in beside}) > 1:
        yield "all norms of sublayers", beside
    if reference.depth > 1:
        for number, words in ((reference.depth, "last"), (1, "first")):
            for name in names:
                if (name, number) in reference.norms:
                    yield f"{name} of the {words} layer", [(name, number)]


def missing_norms(reference: Reference) -> Iterator[Hypothesis]:
    """Yield a norm left out, and one too many at either end."""
    for name, keys in norm_groups(reference):
        outside = keys[0][1] == 0
        line = (
            place(
                type(reference.stack).leave if "entry" not in name else type(reference.stack).enter
            )
            if outside
            else scheme_place(reference, "residual", "layer", "setup")
        )

        def without(c: float, keys: Any = keys) -> Any:
            return change.norms_as(reference, keys, lambda norm, z: z)

        def affine(c: float, keys: Any = keys) -> Any:
            return change.norms_as(reference, keys, change.affine)

        run = partial(inside_of, reference)
        yield Hypothesis(f"no {name}", f"{name} is missing", line, run(without))
        yield Hypothesis(f"no {name}", f"{name} has gain and bias alone", line, run(affine))
    stack = type(reference.stack)
    eps = reference.config.model.norm.eps

    def normed(z: Tensor) -> Tensor:
        return F.layer_norm(z, z.shape[-1:], eps=eps)

    yield Hypothesis(
        "extra final norm", "a norm comes after the last layer that the scheme does not have",
        place(stack.leave), lambda x, c: normed(reference.run(x)),
    )  # fmt: skip
    yield Hypothesis(
        "extra entry norm", "a norm comes before the first layer that the scheme does not have",
        place(stack.enter), lambda x, c: reference.run(normed(x)),
    )  # fmt: skip


def norm_formulas(reference: Reference) -> Iterator[Hypothesis]:
    """Yield another formula of the norms."""
    line = place(NORMS[reference.config.model.norm.kind].forward)
    other = "RMSNorm" if reference.config.model.norm.kind == "layer" else "LayerNorm"
    formulas: list[tuple[str, str, Any]] = [
        ("eps outside the root", "epsilon is added outside the root", change.eps_outside),
        ("unbiased variance", "the variance is the unbiased one", change.unbiased),
        (
            "unbiased deviation", "epsilon is added to the unbiased deviation",
            change.unbiased_outside,
        ),
        (f"{other}", f"the norm is {other}", change.other_kind),
        ("1 + gain", "the gain is 1 + g", change.gain_plus_one),
    ]  # fmt: skip
    formulas += [(f"eps {eps:g}", f"epsilon is {eps:g}", change.other_eps(eps)) for eps in EPSILONS]
    groups = [("", list(reference.norms)), *((f" of {n}", k) for n, k in norm_groups(reference))]
    groups = [(words.replace("of all norms", "of the norms"), keys) for words, keys in groups]
    for words, keys in groups if reference.norms else ():
        for key, text, function in formulas:

            def formula(c: float, keys: Any = keys, function: Any = function) -> Any:
                return change.norms_as(reference, keys, function)

            run = inside_of(reference, formula)
            yield Hypothesis(f"{key}{words}", f"{text}{words}", line, run)


def mixing(reference: Reference) -> Iterator[Hypothesis]:
    """Yield the transposed mixing of streams."""
    if any("connections" in name for name, _ in reference.entries):
        yield Hypothesis(
            "transposed mixing", "the streams are mixed by the transposed matrix A_r",
            place(hyper_connections.mix),
            inside_of(reference, lambda c: change.transposed_mixing()),
        )  # fmt: skip


def wirings(reference: Reference) -> Iterator[Hypothesis]:
    """Yield other equations: written here, and the equations of other schemes."""
    line = scheme_place(reference, "residual", "layer")
    everywhere = next(iter(scopes(reference)))[1]
    for equation, function in equations(reference):

        def other(c: float, function: Any = function) -> Any:
            return change.residuals(reference, everywhere, function)

        run = inside_of(reference, other)
        yield Hypothesis(f"equation {equation}", f"the block computes {equation}", line, run)
    for name in SCHEMES:
        if name != reference.scheme.scheme_class.name:
            text = f"the block computes {name}: {SCHEMES[name].equation}"
            yield Hypothesis(f"scheme {name}", text, line, partial(by_scheme, reference, name))


def by_scheme(reference: Reference, name: str, x: Tensor, c: float) -> Tensor:
    """Return F of another scheme with the reference's values, if it has all of them."""
    settings = {k: v for k, v in reference.given.items() if "scheme_options" not in k}
    other = Reference(name, reference.depth, settings)
    if not reference.pieces.keys() <= other.pieces.keys():
        raise ValueError("other parameters")
    for key in reference.pieces:
        other.assign(key, reference.value(key))
    return other.run(x)


def depths(reference: Reference) -> Iterator[Hypothesis]:
    """Yield coefficients of another depth, or of another layer."""
    N = reference.depth
    line = scheme_place(reference, "alpha", "setup", "residual", "layer")
    for depth, first, words in (
        (N + 1, 1, "the layer counts from 2"),
        (2 * N, 0, "the depth is 2N in place of N"),
        (N + 1, 0, "the depth is N + 1 in place of N"),
        (4 * N, 0, "the depth is 4N in place of N"),
        *((n, 0, f"the depth is {n} in place of N") for n in (6, 12, 24, 32, 96)),
    ):
        if depth >= N + first and depth != N:
            run = partial(by_depth, reference, depth, first)
            yield Hypothesis(f"depth {words}", words, line, run)


def by_depth(reference: Reference, depth: int, first: int, x: Tensor, c: float) -> Tensor:
    """Return F of the layers first + 1 … first + N of a deeper reference, with equal values."""
    name, N = reference.scheme.scheme_class.name, reference.depth
    other = Reference(name, depth, reference.given)
    for key in reference.pieces:
        other.assign((key[0], key[1] + first if key[1] else 0), reference.value(key))
    stream = other.stack.enter(x)
    for layer in list(other.stack.layers)[first : first + N]:
        stream = layer(stream)
    return other.stack.leave(stream)
