"""Other equations of a sublayer, as faults write them: with the norm or a constant elsewhere."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from deepstack.tools.conform.reference import Reference

Change = Callable[..., Tensor]
"""(residual, x, G, norms, layer, N) -> the new stream."""

CONSTANTS: dict[str, Callable[[int, int], float]] = {
    "1/sqrt(l)": lambda layer, N: layer**-0.5,
    "1/sqrt(2l)": lambda layer, N: (2 * layer) ** -0.5,
    "1/sqrt(N)": lambda layer, N: N**-0.5,
    "1/sqrt(2N)": lambda layer, N: (2 * N) ** -0.5,
    "1/N": lambda layer, N: 1 / N,
    "1/l": lambda layer, N: 1 / layer,
    "2": lambda layer, N: 2.0,
}

WITHOUT: dict[str, Callable[[Tensor, Any, Any], Tensor]] = {
    "x <- LN(x + G(x))": lambda x, G, n: n(x + G(x)),
    "x <- x + G(LN(x))": lambda x, G, n: x + G(n(x)),
    "x <- x + LN(G(x))": lambda x, G, n: x + n(G(x)),
    "x <- LN(x) + G(LN(x))": lambda x, G, n: (z := n(x)) + G(z),
    "x <- LN(x) + G(x)": lambda x, G, n: n(x) + G(x),
    "x <- x + G(x)": lambda x, G, n: x + G(x),
    "x <- LN(x + G(LN(x)))": lambda x, G, n: n(x + G(n(x))),
    "x <- x + LN(G(LN(x)))": lambda x, G, n: x + n(G(n(x))),
    "x <- G(LN(x))": lambda x, G, n: G(n(x)),
    "x <- LN(G(x))": lambda x, G, n: n(G(x)),
}

WITH: dict[str, Callable[[Tensor, Any, Any, float], Tensor]] = {
    "x <- LN({c} x + G(x))": lambda x, G, n, c: n(c * x + G(x)),
    "x <- LN(x + {c} G(x))": lambda x, G, n, c: n(x + c * G(x)),
    "x <- LN(x + G({c} x))": lambda x, G, n, c: n(x + G(c * x)),
    "x <- {c} LN(x + G(x))": lambda x, G, n, c: c * n(x + G(x)),
    "x <- {c} x + LN(G(x))": lambda x, G, n, c: c * x + n(G(x)),
    "x <- {c} x + G(LN(x))": lambda x, G, n, c: c * x + G(n(x)),
    "x <- x + {c} G(LN(x))": lambda x, G, n, c: x + c * G(n(x)),
    "x <- x + G({c} LN(x))": lambda x, G, n, c: x + G(c * n(x)),
    "x <- x + G(LN({c} x))": lambda x, G, n, c: x + G(n(c * x)),
    "x <- {c} (x + G(LN(x)))": lambda x, G, n, c: c * (x + G(n(x))),
    "x <- {c} x + LN(x + G(x))": lambda x, G, n, c: c * x + n(x + G(x)),
    "x <- x + {c} G(x)": lambda x, G, n, c: x + c * G(x),
}

TWO: dict[str, Callable[[Tensor, Any, Any, Any], Tensor]] = {
    "x <- LN(x + G(LN(x)))": lambda x, G, n, m: m(x + G(n(x))),
    "x <- x + LN(G(LN(x)))": lambda x, G, n, m: x + m(G(n(x))),
    "x <- LN(x) + LN(G(LN(x)))": lambda x, G, n, m: (z := n(x)) + m(G(z)),
}


def equations(reference: Reference) -> Iterator[tuple[str, Change]]:
    """Yield other equations with the reference's norms, and the text of each."""
    alpha = reference.scheme.alpha
    count = reference.scheme.scheme_class.norms_per_sublayer
    constants = dict(CONSTANTS)
    if alpha is not None:
        constants = {
            "alpha": lambda layer, N: alpha,
            "1/alpha": lambda layer, N: 1 / alpha,
        } | constants
    if count == 1:
        for text, one in WITHOUT.items():
            yield text, lambda residual, x, G, norms, layer, N, f=one: f(x, G, norms[0])
        for text, other in WITH.items():
            for words, constant in constants.items():
                yield (
                    text.replace("{c}", words),
                    lambda residual, x, G, norms, layer, N, f=other, c=constant: f(
                        x, G, norms[0], c(layer, N)
                    ),
                )
    if count == 2:
        for text, both in TWO.items():
            yield text, lambda residual, x, G, norms, layer, N, f=both: f(x, G, *norms)
    for words, constant in constants.items():
        yield (
            f"x <- {words} (equation of the scheme)",
            lambda residual, x, G, norms, layer, N, c=constant: (
                c(layer, N) * residual(x, G, *norms)
            ),
        )
        yield (
            f"the scheme's equation with {words} G",
            lambda residual, x, G, norms, layer, N, c=constant: residual(
                x, lambda z: c(layer, N) * G(z), *norms
            ),
        )
