"""Chance: the best prediction without context, which sees only the token shown at its position."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


def smoothed(counts: NDArray[np.int64]) -> Floats:
    """Return p(t) = (count(t) + 1) / (number of tokens + vocabulary), (vocabulary,)."""
    return (counts + 1) / (counts.sum() + len(counts))


def given_shown(p: Floats, mask_split: Sequence[float]) -> Callable[[Integers, Integers], Floats]:
    """Return the function (s, b) -> P(b | s) of a predicted position that shows token s.

    _, r, k = mask_split.  Such a position shows a token drawn uniformly from all V (which may be
    its own) with the weight r, and its own with the weight k.  By Bayes' rule

        P(b|s) = p(b) (r/V + k [s = b]) / (r/V + k p(s)).

    p: the frequencies of the training text, (V,).  The token [MASK], V, is independent of b: there
        P(b|[MASK]) = p(b).
    """
    _, r, k = mask_split

    def probability(shown: Integers, true: Integers) -> Floats:
        is_mask = shown == len(p)
        s = np.where(is_mask, 0, shown)
        weight = p[true] * (r / len(p) + k * (s == true))
        total = r / len(p) + k * p[s]
        return np.where(is_mask, p[true], weight / np.where(total > 0, total, 1.0))

    return probability
