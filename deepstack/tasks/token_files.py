"""Files of tokens, memory-mapped: .bin of nanoGPT and llm.c, and .npy; and text by a tokenizer.

Integrations add tokenizers and further kinds of files.
"""

import mmap
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from deepstack.base.errors import ConfigError
from deepstack.base.extensions import import_extensions
from deepstack.tasks.files import (
    find_files,
    joint_sha256,
    refusal,
    refuse_huge,
    refusing,
    sha256_of,
    text_pieces,
)
from deepstack.tasks.windows import Part, Tokens

Layout = Literal["auto", "uint16", "uint32", "llm.c"]

HEADER = 256  # int32s before the tokens of llm.c's files: magic, version, number of tokens
LLM_C = {(20240520, 1): "<u2", (20240801, 7): "<u4"}  # magic, version: type
LLM_C_MAGIC = (20240520, 20240801, 20240522)  # the last marks evaluations, which hold no tokens
LOOKED_AT, LEAST_HALVES = 2**16, 32
"""Tokens of a file that tell whether it is uint32 read as uint16, and the least that can."""


class Tokenizer(Protocol):
    """Turns text into tokens.

    name, sha256: of its file.
    vocabulary: the number of tokens.
    """

    name: str
    sha256: str
    vocabulary: int

    def encode(self, texts: Iterable[str]) -> Part:
        """Return the tokens of one document, whose text comes in pieces, and their sizes."""

    def count_bytes(self, tokens: Tokens) -> int | None:
        """Return the bytes of the text that was encoded to these tokens; None if they vary."""


def open_tokenizer(path: str, end: str | None) -> Tokenizer:
    """Return the tokenizer in a file, by the file tokenizer.py of an integration.

    end: the text of the token that follows each document, or None.
    """
    for module in import_extensions("tokenizer"):
        tokenizer: Tokenizer = module.open_tokenizer(path, end)
        return tokenizer
    raise refusal("this deepstack has no integrations/tokenizers, which reads it", "task.tokenizer")


@dataclass(frozen=True)
class Reading:
    """The settings with which files are read.  key: of their path, in messages."""

    layout: Layout = "auto"
    tokenizer: Tokenizer | None = None
    column: str | None = None
    encoding: str = "utf-8"
    key: str = "task.path"

    def refusal(self, file: str | Path, reason: str) -> ConfigError:
        """Return the error for a file that cannot be used; `reason` follows its path."""
        return refusal(f"{file}{reason}", self.key)


@dataclass(frozen=True, eq=False)
class TokenFiles:
    """The parts of one or several files, with name, sha256 and bytes of the files."""

    name: str
    sha256: str
    bytes: int
    parts: list[Part]


def read_tokens(path: str, reading: Reading) -> TokenFiles:
    """Map or tokenize the files at `path`: a file, a folder or a pattern (see `find_files`).

    An integration may read further folders and suffixes.  Raises ConfigError.
    """
    with refusing(path, reading.key):
        name, files = find_files(path, reading.key)
        folder = Path(os.path.expanduser(path))
        for module in import_extensions("token_reader"):
            files = module.files_of(folder, path, reading) or files
        if reading.tokenizer and any(file.suffix not in readers() for file in files):
            refuse_huge(path, files, reading.key)
        parts = [part for file in files for part in read_file(file, reading)]
        digests = [sha256_of(file) for file in files]
        size = sum(file.stat().st_size for file in files)
    if not any(len(part.tokens) for part in parts):
        raise reading.refusal(path, " is empty; allowed: tokens")
    return TokenFiles(name, joint_sha256(digests), size, parts)


def read_file(file: Path, reading: Reading) -> list[Part]:
    """Return the parts of a file, which its suffix tells how to read."""
    if file.suffix in readers():
        state, mapping = file.stat(), map_file(file, reading)
        arrays = readers()[file.suffix](mapping, file, reading)
        return [a if isinstance(a, Part) else Part(a, file, state, mapping) for a in arrays]
    if reading.tokenizer:
        return [reading.tokenizer.encode(text_pieces(file, reading.encoding))]
    more = "".join(f"{one.FORMAT}, " for one in import_extensions("token_reader"))
    raise reading.refusal(
        file,
        f": allowed .bin (nanoGPT, llm.c), .npy, {more}"
        "a pattern such as data/*.bin, or text with task.tokenizer=tokenizer.json",
    )


def map_file(file: Path, reading: Reading) -> mmap.mmap:
    """Map a file read-only.  Raises ConfigError for an empty one."""
    if not file.stat().st_size:
        raise reading.refusal(file, " is empty; allowed: tokens")
    with file.open("rb") as stream:
        return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)


def bin_tokens(content: mmap.mmap, file: Path, reading: Reading) -> list[Tokens]:
    """Read a .bin file: bare tokens as nanoGPT writes them, or llm.c's header and tokens."""
    magic = version = count = 0
    if len(content) >= 4 * HEADER:
        magic, version, count = np.frombuffer(content, dtype="<i4", count=3).tolist()
    if reading.layout == "llm.c" or (reading.layout == "auto" and magic in LLM_C_MAGIC):
        if (magic, version) not in LLM_C:
            allowed = " or ".join(f"{magic}, {version}" for magic, version in LLM_C)
            reason = (
                f" is not a file of tokens of llm.c: it begins with {magic}, {version}; allowed "
            )
            raise reading.refusal(file, reason + allowed)
        dtype, rest = np.dtype(LLM_C[magic, version]), len(content) - 4 * HEADER
        if rest != count * dtype.itemsize:
            reason = f": its header says {count:,} tokens, and {rest:,} bytes follow: is it whole?"
            raise reading.refusal(file, reason)
        return [np.frombuffer(content, dtype, offset=4 * HEADER)]
    dtype = np.dtype("<u4" if reading.layout == "uint32" else "<u2")
    if len(content) % dtype.itemsize:
        reason = f" has {len(content):,} bytes, no whole number of {dtype.name} tokens"
        raise reading.refusal(file, reason)
    tokens = np.frombuffer(content, dtype)
    if reading.layout == "auto" and are_halves(tokens[:LOOKED_AT]):
        reason = (
            ": as uint16, every second token is below 16, so it seems to hold uint32; give "
            "task.layout=uint32 (or uint16), or write .npy, which states its type"
        )
        raise reading.refusal(file, reason)
    return [tokens]


def are_halves(tokens: Tokens) -> bool:
    """Return whether uint16 tokens look like the halves of little-endian uint32 ones."""
    low, high = tokens[0::2], tokens[1::2]
    return len(high) >= LEAST_HALVES and bool(high.max() < 16 <= low.max())


def npy_tokens(content: mmap.mmap, file: Path, reading: Reading) -> list[Tokens]:
    """Read a .npy file of one dimension; nothing in it is unpickled."""
    array = np.lib.format.open_memmap(file, mode="r")
    if array.ndim != 1 or array.dtype.kind not in "iu":
        reason = f": found {array.dtype} of shape {array.shape}; allowed integers of one dimension"
        raise reading.refusal(file, reason)
    return [np.frombuffer(content, array.dtype, array.size, array.offset)]


Read = Callable[[mmap.mmap, Path, Reading], list[Tokens] | list[Part]]


def readers() -> dict[str, Read]:
    """Return the functions that read mapped files, by suffix.  A tokenizer reads all other files.

    Besides the ones here, an integration adds its own in the file token_reader.py.
    """
    more = {one.SUFFIX: one.read for one in import_extensions("token_reader")}
    return {".bin": bin_tokens, ".npy": npy_tokens, **more}
