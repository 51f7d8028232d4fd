"""Reads tokenizer.json of the library `tokenizers`, for `task.tokenizer`."""

import json
from collections.abc import Iterable
from functools import cached_property
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from deepstack.base import needs_package
from deepstack.tasks import Part, Tokens, find_files, refusal, refusing, sha256_of

LARGEST_TOKENIZER = 2**28  # bytes


def open_tokenizer(path: str, end: str | None) -> "TokenizerFile":
    """Return the tokenizer in a file (see `TokenizerFile`)."""
    return TokenizerFile(path, end)


class TokenizerFile:
    """A file of the `tokenizers` library (tokenizer.json).  Raises ConfigError for any other.

    name, sha256: of the file.
    vocabulary: the number of tokens.
    end: the text of the token that follows each document, or None for none.
    """

    def __init__(self, path: str, end: str | None) -> None:
        key = "task.tokenizer"
        try:
            from tokenizers import Tokenizer as Library
        except ImportError:
            raise refusal(f"it {needs_package('tokenizers', 'text')}", key) from None
        with refusing(path, key):
            self.name, files = find_files(path, key)
            if len(files) != 1 or files[0].stat().st_size > LARGEST_TOKENIZER:
                raise refusal(f"{path}: allowed one file, tokenizer.json", key)
            self.sha256 = sha256_of(files[0])
            try:
                self.library = Library.from_str(files[0].read_text(encoding="utf-8"))
            except Exception as error:  # the library raises plain Exception
                reason = " ".join(str(error).split())
                raise refusal(f"{path} is not a tokenizer.json: {reason}", key) from error
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
