"""Files of tokens, memory-mapped: .bin of nanoGPT and llm.c, .npy, saved data sets; and text.

Text is read through a file of the `tokenizers` library.
"""

import json
import mmap
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from deepstack.base.errors import ConfigError
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
LOOKED_AT, LEAST_HALVES = 2**16, 32
"""Tokens of a file that tell whether it is uint32 read as uint16, and the least that can."""
LARGEST_TOKENIZER = 2**28  # bytes
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
        self.settings = json.loads(self.library.to_str())
        self.vocabulary = max(self.library.get_vocab().values(), default=0) + 1
        self.dtype = np.uint16 if self.vocabulary <= 2**16 else np.uint32
        self.end = [] if end is None else [self.library.token_to_id(end)]
        if self.end == [None]:
            raise refusal(f"found {end!r}, no token of {self.name}", "task.end_token")

    def encode(self, texts: Iterable[str]) -> Part:
        """Return the tokens of one document, whose text comes in pieces, and their sizes.

        Encodes pieces that end with a line, where there are lines, to need little memory.  Bytes
        before the first token count to it, and bytes without a token to the token before them.
        """
        arrays, rest = [np.array(self.end[:0], dtype=self.dtype)], ""
        starts, size = [np.zeros(0, dtype=np.int64)], 0
        for text in chain(texts, [None]):
            rest += text or ""
            cut = len(rest) if text is None else rest.rfind("\n") + 1 or len(rest)
            piece, rest = rest[:cut], rest[cut:]
            encoding = self.library.encode(piece, add_special_tokens=False)
            arrays.append(np.array(encoding.ids, dtype=self.dtype))
            before = byte_positions(piece)
            at = np.array([start for start, _ in encoding.offsets], dtype=np.int64)
            starts.append(size + before[at])
            size += int(before[-1])
        ends = np.full(len(self.end), size)
        first = np.maximum.accumulate(np.concatenate([*starts, ends]))
        first[:1] = 0
        tokens = np.concatenate([*arrays, np.array(self.end, dtype=self.dtype)])
        return Part(tokens, sizes=np.diff(first, append=size))

    def count_bytes(self, tokens: Tokens) -> int | None:
        """Return the bytes of the text that was encoded to these tokens; None if they vary.

        They are known only of a byte-level BPE that leaves no byte out.
        """
        if not self.keeps_bytes:
            return None
        return int(self.bytes_of_token[tokens].sum())

    @cached_property
    def keeps_bytes(self) -> bool:
        """Return whether tokens determine the bytes of their text: each byte is in one of them."""
        settings, model = self.settings, self.settings["model"]
        steps = settings.get("pre_tokenizer") or {}
        steps = steps.get("pretokenizers", [steps])
        harmless = all(
            (step.get("type") == "ByteLevel" and not step.get("add_prefix_space"))
            or (step.get("type") == "Split" and step.get("behavior") != "Removed")
            or step.get("type") == "Digits"
            for step in steps
        )
        strips = any(token["lstrip"] or token["rstrip"] for token in settings["added_tokens"])
        return (
            model.get("type") == "BPE"
            and not settings.get("normalizer")
            and harmless
            and any(step.get("type") == "ByteLevel" for step in steps)
            and not strips
            and set(model["vocab"]) >= set(BYTE_LETTERS)
        )

    @cached_property
    def bytes_of_token(self) -> NDArray[np.int64]:
        """Return the bytes of each token of a byte-level BPE, one a letter; 0 of special tokens."""
        sizes = np.zeros(self.vocabulary, dtype=np.int64)
        for text, token in self.library.get_vocab().items():
            sizes[token] = len(text)
        for added in self.settings["added_tokens"]:
            is_text = not added["special"]
            sizes[added["id"]] = len(added["content"].encode("utf-8")) if is_text else 0
        return sizes


# The letters by which a byte-level BPE writes the 256 bytes: printable ones of Latin-1 themselves,
# the others from U+0100 on.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
BYTE_LETTERS = "".join(map(chr, [*_PRINTABLE, *range(0x100, 0x200 - len(_PRINTABLE))]))


def byte_positions(text: str) -> NDArray[np.int64]:
    """Return the bytes of UTF-8 before each character of a text, and of all of it."""
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
    sizes = 1 + (codes > 0x7F) + (codes > 0x7FF) + (codes > 0xFFFF)
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])


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
        folder = Path(os.path.expanduser(path))
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
        return [a if isinstance(a, Part) else Part(a, file, state, mapping) for a in arrays]
    if reading.tokenizer:
        return [reading.tokenizer.encode(text_pieces(file, reading.encoding))]
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


def saved_files(folder: Path, reading: Reading) -> list[Path]:
    """Return the arrow files of a data set that was saved by Hugging Face datasets, in order."""
    state = json.loads((folder / STATE).read_text(encoding="utf-8"))
    with suppress(KeyError, TypeError):
        names = [entry["filename"] for entry in state["_data_files"]]
        plain = all(Path(name).name == name for name in names)
        if names and plain and not state.get("_indices_data_files"):
            return [folder / name for name in names]
    raise reading.refusal(folder / STATE, " is no state of a saved data set")


def arrow_tokens(content: mmap.mmap, file: Path, reading: Reading) -> list[Tokens] | list[Part]:
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
        rows = [reading.tokenizer.encode([text]) for text in texts]
        sizes = np.concatenate([row.sizes for row in rows if row.sizes is not None])
        return [Part(np.concatenate([row.tokens for row in rows]), sizes=sizes)]
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
