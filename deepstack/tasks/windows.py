"""Windows of a text or of files of tokens, and the batches that are drawn from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, Field

from deepstack.base.errors import ConfigError
from deepstack.config import Family
from deepstack.tasks.files import refusal
from deepstack.tasks.held_out import Split
from deepstack.tasks.parts import Part
from deepstack.tasks.task import IGNORE, Batch, choose_positions

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


def _sums_to_one(shares: Sequence[float]) -> Sequence[float]:
    if abs(sum(shares) - 1) > 1e-6:
        raise ValueError("the three shares must sum to 1")
    return shares


MaskRate = Annotated[
    float, Field(gt=0, le=1, description="share of the positions that are predicted")
]
MaskSplit = Annotated[
    Sequence[Annotated[float, Field(ge=0, le=1)]],
    Field(
        min_length=3,
        max_length=3,
        description="shares of the predicted positions that show [MASK], a random token, the token",
    ),
    AfterValidator(_sums_to_one),
]
Span = Annotated[
    int, Field(ge=1, le=1024, description="encoder_decoder: tokens that one [MASK] replaces")
]
GOLDEN = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio


class Windows:
    """All windows of `length` tokens that lie within one of the parts, equally likely.

    blocks: the number of the block of each part; by default each part is a block.
    """

    def __init__(
        self, parts: Sequence[Part], length: int, blocks: Sequence[int] | None = None
    ) -> None:
        self.parts, self.length = parts, length
        self.blocks = np.arange(len(parts)) if blocks is None else np.array(blocks, dtype=np.int64)
        counts = [max(0, len(part.tokens) - length + 1) for part in parts]
        self.begins = np.cumsum([0, *counts])  # the numbers of the parts' first windows

    def draw(self, random: np.random.Generator, count: int) -> NDArray[np.int64]:
        """Return `count` windows, (count, length)."""
        return self._read(random.integers(self.begins[-1], size=count))[0]

    def read_evenly(self, first: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the windows number `first` … of a fixed order, and the block of each.

        Window j is the one at the fraction j/φ mod 1 of all, φ the golden ratio: the first n are
        spread evenly over the parts, for every n.  Returns (count, length) and (count,).
        """
        total = int(self.begins[-1])
        numbers = [(j * GOLDEN % 2**64) * total >> 64 for j in range(first, first + count)]
        return self._read(np.array(numbers, dtype=np.int64))

    def _read(self, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the windows with these numbers, and the block of each."""
        indices = np.searchsorted(self.begins, numbers, side="right") - 1
        read = [self.parts[i] for i in np.unique(indices)]
        for part in read:
            part.refuse_changed()
        tokens = np.empty((len(numbers), self.length), dtype=np.int64)
        for row, i, start in zip(tokens, indices, numbers - self.begins[indices], strict=True):
            row[:] = self.parts[i].tokens[start : start + self.length]
        for part in read:  # half of a window may be new
            part.refuse_changed()
        return tokens, self.blocks[indices]


@dataclass(frozen=True)
class Reader:
    """The way in which windows of tokens become sequences of `seq_len` and their targets.

    An encoder predicts masked tokens, a decoder each next token, an encoder-decoder spans.
    Raises ConfigError for spans that leave no token between two of them.
    """

    family: Family
    seq_len: int
    mask_rate: float
    mask_split: Sequence[float]
    span: int

    def __post_init__(self) -> None:
        most = self.seq_len // max(2, self.span)
        if self.family == "encoder_decoder" and self.spans > most:
            raise ConfigError(
                f"task.span: found {self.span}, and mask_rate {self.mask_rate:g} asks for "
                f"{self.spans} spans of it in {self.seq_len} tokens, which hold {most}: lower one "
                "of the two",
                key="task.span",
            )

    @property
    def spans(self) -> int:
        """The number of spans in an encoder-decoder's window."""
        return max(1, round(self.mask_rate * self.seq_len / self.span))

    @property
    def window(self) -> int:
        """The number of tokens of a window from which one sequence is made."""
        more = {"encoder": 0, "decoder": 1, "encoder_decoder": self.spans * (self.span - 1)}
        return self.seq_len + more[self.family]

    def source(self, vocabulary: int, split: Split) -> Source:
        """Return the batches of a task on tokens 0..vocabulary-1; [MASK] = vocabulary.

        Raises ConfigError if the training or the held-out parts hold no window.
        """
        for side, parts in (("training", split.train), ("held-out", split.held)):
            longest = max((len(part.tokens) for part in parts), default=0)
            if longest < self.window:
                raise refusal(
                    f"the {side} part is too short: its longest piece has {longest:,} tokens; with "
                    f"seq_len {self.seq_len} one needs {self.window:,}"
                )
        held = Windows(split.held, self.window, split.blocks)
        return Source(self, vocabulary, Windows(split.train, self.window), held)

    def batch_of(
        self, random: np.random.Generator, tokens: NDArray[np.int64], vocabulary: int
    ) -> Batch:
        """Return the batch of these windows, (batch, window), whose positions `random` chooses."""
        if self.family == "decoder":
            return Batch(tokens[:, :-1], tokens[:, 1:], np.ones_like(tokens[:, 1:], dtype=bool))
        if self.family == "encoder_decoder":
            return infilling(random, tokens, self.spans, self.span, vocabulary)
        show_mask, _, show_own = self.mask_split
        count = max(1, round(self.mask_rate * self.seq_len))
        predicted = choose_positions(random, len(tokens), self.seq_len, count)
        fate = random.random(tokens.shape)
        noise = random.integers(0, vocabulary, tokens.shape)
        masked = predicted & (fate < show_mask)
        changed = predicted & (fate >= show_mask) & (fate < 1 - show_own)
        inputs = np.where(changed, noise, tokens)
        inputs[masked] = vocabulary
        return Batch(inputs, np.where(predicted, tokens, IGNORE), masked)


@dataclass(frozen=True, eq=False)
class Source:
    """The batches of a text: `draw` and `draw_validation` of its task (see `Task`)."""

    reader: Reader
    vocabulary: int
    train: Windows
    held: Windows

    def draw(self, random: np.random.Generator, batch_size: int, held_out: bool) -> Batch:
        """Return a batch of random windows."""
        tokens = (self.held if held_out else self.train).draw(random, batch_size)
        return self.reader.batch_of(random, tokens, self.vocabulary)

    def draw_validation(
        self, random: np.random.Generator, first: int, count: int
    ) -> tuple[Batch, NDArray[np.int64]]:
        """Return sequences of the validation set, from number `first` on, and their blocks."""
        tokens, blocks = self.held.read_evenly(first, count)
        return self.reader.batch_of(random, tokens, self.vocabulary), blocks


def infilling(
    random: np.random.Generator, tokens: NDArray[np.int64], spans: int, span: int, mask: int
) -> Batch:
    """Cut `spans` spans of `span` tokens out of each window, which become the target.

    tokens: (batch, window). The source has window - spans (span - 1) tokens, of which `spans` are
        [MASK]s that do not touch; the target has spans * span. Every such choice is equally likely.
    """
    batch_size, window = tokens.shape
    # Each span lies in its own gap between the tokens that stay: before one of them, or at the end.
    chosen = choose_positions(random, batch_size, window - spans * span + 1, spans)
    gaps = np.nonzero(chosen)[1].reshape(batch_size, spans)
    begins = gaps + span * np.arange(spans)
    at = begins[:, :, None] + np.arange(span)
    target = np.take_along_axis(tokens, at.reshape(batch_size, -1), axis=1)
    masked, is_source = tokens.copy(), np.ones(tokens.shape, dtype=bool)
    np.put_along_axis(masked, begins, mask, axis=1)
    np.put_along_axis(is_source, at[:, :, 1:].reshape(batch_size, -1), False, axis=1)
    source = masked[is_source].reshape(batch_size, -1)
    shifted = np.roll(target, 1, axis=1)
    shifted[:, ::span] = mask  # where a span begins
    return Batch(np.hstack([source, shifted]), target, np.ones(target.shape, dtype=bool))
