"""Prediction of tokens from files: .bin shards, .npy, saved data sets, text with a tokenizer."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from deepstack.base.errors import ConfigError
from deepstack.config import Family
from deepstack.tasks.chance import given_shown, smoothed
from deepstack.tasks.files import (
    Encoding,
    find_files,
    identity,
    joint_sha256,
    refusal,
    refusing,
)
from deepstack.tasks.held_out import HeldOut, Split, given_split, split
from deepstack.tasks.parts import MOST_VOCABULARY, Part, count_tokens, padded
from deepstack.tasks.registry import task
from deepstack.tasks.task import Task
from deepstack.tasks.token_files import Reading, Tokenizer, open_tokenizer, read_tokens
from deepstack.tasks.token_layouts import Layout
from deepstack.tasks.windows import MaskRate, MaskSplit, Reader, Span

MOST_COUNTED = 2**22


UNKNOWN_BYTES = (
    "bits_per_byte: not recorded, because under this tokenizer files of tokens do not tell the "
    "bytes of their text; give the text itself as task.path and task.held_out_path"
)


@task("tokens")
def tokens(
    *,
    seq_len: int,
    seed: int,
    family: Family = "encoder",
    path: Annotated[
        str | None,
        Field(
            min_length=1,
            description="a .bin or .npy file, a folder or pattern (data/*_train_*.bin), "
            "a saved data set, or text",
        ),
    ] = None,
    held_out_path: Annotated[
        str | None,
        Field(min_length=1, description="the same for validation; null: blocks of `path`"),
    ] = None,
    layout: Annotated[
        Layout,
        Field(description="of raw tokens; auto: llm.c by its header, else uint16 as nanoGPT"),
    ] = "auto",
    tokenizer: Annotated[
        str | None,
        Field(min_length=1, description="a tokenizer.json: reads text, and counts bytes"),
    ] = None,
    end_token: Annotated[
        str | None,
        Field(min_length=1, description="text of the token after each document, in text alone"),
    ] = None,
    column: Annotated[
        str | None,
        Field(min_length=1, description="of a saved data set; null: input_ids, else text"),
    ] = None,
    encoding: Encoding = "utf-8",
    vocab_size: Annotated[
        int | None,
        Field(
            ge=2,
            le=MOST_VOCABULARY,
            description="number of tokens; null: the tokenizer's, else the largest token + 1",
        ),
    ] = None,
    mask_rate: MaskRate = 0.15,
    mask_split: MaskSplit = (0.8, 0.1, 0.1),
    span: Span = 3,
    held_out: HeldOut = 0.1,
) -> Task:
    """P(next token | tokens before) on your own files of tokens.

    A decoder predicts each next token.  An encoder fills in [MASK] = vocab_size as in the task
    text, an encoder-decoder spans.  Files are mapped into memory, so they may be larger than it.
    Windows of tokens lie within one file and are drawn uniformly.  Validation and probe windows
    come from `held_out_path`, or from `held_out` of the tokens: spread blocks, or whole files of
    many.

    The reference "unigram_entropy" is the loss without context on the validation positions, in
    nats, under the training tokens' frequencies, add-one smoothed.  With a tokenizer, evals.csv of
    a decoder has bits_per_byte: bits per token times the held-out tokens per byte of their text as
    UTF-8, in which unknown, changed and removed characters count.  Files of tokens alone determine
    it only under a byte-level BPE that changes no character.

    Raises ConfigError for files that are missing, unreadable, empty, too short, of another format,
    or with tokens outside of the vocabulary.
    """
    if path is None:
        raise refusal("found null; give a file, a folder or a pattern such as data/*.bin")
    reader = Reader(family, seq_len, mask_rate, mask_split, span)
    if tokenizer is None and end_token is not None:
        raise refusal(f"found {end_token!r} without task.tokenizer", "task.end_token")
    paths = {
        "task.path": path, "task.held_out_path": held_out_path, "task.tokenizer": tokenizer
    }  # fmt: skip
    states = tuple(file_states(each, key) for key, each in paths.items() if each is not None)
    reading = (layout, tokenizer, end_token, column, encoding)
    corpus = read_corpus(path, held_out_path, held_out, reader.window, *reading, states)
    vocabulary, decodes = corpus.vocabulary(vocab_size), family == "decoder"
    per_token = corpus.data.get("held_out_bytes_per_token") if decodes else None
    unknown = decodes and corpus.tokenizer is not None and per_token is None
    batches = reader.source(vocabulary, corpus.split)
    frequencies = smoothed(padded(corpus.train_counts, vocabulary))
    return Task(
        name="tokens",
        vocab_size=vocabulary + (not decodes),
        seed=seed,
        draw=batches.draw,
        draw_validation=batches.draw_validation,
        unigram=frequencies,
        given_shown=given_shown(frequencies, mask_split) if family == "encoder" else None,
        training_tokens=int(corpus.train_counts.sum()),
        window=reader.window,
        data=corpus.data | {"vocab_size": vocabulary},
        memory=sum(part.tokens.nbytes for part in corpus.parts if part.file is None),
        bytes_per_token=per_token,
        notices=(UNKNOWN_BYTES,) if unknown else (),
    )


@dataclass(frozen=True, eq=False)
class TokenCorpus:
    """Training and held-out tokens with their counts and their record for meta.json."""

    split: Split
    train_counts: NDArray[np.int64]
    held_counts: NDArray[np.int64]
    data: dict[str, Any]
    tokenizer: Tokenizer | None

    @property
    def parts(self) -> list[Part]:
        """All parts, for training and held out."""
        return [*self.split.train, *self.split.held]

    def vocabulary(self, given: int | None) -> int:
        """Return the number of tokens.  Raises ConfigError if `given` is too small."""
        needed = max(len(self.train_counts), len(self.held_counts))
        if given is not None and given < needed:
            raise ConfigError(
                f"task.vocab_size: found {given:,}; the files have token {needed - 1:,}, so "
                f"allowed {needed:,} or more",
                key="task.vocab_size",
            )
        return given or max(2, needed, self.tokenizer.vocabulary if self.tokenizer else 0)


@lru_cache(maxsize=2)  # runs of several seeds in one process share their tokens
def read_corpus(
    path: str,
    held_out_path: str | None,
    held_out: float,
    window: int,
    layout: Layout,
    tokenizer: str | None,
    end_token: str | None,
    column: str | None,
    encoding: str,
    states: object,
) -> TokenCorpus:
    """Read and count training and held-out tokens.  Raises ConfigError.

    window: tokens of a window.
    states: a value that changes with the files.
    """
    library = open_tokenizer(tokenizer, end_token) if tokenizer else None
    reading = Reading(layout, library, column, encoding)
    files = read_tokens(path, reading)
    data: dict[str, Any] = {"name": files.name, "bytes": files.bytes}
    digests = [files.sha256]
    if held_out_path is None:
        halves = split(files.parts, files.file_sizes, held_out, window)
        held_counts = count_tokens(halves.held)
        every = count_tokens(files.parts)
        counts = every - padded(held_counts, len(every)), held_counts
    else:
        other = read_tokens(held_out_path, replace(reading, key="task.held_out_path"))
        halves = given_split(files.parts, other.parts, window)
        counts = count_tokens(files.parts), count_tokens(other.parts)
        data["held_out_name"] = other.name
        digests.append(other.sha256)
    data["tokens"] = int(counts[0].sum() + counts[1].sum())
    data["held_out_tokens"] = int(counts[1].sum())
    data["held_out"] = halves.record
    if library is not None:
        data["tokenizer"] = {"name": library.name, "sha256": library.sha256}
        digests.append(library.sha256)
        if (most := max(map(len, counts)) - 1) >= library.vocabulary:
            raise refusal(
                f"{library.name} has tokens 0 to {library.vocabulary - 1:,}; the files have "
                f"token {most:,}",
                "task.tokenizer",
            )
        data["held_out_bytes_per_token"] = bytes_per_token(library, halves.held)
    data["sha256"] = joint_sha256(digests)
    train, held = (
        [part._replace(sizes=None) for part in parts] for parts in (halves.train, halves.held)
    )
    return TokenCorpus(replace(halves, train=train, held=held), *counts, data, library)


def file_states(path: str, key: str) -> tuple[object, ...]:
    """Return a value that changes when one of the files does.  Raises ConfigError."""
    with refusing(path, key):
        return identity(find_files(path, key)[1])


def bytes_per_token(tokenizer: Tokenizer, parts: Sequence[Part]) -> float | None:
    """Return the mean bytes of a held-out token's text, of the first 2^22 of them.

    Returns None if the files hold tokens alone, and those do not determine their text.
    """
    size = count = 0
    for part in parts:
        some = part.piece(slice(MOST_COUNTED - count))
        count += len(some.tokens)
        known = tokenizer.count_bytes(some.tokens) if some.sizes is None else int(some.sizes.sum())
        if known is None:
            return None
        size += known
    return size / max(1, count)
