"""The layouts of raw tokens, and how their bytes tell how wide they were written.

Tokens read in another width look like data.  But ids are below 2^22, so the bytes of wide ones show
zeros, whatever the other bytes are:

| the first 2^17 bytes                                          | tokens of |
|---------------------------------------------------------------|-----------|
| of each eight, the last five are 0                            | 8 bytes   |
| of each four, the last is 0, and the second and third not both | 4 bytes   |
| every second one is 0                                         | 2 bytes   |
| even and odd ones are equally distributed, not uniformly     | 1 byte    |
| even and odd ones are distributed differently                 | 2 bytes   |

Below 4096 pairs of bytes distributions differ by chance.  There tokens of 1 byte are known if none
reaches 128, as in ASCII, and even and odd ones are about equally distributed.
"""

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Layout = Literal["auto", "uint8", "uint16", "uint32", "int32", "int64", "llm.c"]

TYPES = {
    "auto": "<u2", "uint8": "u1", "uint16": "<u2", "uint32": "<u4", "int32": "<i4", "int64": "<i8"
}  # fmt: skip
"""The numpy type of each layout without a header; all are little endian."""
OF_WIDTH = {1: "uint8", 2: "uint16", 4: "uint32", 8: "int64"}
"""The layout that a message names for tokens of so many bytes."""

LOOKED_AT = 2**17
"""Bytes that are looked at."""
LEAST_TOKENS, LEAST_COUNTED, LEAST_SMALL = 8, 4096, 256
"""The least tokens whose zeros count, pairs of bytes whose distributions do, and of a few bytes."""
MOST_DIVERGENCE, MOST_OF_FEW = 0.05, 0.4
"""The divergence up to which two distributions count as equal, also of a few bytes."""


class Width(NamedTuple):
    """The bytes of a token as they were written.

    sign: the pattern of the bytes, in words.
    """

    size: int
    sign: str


def width_of(content: NDArray[np.uint8]) -> Width | None:
    """Return the width of tokens that their first bytes show; None if they show none."""
    some = content[:LOOKED_AT]
    eights, fours = (some[: len(some) // n * n].reshape(-1, n) for n in (8, 4))
    if len(fours) < LEAST_TOKENS or not some.any():
        return None
    if len(eights) >= LEAST_TOKENS and not eights[:, 3:].any():
        return Width(8, "of each eight bytes the last five are 0")
    _, second, third, fourth = (bool(column.any()) for column in fours.T)
    if not fourth and (second or not third):
        return Width(4, "every fourth byte is 0")
    if not second and not fourth:
        return Width(2, "every second byte is 0")
    even, odd = some[0::2], some[1::2]
    if len(odd) < LEAST_SMALL:
        return None
    p, q = (np.bincount(one, minlength=256) / len(one) for one in (even, odd))
    if len(odd) < LEAST_COUNTED:
        is_small = some.max() < 128 and divergence(p, q) < MOST_OF_FEW
        return Width(1, "all bytes are below 128") if is_small else None
    if divergence(p, q) > MOST_DIVERGENCE:
        return Width(2, "even and odd bytes differ")
    # Uniform bytes are uniform tokens of 1 byte as well as of 2.
    if p.all() and divergence(p, np.full(256, 1 / 256)) < MOST_DIVERGENCE:
        return None
    return Width(1, "even and odd bytes are equally distributed")


def divergence(p: NDArray[np.float64], q: NDArray[np.float64]) -> float:
    """Return half the sum of (p - q)² / (p + q): 0 for equal p and q, 1 for disjoint ones."""
    there = p + q > 0
    return float(((p - q)[there] ** 2 / (p + q)[there]).sum() / 2)
