"""Masked prediction of the bytes of real text: files, a folder, or Python's own texts."""

import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from deepstack.config import Family
from deepstack.tasks.chance import given_shown, smoothed
from deepstack.tasks.files import (
    Encoding,
    find_files,
    identity,
    refusal,
    refuse_huge,
    refusing,
    text_pieces,
)
from deepstack.tasks.held_out import HeldOut, Split, split
from deepstack.tasks.parts import Part, count_tokens, padded
from deepstack.tasks.registry import task
from deepstack.tasks.task import Task
from deepstack.tasks.windows import MaskRate, MaskSplit, Reader, Span

BYTES = 256
MASK = BYTES
BETWEEN = b"\n\n"  # files and topics
LICENCE = "PSF-2.0"  # of everything in CPython's distribution
NOT_THE_LIBRARY = ("__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test")


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
            "null: the text of `source`",
        ),
    ] = None,
    source: Annotated[
        Literal["topics", "stdlib"],
        Field(
            description="the text without a path: Python's topics (0.5 MB of English), or its "
            "standard library (12 MB of code)"
        ),
    ] = "topics",
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
    arXiv:1810.04805, section 3.1). Validation and probe windows come from `held_out` of the text,
    which is never trained on: blocks that are spread over it, or whole files in a text of many.

    A decoder predicts each next byte; mask_rate and mask_split have no effect. An encoder-decoder
    fills in spans (Raffel et al. 2019, arXiv:1910.10683, section 3.1.4). Of a window,
    max(1, round(mask_rate seq_len / span)) spans of `span` bytes are replaced by one [MASK] each;
    seq_len tokens are left, and no two spans touch. The decoder predicts the bytes of all spans in
    turn. It reads [MASK] where a span begins, else the byte before. mask_split has no effect.

    Without `path` the text is inside every CPython, under the licence PSF-2.0: the English
    reference topics (`source: topics`), or the .py files of the standard library without its tests
    (`source: stdlib`). Both differ by Python version; the recorded sha256 identifies the text.

    The references are losses without context on the validation positions, in nats, under the
    training text's byte frequencies, add-one smoothed: "unigram_entropy" where [MASK] is shown, and
    "context_free_entropy" on all predicted positions, if some show a byte.

    Files are read in their `encoding` and become UTF-8.  Raises ConfigError for a text that is
    missing, unreadable, empty, too short, not in its encoding, or no regular file.
    """
    if path is not None and source != "topics":
        raise refusal(f"found {source} beside task.path={path}; give one of both", "task.source")
    corpus = read_corpus(path, encoding, source)
    reader = Reader(family, seq_len, mask_rate, mask_split, span)
    halves, counts = halves_of(corpus, held_out, reader.window)
    batches, frequencies = reader.source(BYTES, halves), smoothed(counts)
    return Task(
        name="text",
        vocab_size=BYTES + 1,
        seed=seed,
        draw=batches.draw,
        draw_validation=batches.draw_validation,
        unigram=frequencies,
        given_shown=given_shown(frequencies, mask_split) if family == "encoder" else None,
        training_tokens=int(counts.sum()),
        window=reader.window,
        data={
            "name": corpus.name,
            "sha256": corpus.sha256,
            **corpus.facts,
            "bytes": len(corpus.content),
            "held_out_bytes": len(corpus.content) - int(counts.sum()),
            "held_out": halves.record,
        },
        memory=len(corpus.content),
    )


@dataclass(frozen=True, eq=False)
class Corpus:
    """A text as UTF-8, its sha256, and its name in records (never a path).

    file_sizes: bytes of each file, with the blank line that follows it.
    facts: more about the text, for meta.json.
    """

    name: str
    content: bytes | bytearray
    sha256: str
    file_sizes: Sequence[int]
    facts: dict[str, Any]


@lru_cache(maxsize=2)
def halves_of(corpus: Corpus, held_out: float, window: int) -> tuple[Split, NDArray[np.int64]]:
    """Return the training and held-out parts of a text, and the counts of the training bytes."""
    content = Part(np.frombuffer(corpus.content, dtype=np.uint8))
    halves = split([content], corpus.file_sizes, held_out, window)
    return halves, padded(count_tokens(halves.train), BYTES)


def read_corpus(path: str | None, encoding: str = "utf-8", source: str = "topics") -> Corpus:
    """Read the text at `path` (see `find_files`), or one of Python's own if it is None.

    Joins several files by blank lines and skips empty ones.  Raises ConfigError.
    """
    if path is None:
        return _python_topics() if source == "topics" else _standard_library()
    with refusing(path):
        name, files = find_files(path)
        refuse_huge(path, files)
        corpus = _read_files(name, tuple(files), encoding, identity(files))
    if not corpus.content:
        raise refusal(f"{path} is empty; allowed: text")
    return corpus


@lru_cache(maxsize=2)  # runs of several seeds in one process share a text
def _read_files(name: str, files: Sequence[Path], encoding: str, states: object) -> Corpus:
    return joined(name, (map(str.encode, text_pieces(file, encoding)) for file in files))


def joined(name: str, files: Iterable[Iterable[bytes]], **facts: Any) -> Corpus:
    """Return the corpus of files, whose content comes in pieces; skips empty ones."""
    content, begins = bytearray(), []
    for file in files:
        between = BETWEEN if content else b""
        is_new = True
        for piece in filter(None, file):
            content += between
            if is_new:
                begins.append(len(content))
            content += piece
            between, is_new = b"", False
    sizes = np.diff([*begins, len(content)]).tolist()
    return Corpus(name, content, hashlib.sha256(content).hexdigest(), sizes, facts)


@cache
def _python_topics() -> Corpus:
    try:
        topics = import_module("pydoc_data.topics").topics
    except ImportError as error:
        raise refusal(
            "this Python has no pydoc_data.topics, the default text; give a file"
        ) from error
    text = BETWEEN.join(topics[key].encode() for key in sorted(topics))
    return joined("cpython-topics", [[text]], licence=LICENCE)


@cache
def _standard_library() -> Corpus:
    """Return the .py files of the running Python's standard library, in the order of their paths.

    Left out are files that are not modules of the library (some hold the paths of a build), tests,
    which many distributions remove, and the topics, which are another text.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in NOT_THE_LIBRARY]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    modules = sys.stdlib_module_names - {"pydoc_data"}
    files = [file for file in files if file.relative_to(root).parts[0].split(".")[0] in modules]
    if not files:
        raise refusal(f"this Python has no standard library in files; found none in {root}")
    files.sort(key=lambda file: file.relative_to(root).as_posix())
    with refusing(str(root)):
        return joined("cpython-stdlib", ([file.read_bytes()] for file in files), licence=LICENCE)
