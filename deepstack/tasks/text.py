"""Masked prediction of the bytes of real text: files, a folder, or Python's documentation."""

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
from pydantic import Field

from deepstack.config import Family
from deepstack.tasks.files import (
    Encoding,
    find_files,
    identity,
    refusal,
    refuse_huge,
    refusing,
    text_pieces,
)
from deepstack.tasks.task import Task, task
from deepstack.tasks.windows import (
    Floats,
    HeldOut,
    MaskRate,
    MaskSplit,
    Part,
    Reader,
    Span,
    count_tokens,
    padded,
    smoothed,
    split,
)

BYTES = 256
MASK = BYTES


@task("text")
def text(
    *,
    seq_len: int,
    seed: int,
    family: Family = "encoder",
    path: Annotated[
        str | None,
        Field(
            min_length=1,
            description="a text file, a folder of them or a pattern (books/*.txt); "
            "null: Python's topics",
        ),
    ] = None,
    encoding: Encoding = "utf-8",
    mask_rate: MaskRate = 0.15,
    mask_split: MaskSplit = (0.8, 0.1, 0.1),
    span: Span = 3,
    held_out: HeldOut = 0.1,
) -> Task:
    """P(byte | bytes around it): masked prediction of real English text, byte by byte.

    Tokens are byte values, [MASK] = 256. Of each window of seq_len bytes, drawn uniformly, exactly
    max(1, round(mask_rate seq_len)) positions are predicted; each shows [MASK], a byte drawn
    uniformly from all 256, or its own byte, with the probabilities `mask_split` (BERT,
    arXiv:1810.04805, section 3.1). Validation and probe windows come from the last `held_out` of
    the text, which is never trained on.

    A decoder predicts each next byte; mask_rate and mask_split have no effect. An encoder-decoder
    fills in spans (Raffel et al. 2019, arXiv:1910.10683, section 3.1.4). Of a window,
    max(1, round(mask_rate seq_len / span)) spans of `span` bytes are replaced by one [MASK] each;
    seq_len tokens are left, and no two spans touch. The decoder predicts the bytes of all spans in
    turn. It reads [MASK] where a span begins, else the byte before. mask_split has no effect.

    Without `path` the text is the English reference topics inside every CPython. They differ by
    Python version; the recorded sha256 identifies the text. The references are losses on the
    held-out text without context, in nats. "unigram_entropy" is that on [MASK], the cross-entropy
    under the training text's byte frequencies, add-one smoothed. "context_free_entropy" is that on
    all predicted positions.

    Files are read in their `encoding` and become UTF-8.  Raises ConfigError for a text that is
    missing, unreadable, empty, too short, not in its encoding, or no regular file.
    """
    corpus = read_corpus(path, encoding)
    reader = Reader(family, seq_len, mask_rate, mask_split, span)
    train, held = split([Part(np.frombuffer(corpus.content, dtype=np.uint8))], held_out)
    draw = reader.draw_function(BYTES, train, held)
    frequencies = smoothed(padded(count_tokens(train), BYTES))
    held_counts = padded(count_tokens(held), BYTES)
    held_frequencies = held_counts / held_counts.sum()
    references = {"unigram_entropy": float(-(held_frequencies * np.log(frequencies)).sum())}
    if family == "encoder":
        references["context_free_entropy"] = context_free_entropy(
            frequencies, held_frequencies, mask_split
        )
    return Task(
        name="text",
        vocab_size=BYTES + 1,
        seed=seed,
        draw=draw,
        references=references,
        unigram=frequencies,
        data={
            "name": corpus.name,
            "sha256": corpus.sha256,
            "bytes": len(corpus.content),
            "held_out_bytes": int(held_counts.sum()),
        },
        memory=len(corpus.content),
    )


def context_free_entropy(p: Floats, h: Floats, mask_split: Sequence[float]) -> float:
    """Return L = -m sum_b h(b) ln p(b) - sum_bs h(b) w(s|b) ln q(b|s), w(s|b) = r/256 + k [s = b].

    The expected loss, over predicted positions, of the best predictor that sees only the token
    shown there. m, r, k = mask_split. A predicted position whose true byte is b shows [MASK] with
    probability m and byte s with probability w(s|b): a random byte (which may be b again) or b
    itself. [MASK] is independent of b, so the posterior is the prior p(b). A shown byte s gives,
    by Bayes' rule, q(b|s) = p(b) w(s|b) / sum_c p(c) w(s|c), where the sum is r/256 + k p(s):

        q(s|s) = p(s) (r/256 + k) / (r/256 + k p(s)),   q(b|s) = p(b) (r/256) / (r/256 + k p(s)).

    The predictor knows p, the training text's smoothed frequencies (256,); the expectation is
    under h, the held-out text's frequencies (256,). Returns nats.
    """
    m, r, k = mask_split
    loss = -m * float((h * np.log(p)).sum())
    shown = r / BYTES + k * np.eye(BYTES)  # w(s|b), indexed [b, s]
    weights = p[:, None] * shown
    # With r = 0 a byte never shows as another one, and 0 ln 0 counts as 0.
    possible = weights > 0
    posterior = np.divide(weights, weights.sum(axis=0), out=np.ones_like(weights), where=possible)
    return loss - float((h[:, None] * shown * np.log(posterior)).sum())


class Corpus(NamedTuple):
    """A text as UTF-8, its sha256, and its name in records (never a path)."""

    name: str
    content: bytes | bytearray
    sha256: str


def read_corpus(path: str | None, encoding: str = "utf-8") -> Corpus:
    """Read the text at `path` (see `find_files`), or Python's own if it is None.

    Joins several files by blank lines and skips empty ones.  Raises ConfigError.
    """
    if path is None:
        return _python_topics()
    with refusing(path):
        name, files = find_files(path)
        refuse_huge(path, files)
        corpus = _read_files(name, tuple(files), encoding, identity(files))
    if not corpus.content:
        raise refusal(f"{path} is empty; allowed: text")
    return corpus


@lru_cache(maxsize=2)  # runs of several seeds in one process share a text
def _read_files(name: str, files: Sequence[Path], encoding: str, states: object) -> Corpus:
    content = bytearray()
    for file in files:
        between = b"\n\n" if content else b""
        for text in text_pieces(file, encoding):
            if part := text.encode("utf-8"):
                content += between + part
                between = b""
    return Corpus(name, content, hashlib.sha256(content).hexdigest())


def _python_topics() -> Corpus:
    try:
        topics = import_module("pydoc_data.topics").topics
    except ImportError as error:
        raise refusal(
            "this Python has no pydoc_data.topics, the default text; give a file"
        ) from error
    content = "\n\n".join(topics[key] for key in sorted(topics)).encode("utf-8")
    return Corpus("cpython-topics", content, hashlib.sha256(content).hexdigest())
