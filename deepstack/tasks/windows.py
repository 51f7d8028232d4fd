"""Windows of a text or of files of tokens, and the batches that are drawn from them."""

import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, Field

from deepstack.base.errors import ConfigError, ResourceError
from deepstack.config import Family
from deepstack.tasks.files import refusal
from deepstack.tasks.task import IGNORE, Batch, choose_positions

Floats = NDArray[np.float64]
Tokens = NDArray[Any]
Draw = Callable[[np.random.Generator, int, bool], Batch]

AT_ONCE = 2**20  # tokens that are counted at a time, as int64
MOST_VOCABULARY = 2**22


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
HeldOut = Annotated[
    float,
    Field(ge=1e-6, le=0.99, description="share of the data, its end, kept for validation"),
]


class Part(NamedTuple):
    """All tokens of a file, or the tokens of one batch of rows of a data set.

    file, state, mapping: of a mapped file; None for tokens in memory.
    sizes: of tokens made of text, the bytes of that text as UTF-8 from each token to the next one,
        (tokens,).
    """

    tokens: Tokens
    file: Path | None = None
    state: os.stat_result | None = None
    mapping: mmap.mmap | None = None
    sizes: NDArray[np.int64] | None = None

    def piece(self, which: slice) -> "Part":
        """Return the part with some of its tokens."""
        sizes = None if self.sizes is None else self.sizes[which]
        return self._replace(tokens=self.tokens[which], sizes=sizes)

    def release(self) -> None:
        """Let the system take the memory of a mapped file back; it is read again when needed."""
        if self.mapping is not None:
            self.mapping.madvise(mmap.MADV_DONTNEED)

    def refuse_changed(self) -> None:
        """Raise ResourceError if the file has been written to since it was mapped.

        A mapped file that became shorter would otherwise end the process.  A file that was removed
        or replaced by another stays mapped as it was.
        """
        if self.file is None or self.state is None or not self.file.exists():
            return
        now, then = self.file.stat(), self.state
        # A user can put back the time of the last write, but not the time of the last change.
        changed = (now.st_size, now.st_ctime_ns) != (then.st_size, then.st_ctime_ns)
        if changed and os.path.samestat(now, then):
            raise ResourceError(
                f"{self.file} was written to while a run read it, or its name or permissions "
                "changed; the same command goes on if its content is as before"
            )


class Windows:
    """All windows of `length` tokens that lie within one of the parts, equally likely."""

    def __init__(self, parts: Sequence[Part], length: int) -> None:
        self.parts, self.length = parts, length
        counts = [max(0, len(part.tokens) - length + 1) for part in parts]
        self.begins = np.cumsum([0, *counts])  # the numbers of the parts' first windows

    def draw(self, random: np.random.Generator, count: int) -> NDArray[np.int64]:
        """Return `count` windows, (count, length)."""
        numbers = random.integers(self.begins[-1], size=count)
        indices = np.searchsorted(self.begins, numbers, side="right") - 1
        read = [self.parts[i] for i in np.unique(indices)]
        for part in read:
            part.refuse_changed()
        tokens = np.empty((count, self.length), dtype=np.int64)
        for row, i, start in zip(tokens, indices, numbers - self.begins[indices], strict=True):
            row[:] = self.parts[i].tokens[start : start + self.length]
        for part in read:  # half of a window may be new
            part.refuse_changed()
        return tokens


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

    def draw_function(self, vocabulary: int, train: Sequence[Part], held: Sequence[Part]) -> Draw:
        """Return the `draw` of a task on tokens 0..vocabulary-1; [MASK] = vocabulary.

        Raises ConfigError if the training or the held-out parts hold no window.
        """
        for side, parts in (("training", train), ("held-out", held)):
            longest = max((len(part.tokens) for part in parts), default=0)
            if longest < self.window:
                raise refusal(
                    f"the {side} part is too short: its longest file has {longest:,} tokens; with "
                    f"seq_len {self.seq_len} one needs {self.window:,}"
                )
        sides = [Windows(train, self.window), Windows(held, self.window)]
        show_mask, _, show_own = self.mask_split
        count = max(1, round(self.mask_rate * self.seq_len))

        def draw(random: np.random.Generator, batch_size: int, held_out: bool) -> Batch:
            tokens = sides[held_out].draw(random, batch_size)
            if self.family == "decoder":
                return Batch(tokens[:, :-1], tokens[:, 1:], np.ones_like(tokens[:, 1:], dtype=bool))
            if self.family == "encoder_decoder":
                return infilling(random, tokens, self.spans, self.span, vocabulary)
            predicted = choose_positions(random, batch_size, self.seq_len, count)
            fate = random.random(tokens.shape)
            noise = random.integers(0, vocabulary, tokens.shape)
            masked = predicted & (fate < show_mask)
            changed = predicted & (fate >= show_mask) & (fate < 1 - show_own)
            inputs = np.where(changed, noise, tokens)
            inputs[masked] = vocabulary
            return Batch(inputs, np.where(predicted, tokens, IGNORE), masked)

        return draw


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


def split(parts: Sequence[Part], held_out: float) -> tuple[list[Part], list[Part]]:
    """Return the parts for training (the first tokens) and for evaluation (the last ones).

    held_out: the share of all tokens that evaluations use.
    """
    total = sum(len(part.tokens) for part in parts)
    left = total - int(held_out * total)  # for training
    train, held = [], []
    for part in parts:
        cut = min(left, len(part.tokens))
        left -= cut
        if cut:
            train.append(part.piece(slice(cut)))
        if cut < len(part.tokens):
            held.append(part.piece(slice(cut, None)))
    return train, held


def count_tokens(parts: Sequence[Part]) -> NDArray[np.int64]:
    """Return how often each token occurs, up to the largest, in little memory.

    Raises ConfigError for tokens that are negative or too large for a vocabulary.
    """
    counts = np.zeros(0, dtype=np.int64)
    for part in parts:
        for i in range(0, len(part.tokens), AT_ONCE):
            piece = part.tokens[i : i + AT_ONCE]
            for token in (int(piece.min()), int(piece.max())):
                if not 0 <= token < MOST_VOCABULARY:
                    where = f" in {part.file}" if part.file else ""
                    raise refusal(
                        f"found token {token}{where}; allowed 0 to {MOST_VOCABULARY - 1:,}: is it "
                        "of another layout?"
                    )
            size = max(len(counts), int(piece.max()) + 1)
            counts = padded(counts, size) + np.bincount(piece.astype(np.int64), minlength=size)
            part.release()
    return counts


def padded(counts: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """Return the counts, and zeros for tokens that never occur, (size,)."""
    return np.pad(counts, (0, size - len(counts)))


def smoothed(counts: NDArray[np.int64]) -> Floats:
    """Return p(t) = (count(t) + 1) / (number of tokens + vocabulary), (vocabulary,)."""
    return (counts + 1) / (counts.sum() + len(counts))
