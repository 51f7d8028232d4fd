"""Parts of a text or of files of tokens, and the counts of their tokens."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from deepstack.base.errors import ResourceError
from deepstack.tasks.files import refusal

Tokens = NDArray[Any]

AT_ONCE = 2**20  # tokens that are counted at a time, as int64
MOST_VOCABULARY = 2**22


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

    def piece(self, which: slice) -> Part:
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
