"""Tokenizers of the `tokenizers` library, read from a file."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

import numpy as np

from deepstack.tasks.files import find_files, refusal, refusing, sha256_of
from deepstack.tasks.windows import Tokens

LARGEST_TOKENIZER = 2**28  # bytes
DECODED_AT_ONCE = 2**16  # tokens


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
        size = 0
        for i in range(0, len(tokens), DECODED_AT_ONCE):
            ids = tokens[i : i + DECODED_AT_ONCE].tolist()
            size += len(self.library.decode(ids, skip_special_tokens=True).encode("utf-8"))
        return size
