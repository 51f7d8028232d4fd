"""Files of tokens, memory-mapped: .bin of nanoGPT and llm.c, .npy, saved data sets; and text.

Text is read through a file of the `tokenizers` library.
"""

import json
import mmap
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Literal

import numpy as np

from deepstack.errors import ConfigError
from deepstack.tasks.files import (
    MOST_TEXT,
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
LLM_C_MAGIC = (20240520, 20240801, 20240522)  # the last is that of evaluations, without tokens
LARGEST_TOKENIZER = 2**28  # bytes
DECODED_AT_ONCE = 2**16  # tokens
STATE, SPLITS = "state.json", "dataset_dict.json"


class Tokenizer:
    """A file of the `tokenizers` library (tokenizer.json).  Raises ConfigError for any other.

    name, sha256: of the file.  vocabulary: the number of tokens.  end: the text of the token that
    follows each document, or None for none.
    """

    def __init__(self, path: str, end: str | None) -> None:
        key = "task.tokenizer"
        try:
            from tokenizers import Tokenizer as Library
        except ImportError:
            raise refusal("it needs the package tokenizers, of the extra [text]", key) from None
        with refusing(path, key):
            self.name, files = find_files(path, key)
            if len(files) != 1 or files[0].stat().st_size > LARGEST_TOKENIZER:
                raise refusal(f"{path}: allowed one file, tokenizer.json", key)
            self.sha256 = sha256_of(files[0])
            try:
                self.library = Library.from_str(files[0].read_text(encoding="utf-8"))
            except Exception as error:  # the library raises plain Exception
                reason = " ".join(str(error).split())
                raise refusal(f"{path} is no tokenizer.json: {reason}", key) from error
        self.library.no_truncation()
        self.library.no_padding()
        self.vocabulary = max(self.library.get_vocab().values(), default=0) + 1
        self.dtype = np.uint16 if self.vocabulary <= 2**16 else np.uint32
        self.end = [] if end is None else [self.library.token_to_id(end)]
        if self.end == [None]:
            raise refusal(f"found {end!r}, no token of {self.name}", "task.end_token")

    def encode(self, texts: Iterable[str]) -> Tokens:
        """Return the tokens of one document, whose text comes in pieces.

        Encodes pieces that end with a line, where there are lines, to need little memory.
        """
        arrays, rest = [np.array(self.end[:0], dtype=self.dtype)], ""
        for text in chain(texts, [None]):
            rest += text or ""
            cut = len(rest) if text is None else rest.rfind("\n") + 1 or len(rest)
            piece, rest = rest[:cut], rest[cut:]
            ids = self.library.encode(piece, add_special_tokens=False).ids
            arrays.append(np.array(ids, dtype=self.dtype))
        return np.concatenate([*arrays, np.array(self.end, dtype=self.dtype)])

    def count_bytes(self, tokens: Tokens) -> int:
        """Return the bytes of the text that the tokens decode to, as UTF-8."""
        starts = range(0, len(tokens), DECODED_AT_ONCE)
        pieces = (tokens[i : i + DECODED_AT_ONCE].tolist() for i in starts)
        texts = (self.library.decode(ids, skip_special_tokens=True) for ids in pieces)
        return sum(len(text.encode("utf-8")) for text in texts)


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

    A folder with state.json is a data set saved by Hugging Face datasets.  Raises ConfigError.
    """
    with refusing(path, reading.key):
        name, files = find_files(path, reading.key)
        folder = Path(path).expanduser()
        if (folder / SPLITS).is_file():
            splits = ", ".join(sorted(each.name for each in folder.iterdir() if each.is_dir()))
            raise reading.refusal(path, f" has the splits {splits}; give one")
        if (folder / STATE).is_file():
            files = saved_files(folder, reading)
        if reading.tokenizer and any(file.suffix not in READERS for file in files):
            refuse_huge(path, files, reading.key)
        parts = [part for file in files for part in read_file(file, reading)]
        digests = [sha256_of(file) for file in files]
        size = sum(file.stat().st_size for file in files)
    if not any(len(part.tokens) for part in parts):
        raise reading.refusal(path, " is empty; allowed: tokens")
    return TokenFiles(name, joint_sha256(digests), size, parts)


def read_file(file: Path, reading: Reading) -> list[Part]:
    """Return the parts of a file, which its suffix tells how to read."""
    if file.suffix in READERS:
        state, mapping = file.stat(), map_file(file, reading)
        arrays = READERS[file.suffix](mapping, file, reading)
        # tokens of text in an arrow file are an array in memory, without a base
        return [Part(a) if a.base is None else Part(a, file, state, mapping) for a in arrays]
    if reading.tokenizer:
        return [Part(reading.tokenizer.encode(text_pieces(file, reading.encoding)))]
    raise reading.refusal(
        file,
        ": allowed .bin (nanoGPT, llm.c), .npy, a data set saved by Hugging Face datasets, "
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
            reason = f" is no file of tokens of llm.c: it begins with {magic}, {version}; allowed "
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
    return [np.frombuffer(content, dtype)]


def npy_tokens(content: mmap.mmap, file: Path, reading: Reading) -> list[Tokens]:
    """Read a .npy file of one dimension; nothing in it is unpickled."""
    array = np.lib.format.open_memmap(file, mode="r")
    if array.ndim != 1 or array.dtype.kind not in "iu":
        reason = f": found {array.dtype} of shape {array.shape}; allowed integers of one dimension"
        raise reading.refusal(file, reason)
    return [np.frombuffer(content, array.dtype, array.size, array.offset)]


def saved_files(folder: Path, reading: Reading) -> list[Path]:
    """Return the arrow files of a data set that was saved by Hugging Face datasets, in order."""
    state = json.loads((folder / STATE).read_text(encoding="utf-8"))
    with suppress(KeyError, TypeError):
        names = [entry["filename"] for entry in state["_data_files"]]
        plain = all(Path(name).name == name for name in names)
        if names and plain and not state.get("_indices_data_files"):
            return [folder / name for name in names]
    raise reading.refusal(folder / STATE, " is no state of a saved data set")


def arrow_tokens(content: mmap.mmap, file: Path, reading: Reading) -> list[Tokens]:
    """Read the column of an arrow file: lists of tokens, or text for the tokenizer."""
    try:
        import pyarrow as pa
    except ImportError:
        reason = " needs the package pyarrow, of the extra [datasets]"
        raise reading.refusal(file, reason) from None
    try:
        table = pa.ipc.open_stream(pa.BufferReader(pa.py_buffer(content))).read_all()
    except pa.ArrowException as error:
        reason = " ".join(str(error).split())
        raise reading.refusal(file, f" is no arrow stream: {reason}") from error
    default = "input_ids" if "input_ids" in table.column_names else "text"
    name = reading.column or default
    if name not in table.column_names:
        reason = f" has no column {name!r}; set task.column to one of "
        raise reading.refusal(file, reason + ", ".join(table.column_names))
    chunks, kind = table.column(name).chunks, table.schema.field(name).type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        if reading.tokenizer is None:
            raise reading.refusal(file, f": the text of {name!r} needs task.tokenizer")
        if table.column(name).nbytes > MOST_TEXT:
            reason = f": {name!r} has more than {MOST_TEXT:,} bytes of text; store its tokens in "
            raise reading.refusal(file, f"{reason}.npy instead")
        texts = (text.as_py() or "" for chunk in chunks for text in chunk)
        return [np.concatenate([reading.tokenizer.encode([text]) for text in texts])]
    list_types = pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list
    if not (any(is_list(kind) for is_list in list_types) and pa.types.is_integer(kind.value_type)):
        reason = f": found {kind} in {name!r}; allowed text or lists of integers"
        raise reading.refusal(file, reason)
    values = [chunk.flatten() for chunk in chunks]
    if any(array.null_count for array in values):
        raise reading.refusal(file, f": found null among the tokens of {name!r}")
    return [array.to_numpy() for array in values]


READERS = {".bin": bin_tokens, ".npy": npy_tokens, ".arrow": arrow_tokens}
"""The functions that read mapped files, by suffix. A tokenizer reads all other files."""
