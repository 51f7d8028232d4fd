"""The part of a text that is held out for validation: blocks that are spread over all of it.

Texts change along the way: the first chapters, files or topics are unlike the last ones.  So every
tenth block is held out.  There are ten ways to begin; the most representative one is taken.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, inf
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from deepstack.tasks.parts import Part, count_tokens

HeldOut = Annotated[
    float,
    Field(ge=1e-6, le=0.99, description="share of the data kept for validation, in spread blocks"),
]

BLOCK = 4096
"""Tokens of a block of a large text."""
LEAST_BLOCKS, MOST_BLOCKS = 128, 4096
"""Held-out blocks: blocks are shorter in a text with fewer, longer in a text with more.

Losses of neighbouring tokens depend on each other, so many short blocks represent a text better
than few long ones.  On Python's topics (466 kB) the loss of a bigram model has a standard error of
0.065 nats over 11 blocks of 4,096 bytes, of 0.048 over 32 of 1,457, of 0.027 over 128 of 364.
"""
BLOCK_WINDOWS = 4
"""Windows that a block holds at least side by side, so that most windows lie within one."""
LEAST_FILES = 10
"""Held-out files, of which a text must have as many for whole files to be held out."""
CHOICES = 10
"""Ways to begin with the blocks, of which the most representative one is taken."""
MOST_COUNTED = 2**24
"""Tokens of a text up to which the ways are compared; blocks of a larger one are many."""


@dataclass(frozen=True, eq=False)
class Split:
    """Tokens for training and for validation.

    train, held: the parts.  No window crosses from one part into another.
    blocks: the number of the block, or file, of each held-out part.
    record: for meta.json: `by` files, blocks or path; `count`, and `length` of a block in tokens.
    """

    train: list[Part]
    held: list[Part]
    blocks: list[int]
    record: dict[str, Any]


def split(parts: Sequence[Part], file_sizes: Sequence[int], held_out: float, window: int) -> Split:
    """Hold every (1/held_out)-th file out, or the same share of blocks in a text of few files.

    A block has 4,096 tokens.  It is shorter where fewer than 128 blocks would be held out, and
    longer where more than 4,096 would be, but has at least four windows where the text is long
    enough.

    parts: all tokens, in order.
    file_sizes: the tokens of each file, in the same order.
    window: tokens of a window.
    """
    total, count = sum(file_sizes), len(file_sizes)
    share = Fraction(str(held_out))
    rarer = min(share, 1 - share)
    by_files = count * rarer >= LEAST_FILES and total >= count * BLOCK_WINDOWS * window
    if by_files:
        ends = np.cumsum([0, *file_sizes]).tolist()
    else:
        count = max(ceil(1 / rarer), round(total / block_length(float(total * rarer), window)))

    def spans_from(way: int) -> Spans:
        """Return the held-out spans of one way to begin."""
        numbers = held_out_numbers(count, share, Fraction(2 * way + 1, 2 * CHOICES))
        if by_files:
            return [(ends[i], ends[i + 1]) for i in numbers]
        return [(i * total // count, (i + 1) * total // count) for i in numbers]

    ways = range(CHOICES) if total <= MOST_COUNTED else [CHOICES // 2]
    spans = most_representative(parts, [spans_from(way) for way in ways])
    pieces = list(cut(parts, spans))
    train = [part for part, block in pieces if block is None]
    kind = {"by": "files"} if by_files else {"by": "blocks", "length": total // count}
    return Split(train, *with_blocks(pieces), kind | {"count": len(spans)})


Spans = Sequence[tuple[int, int]]
"""Begins and ends in tokens from the start of the first part, in order."""


def most_representative(parts: Sequence[Part], choices: Sequence[Spans]) -> Spans:
    """Return the spans with the least Σ h ln(h/q), h their shares of tokens, q those of the text.

    By so many nats the best constant guess for the spans is better than the text's frequencies.
    """
    if len(choices) == 1:
        return choices[0]
    counts = count_tokens(parts)

    def distance(spans: Spans) -> float:
        held, _ = with_blocks(cut(parts, spans))
        if not held:  # of a text of few tokens
            return inf
        tokens = np.concatenate([part.tokens for part in held])
        h = np.bincount(tokens.astype(np.int64), minlength=len(counts)) / len(tokens)
        there = h > 0
        return float((h[there] * np.log(h[there] / (counts[there] / counts.sum()))).sum())

    return min(choices, key=distance)


def given_split(train: Sequence[Part], held: Sequence[Part], window: int) -> Split:
    """Return the split of a text and another one that is held out, which is cut into blocks."""
    total = sum(len(part.tokens) for part in held)
    count = max(1, int(total / block_length(total, window)))
    spans = [(i * total // count, (i + 1) * total // count) for i in range(count)]
    record = {"by": "path", "count": count, "length": total // count}
    return Split(list(train), *with_blocks(cut(held, spans)), record)


def block_length(held_out: float, window: int) -> float:
    """Return about the tokens of a block of a text of which so many tokens are held out."""
    usual = min(BLOCK, held_out / LEAST_BLOCKS)
    return max(BLOCK_WINDOWS * window, usual, held_out / MOST_BLOCKS)


def with_blocks(pieces: Iterable[tuple[Part, int | None]]) -> tuple[list[Part], list[int]]:
    """Return the pieces that lie in blocks, and the number of each one's block."""
    held = [(part, block) for part, block in pieces if block is not None]
    return [part for part, _ in held], [block for _, block in held]


def held_out_numbers(count: int, share: Fraction, offset: Fraction) -> list[int]:
    """Return the numbers i of `count` files or blocks with floor(share (i + 1) + offset) above
    floor(share i + offset): about one of every 1/share in turn.
    """
    most = int(count * share + offset)
    return [ceil((j - offset) / share) - 1 for j in range(1, most + 1)]


def cut(parts: Sequence[Part], spans: Spans) -> Iterator[tuple[Part, int | None]]:
    """Yield the parts, cut at the ends of spans, each with the number of its span or None."""
    borders = [(position, i) for i, span in enumerate(spans) for position in span]
    next_border, inside = 0, False
    begin = 0  # of the part
    for part in parts:
        start, size = 0, len(part.tokens)
        while next_border < len(borders) and borders[next_border][0] < begin + size:
            position, number = borders[next_border]
            if position - begin > start:
                yield part.piece(slice(start, position - begin)), number if inside else None
            start, inside, next_border = position - begin, not inside, next_border + 1
        if start < size:
            yield part.piece(slice(start, None)), borders[next_border][1] if inside else None
        begin += size
