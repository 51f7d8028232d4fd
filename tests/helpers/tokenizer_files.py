"""A tokenizer of the library `tokenizers`, and tasks that read its tokens."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepstack.tasks import Task, build_task
from deepstack.tasks.token_files import Reading, open_tokenizer, read_tokens
from deepstack.tasks.tokens import read_corpus

TEXT = "".join(f"Line {i}: the größte of words, and more words.\n" for i in range(3000))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE of 400 tokens, trained on TEXT, with truncation and padding set."""
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra [text]")
    library = tokenizers.ByteLevelBPETokenizer()
    settings = {"vocab_size": 400, "special_tokens": ["<|endoftext|>"], "show_progress": False}
    library.train_from_iterator([TEXT], **settings)
    library.enable_truncation(10)
    library.enable_padding(length=20)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    library.save(str(path))
    return path


def encoded(tokenizer: Path, text: str) -> list[int]:
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra [text]")
    library = tokenizers.Tokenizer.from_file(str(tokenizer))
    library.no_truncation()
    library.no_padding()
    return library.encode(text).ids


def task_of_files(path: Path | str, family: str = "decoder", **more: Any) -> Task:
    return build_task("tokens", {"path": str(path), **more}, seq_len=16, seed=0, family=family)


def all_tokens(
    path: Path | str, tokenizer: str | None = None, end_token: str | None = None, **more: Any
) -> list[int]:
    library = open_tokenizer(tokenizer, end_token) if tokenizer else None
    parts = read_tokens(str(path), Reading(tokenizer=library, **more)).parts
    return np.concatenate([part.tokens for part in parts]).tolist()


def held_out_tokens(path: Path, tokenizer: Path) -> list[int]:
    reading = ("auto", str(tokenizer), None, None, "utf-8")
    corpus = read_corpus(str(path), None, 0.1, 17, *reading, None)
    return np.concatenate([part.tokens for part in corpus.split.held]).tolist()
