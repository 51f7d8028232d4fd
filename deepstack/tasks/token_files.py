"""Files of tokens, memory-mapped: .bin of nanoGPT and llm.c, and .npy; and text by a tokenizer.

Integrations add tokenizers and further kinds of files.
"""

import mmap
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

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
from deepstack.tasks.parts import Part, Tokens
from deepstack.tasks.token_layouts import LOOKED_AT, OF_WIDTH, TYPES, Layout, width_of

HEADER = 256  # int32s before the tokens of llm.c's files: magic, version, number of tokens
LLM_C = {(20240520, 1): "<u2", (20240801, 7): "<u4"}  # magic, version: type
LLM_C_MAGIC = (20240520, 20240801, 20240522)  # the last marks evaluations, which hold no tokens
NPY = b"\x93NUMPY"  # the first bytes of a .npy file that states its type
INDEX = b"MMIDIDX\0\0"  # the first bytes of Megatron's .idx, then version and type
INDEX_TYPES: dict[int, Layout] = {1: "uint8", 4: "int32", 5: "int64", 8: "uint16"}


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
    """The parts of one or several files, with name, sha256 and bytes of the files.

    file_sizes: tokens of each file.
    """

    name: str
    sha256: str
    bytes: int
    parts: list[Part]
    file_sizes: list[int]


def read_tokens(path: str, reading: Reading) -> TokenFiles:
    """Map or tokenize the files at `path`: a file, a folder or a pattern (see `find_files`).

    An integration may read further folders and suffixes.  Raises ConfigError.
    """
    with refusing(path, reading.key):
        name, files = find_files(path, reading.key)
        folder = Path(os.path.expanduser(path))
        for module in import_extensions("token_reader"):
            files = module.files_of(folder, path, reading) or files
        files = [file for file in files if not is_index(file)]
        if reading.tokenizer and any(file.suffix not in readers() for file in files):
            refuse_huge(path, files, reading.key)
        of_files = [read_file(file, reading) for file in files]
        digests = [sha256_of(file) for file in files]
        size = sum(file.stat().st_size for file in files)
    parts = [part for one in of_files for part in one]
    file_sizes = [sum(len(part.tokens) for part in one) for one in of_files]
    if not any(file_sizes):
        raise reading.refusal(path, " is empty; allowed: tokens")
    return TokenFiles(name, joint_sha256(digests), size, parts, file_sizes)


def is_index(file: Path) -> bool:
    """Return whether a file is the index that Megatron writes beside a .bin."""
    return file.suffix == ".idx" and file.with_suffix(".bin").is_file()


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
    return [raw_tokens(content, file, reading, index_layout(file, reading) or reading.layout)]


def raw_tokens(content: mmap.mmap, file: Path, reading: Reading, layout: Layout) -> Tokens:
    """Return bare tokens.  Raises ConfigError if they look like tokens of another layout."""
    dtype = np.dtype(TYPES[layout])
    if len(content) % dtype.itemsize:
        reason = f" has {len(content):,} bytes, no whole number of {dtype.name} tokens; give "
        raise reading.refusal(file, f"{reason}task.layout=uint8 or another one")
    width = width_of(np.frombuffer(content, np.uint8, min(LOOKED_AT, len(content))))
    if width and width.size != dtype.itemsize:
        name = OF_WIDTH[width.size]
        reason = (
            f": {width.sign}, so it seems to hold {name} and not {dtype.name}; give "
            f"task.layout={name}, or write .npy, which states its type"
        )
        raise reading.refusal(file, reason)
    return np.frombuffer(content, dtype)


def index_layout(file: Path, reading: Reading) -> Layout | None:
    """Return the layout that Megatron's .idx beside a .bin states, or None without such a file.

    Raises ConfigError for a type that no layout has.
    """
    index = file.with_suffix(".idx")
    if reading.layout != "auto" or not index.is_file():
        return None
    with index.open("rb") as stream:
        head = stream.read(len(INDEX) + 9)
    if not head.startswith(INDEX):
        return None
    if (code := head[-1]) not in INDEX_TYPES:
        allowed = ", ".join(f"{code}: {name}" for code, name in INDEX_TYPES.items())
        raise reading.refusal(index, f": found the type {code} of tokens; allowed {allowed}")
    return INDEX_TYPES[code]


def npy_tokens(content: mmap.mmap, file: Path, reading: Reading) -> list[Tokens]:
    """Read a .npy file of one dimension, or raw tokens of that name; nothing is unpickled."""
    if content[: len(NPY)] != NPY:
        if reading.layout in ("auto", "llm.c"):
            reason = (
                " has no header of .npy; for raw tokens, as OLMo writes them, give "
                "task.layout=uint16 (uint32 for vocabularies above 65,536), or rename it to .bin"
            )
            raise reading.refusal(file, reason)
        return [raw_tokens(content, file, reading, reading.layout)]
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
