"""Masked prediction of the bytes of real text: a file, a folder, or Python's documentation."""

import hashlib
import math
import os
import stat
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from pydantic import AfterValidator, Field

from deepstack.config import Family
from deepstack.errors import ConfigError
from deepstack.tasks.task import IGNORE, Batch, Task, choose_positions, task

BYTES = 256
MASK = BYTES
MOST_BYTES = 2**31  # of text, all of which is held in memory

Floats = NDArray[np.float64]


def _sums_to_one(shares: Sequence[float]) -> Sequence[float]:
    if abs(sum(shares) - 1) > 1e-6:
        raise ValueError("the three shares must sum to 1")
    return shares


MaskSplit = Annotated[
    Sequence[Annotated[float, Field(ge=0, le=1)]],
    Field(
        min_length=3,
        max_length=3,
        description="shares of the predicted positions that show [MASK], a random byte, the byte",
    ),
    AfterValidator(_sums_to_one),
]


@task("text")
def text(
    *,
    seq_len: int,
    seed: int,
    family: Family = "encoder",
    path: Annotated[
        str | None,
        Field(min_length=1, description="a UTF-8 file or a folder of them; null: Python's topics"),
    ] = None,
    mask_rate: Annotated[
        float, Field(gt=0, le=1, description="share of the positions that are predicted")
    ] = 0.15,
    mask_split: MaskSplit = (0.8, 0.1, 0.1),
    span: Annotated[
        int, Field(ge=1, le=1024, description="encoder_decoder: bytes that one [MASK] replaces")
    ] = 3,
    held_out: Annotated[
        float,
        Field(ge=1e-6, le=0.99, description="share of the text, its end, kept for validation"),
    ] = 0.1,
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

    Raises ConfigError for a text that is missing, unreadable, empty, too short, not UTF-8, or
    no regular file.
    """
    name, content = read_corpus(path)
    spans = max(1, round(mask_rate * seq_len / span))
    if family == "encoder_decoder" and max(2, span) * spans > seq_len:
        raise ConfigError(
            f"task.span: found {span}, and mask_rate {mask_rate:g} asks for {spans} spans of it in "
            f"{seq_len} tokens, which hold {seq_len // max(2, span)}: lower one of the two",
            key="task.span",
        )
    longer = {"encoder": 0, "decoder": 1, "encoder_decoder": spans * (span - 1)}
    window = seq_len + longer[family]
    train, held = split(content, held_out, window)
    frequencies = smoothed_frequencies(train)
    held_frequencies = np.bincount(held, minlength=BYTES) / len(held)
    show_mask, _, show_own = mask_split
    windows = {False: sliding_window_view(train, window), True: sliding_window_view(held, window)}

    def draw(random: np.random.Generator, batch_size: int, held_out: bool) -> Batch:
        source = windows[held_out]
        tokens = source[random.integers(0, len(source), batch_size)].astype(np.int64)
        if family == "decoder":
            return Batch(tokens[:, :-1], tokens[:, 1:], np.ones_like(tokens[:, 1:], dtype=bool))
        if family == "encoder_decoder":
            return infilling(random, tokens, spans, span)
        predicted = choose_positions(
            random, batch_size, seq_len, max(1, round(mask_rate * seq_len))
        )
        fate = random.random(tokens.shape)
        noise = random.integers(0, BYTES, tokens.shape)
        masked = predicted & (fate < show_mask)
        changed = predicted & (fate >= show_mask) & (fate < 1 - show_own)
        inputs = np.where(changed, noise, tokens)
        inputs[masked] = MASK
        return Batch(inputs, np.where(predicted, tokens, IGNORE), masked)

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
            "name": name,
            "sha256": hashlib.sha256(content).hexdigest(),
            "bytes": len(content),
            "held_out_bytes": len(held),
        },
    )


def infilling(
    random: np.random.Generator, tokens: NDArray[np.int64], spans: int, span: int
) -> Batch:
    """Cut `spans` spans of `span` bytes out of each window, which become the target.

    tokens: (batch, window). The source has window - spans (span - 1) tokens, of which `spans` are
    [MASK]s that do not touch; the target has spans * span. Every such choice is equally likely.
    """
    batch_size, window = tokens.shape
    left = window - spans * (span - 1)  # tokens of the source
    # Choosing positions with a gap after each but the last equals choosing among left - spans + 1.
    free = left - spans + 1
    chosen = choose_positions(random, batch_size, free, spans)
    positions = np.nonzero(chosen)[1].reshape(batch_size, spans) + np.arange(
        spans
    )  # of the [MASK]s in the source
    is_mask = np.zeros((batch_size, left), dtype=bool)
    np.put_along_axis(is_mask, positions, True, axis=1)
    lengths = np.where(is_mask, span, 1)
    begins = np.cumsum(lengths, axis=1) - lengths  # in the window
    source = np.where(is_mask, MASK, np.take_along_axis(tokens, begins, axis=1))
    at = np.take_along_axis(begins, positions, axis=1)[:, :, None] + np.arange(span)
    target = np.take_along_axis(tokens, at.reshape(batch_size, -1), axis=1)
    shifted = np.roll(target, 1, axis=1)
    shifted[:, ::span] = MASK  # where a span begins
    return Batch(np.hstack([source, shifted]), target, np.ones(target.shape, dtype=bool))


def smoothed_frequencies(tokens: NDArray[np.uint8]) -> Floats:
    """Return p(b) = (count(b) + 1) / (number of bytes + 256), (256,)."""
    frequencies: Floats = (np.bincount(tokens, minlength=BYTES) + 1) / (len(tokens) + BYTES)
    return frequencies


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
    """A text and its name in records (never a path)."""

    name: str
    content: bytes


def read_corpus(path: str | None) -> Corpus:
    """Read the text at `path`, a file or a folder, or Python's own if it is None.

    Joins a folder's files, in order of relative name, by blank lines; skips hidden and empty files
    and does not follow links to folders. Raises ConfigError.
    """
    if path is None:
        return _python_topics()
    try:
        root = Path(path).expanduser()
        name = os.fsencode(root.name or root.resolve().name or "/").decode("utf-8", "replace")
        files = _files_of(root) if root.is_dir() else [root]
        _refuse_irregular_or_huge(path, files)
        content = b"\n\n".join(part for part in map(_read, files) if part)
    except FileNotFoundError as error:
        there = "" if os.path.isabs(path) else f" (seen from {_printable(os.getcwd())})"
        missing = _printable(str(error.filename))
        raise _refusal(f"no such file or folder: {missing}{there}") from error
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        where = getattr(error, "filename", None) or path
        raise _refusal(f"cannot read {_printable(str(where))}: {reason}") from error
    if not content:
        raise _refusal(f"{_printable(path)} is empty; allowed: UTF-8 text")
    return Corpus(name, content)


def split(
    content: bytes, held_out: float, seq_len: int
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return (training bytes, held-out bytes), the first and the last part of the text.

    Raises ConfigError, naming the needed size, if either is shorter than seq_len + 1.
    """
    least = seq_len + 1
    held = math.floor(held_out * len(content))
    if min(held, len(content) - held) < least:
        # From held_out n >= least and n - held_out n > least - 1; then past any rounding.
        needed = max(math.ceil(least / held_out), math.floor((least - 1) / (1 - held_out)) + 1)
        while min(math.floor(held_out * needed), needed - math.floor(held_out * needed)) < least:
            needed += 1
        which, size = ("held-out", held) if held < least else ("training", len(content) - held)
        raise _refusal(
            f"the text is too short: {len(content):,} bytes, of which the {which} part is "
            f"{size:,}; with seq_len {seq_len} and held_out {held_out:g} each part needs "
            f"{least:,}, so {needed:,} bytes in all"
        )
    tokens = np.frombuffer(content, dtype=np.uint8)
    return tokens[: len(content) - held], tokens[len(content) - held :]


def _python_topics() -> Corpus:
    try:
        topics = import_module("pydoc_data.topics").topics
    except ImportError as error:
        raise _refusal(
            "this Python has no pydoc_data.topics, the default text; give a file"
        ) from error
    joined = "\n\n".join(topics[key] for key in sorted(topics))
    return Corpus("cpython-topics", joined.encode("utf-8"))


def _files_of(root: Path) -> list[Path]:
    def fail(error: OSError) -> None:
        raise error

    files = []
    for folder, folders, names in os.walk(root, onerror=fail):
        folders[:] = [each for each in folders if not each.startswith(".")]
        files += [Path(folder, each) for each in names if not each.startswith(".")]
    if not files:
        raise _refusal(f"no files in {_printable(str(root))} (hidden ones skipped)")
    return sorted(files, key=lambda file: file.relative_to(root).as_posix())


def _refuse_irregular_or_huge(path: str, files: Sequence[Path]) -> None:
    # Before opening: opening a FIFO waits, reading a device may never end.
    states = [file.stat() for file in files]
    for file, state in zip(files, states, strict=True):
        if not stat.S_ISREG(state.st_mode):
            shown = _printable(str(file))
            raise _refusal(f"{shown} is no regular file; allowed: a regular file or a folder")
    if (size := sum(state.st_size for state in states)) > MOST_BYTES:
        raise _refusal(
            f"{_printable(path)} has {size:,} bytes; allowed: at most {MOST_BYTES:,}, "
            "as the text is held in memory"
        )


def _read(file: Path) -> bytes:
    content = file.read_bytes()
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        wrong = f"byte {content[error.start]:#04x} at position {error.start:,}"
        raise _refusal(f"{_printable(str(file))} is not UTF-8 text: {wrong}") from error
    return content


def _refusal(reason: str) -> ConfigError:
    return ConfigError(f"task.path: {reason}", key="task.path")


def _printable(path: str) -> str:
    """Return a path as one printable line; file systems allow any bytes in paths."""
    return path if path.isprintable() else ascii(path)[1:-1]
