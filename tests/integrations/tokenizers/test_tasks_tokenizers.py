"""Text through a tokenizer (extra [text])."""

import hashlib
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.configs import config_with
from helpers.tokenizer_files import TEXT, all_tokens, encoded, held_out_tokens, task_of_files

import deepstack
from deepstack.base.errors import ConfigError

pytestmark = pytest.mark.slow
tokenizers = pytest.importorskip("tokenizers", reason="needs the extra [text]")


def test_text_becomes_the_tokens_of_the_tokenizer(tokenizer: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text(TEXT, encoding="utf-8")
    task = task_of_files(path, tokenizer=str(tokenizer))
    assert all_tokens(path, tokenizer=str(tokenizer)) == encoded(tokenizer, TEXT)
    assert task.vocab_size == 400 and task.memory == 2 * task.data["tokens"]
    assert task.data["tokenizer"] == {
        "name": "tokenizer.json",
        "sha256": hashlib.sha256(tokenizer.read_bytes()).hexdigest(),
    }
    held = held_out_tokens(path, tokenizer)
    assert len(held) == task.data["held_out_tokens"]
    library = tokenizers.Tokenizer.from_file(str(tokenizer))
    sizes = [len(library.id_to_token(token)) for token in held]  # a letter a byte
    assert task.bytes_per_token == pytest.approx(sum(sizes) / len(held))
    assert task_of_files(path, "encoder", tokenizer=str(tokenizer)).bytes_per_token is None


def test_a_large_text_is_encoded_in_pieces(tokenizer: Path, tmp_path: Path) -> None:
    text = TEXT * 17  # more than two pieces of a MiB
    (tmp_path / "a.txt").write_text(text, encoding="utf-16")
    tokens = all_tokens(tmp_path / "a.txt", tokenizer=str(tokenizer), encoding="utf-16")
    assert len(text.encode()) > 2**21 and tokens == encoded(tokenizer, text)


def test_a_token_may_end_each_document(tokenizer: Path, tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(TEXT, encoding="utf-8")
    more = {"tokenizer": str(tokenizer), "end_token": "<|endoftext|>"}
    assert all_tokens(tmp_path / "*.txt", **more) == 2 * [*encoded(tokenizer, TEXT), 0]
    with pytest.raises(ConfigError, match="found '<s>', no token of"):
        task_of_files(tmp_path / "*.txt", **more | {"end_token": "<s>"})


def test_bits_per_byte_are_logged(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    np.array(encoded(tokenizer, TEXT), dtype=np.uint16).tofile(tmp_path / "a.bin")
    settings = {
        "model.depth": 2, "model.d_model": 16, "model.family": "decoder", "model.scheme": "pre_ln",
        "task.name": "tokens", "task.tokenizer": str(tokenizer), "task.seq_len": 16,
        "train.steps": 3,
    }  # fmt: skip
    text, tokens = (
        deepstack.train(config_with(settings, task__path=str(tmp_path / name)), out=tmp_path)
        for name in ("a.txt", "a.bin")
    )
    per_token = text.meta["data"]["held_out_bytes_per_token"]
    assert 1.5 < per_token < 10
    bits = (text.evals["loss"] / math.log(2) / per_token).tolist()
    assert text.evals["bits_per_byte"].tolist() == pytest.approx(bits)
    assert text.columns["columns"]["bits_per_byte"]["unit"] == "bits"
    assert text.evals.equals(tokens.evals)  # the same tokens, stored in another file


ODD = (
    "Größte WÖRTER, \t and 漢字 🙂 \u00a0of every   kind…\n" * 40
    + "  plain words follow here \n" * 60
)


def word_piece(path: Path) -> None:
    library = tokenizers.BertWordPieceTokenizer(lowercase=True, strip_accents=True)
    library.train_from_iterator(["plain words follow here of every kind"], vocab_size=60)
    library.save(str(path))


def bpe_without_unknown(path: Path) -> None:
    library = tokenizers.Tokenizer(tokenizers.models.BPE())  # drops letters that it does not know
    library.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=60, show_progress=False)
    library.train_from_iterator(["plain words follow here of every kind"], trainer)
    library.save(str(path))


def unigram(path: Path) -> None:
    library = tokenizers.SentencePieceUnigramTokenizer()
    library.train_from_iterator([ODD], vocab_size=60, unk_token="<unk>", show_progress=False)
    library.save(str(path))


def byte_level(path: Path) -> None:
    library = tokenizers.ByteLevelBPETokenizer()
    library.train_from_iterator([ODD[:300]], vocab_size=280, show_progress=False)
    library.save(str(path))


def byte_level_of_few_bytes(path: Path) -> None:
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=60, show_progress=False)
    library.train_from_iterator(["plain words follow here"], trainer)
    library.save(str(path))


LOSSY = [word_piece, bpe_without_unknown, unigram, byte_level_of_few_bytes]


@pytest.mark.parametrize("make", [*LOSSY, byte_level])
def test_tokens_count_the_bytes_of_the_original_text(make: Any, tmp_path: Path) -> None:
    make(tmp_path / "t.json")
    (tmp_path / "train.txt").write_text("plain words follow here\n" * 30, encoding="utf-8")
    (tmp_path / "held.txt").write_text(ODD, encoding="utf-8")
    more = {"tokenizer": str(tmp_path / "t.json"), "held_out_path": str(tmp_path / "held.txt")}
    task = task_of_files(tmp_path / "train.txt", **more)
    count = len(encoded(tmp_path / "t.json", ODD))
    assert task.data["held_out_tokens"] == pytest.approx(count, abs=len(ODD.splitlines()))
    size = task.bytes_per_token * task.data["held_out_tokens"]
    assert size == pytest.approx(len(ODD.encode()), rel=1e-12) and not task.notices


@pytest.mark.parametrize("make", LOSSY)
def test_files_of_tokens_have_no_bits_per_byte_under_a_tokenizer_that_changes_text(
    make: Any, tmp_path: Path
) -> None:
    make(tmp_path / "t.json")
    np.tile(np.arange(5, dtype=np.uint16), 100).tofile(tmp_path / "a.bin")
    task = task_of_files(tmp_path / "a.bin", tokenizer=str(tmp_path / "t.json"))
    assert task.bytes_per_token is None and task.data["held_out_bytes_per_token"] is None
    assert [line.partition(":")[0] for line in task.notices] == ["bits_per_byte"]
    assert not task_of_files(
        tmp_path / "a.bin", "encoder", tokenizer=str(tmp_path / "t.json")
    ).notices


def test_files_of_a_byte_level_bpe_tell_their_bytes(tmp_path: Path) -> None:
    byte_level(tmp_path / "t.json")
    tokens = np.array(encoded(tmp_path / "t.json", ODD * 3), dtype=np.uint16)
    tokens.tofile(tmp_path / "a.bin")
    more = {"tokenizer": str(tmp_path / "t.json"), "held_out_path": str(tmp_path / "a.bin")}
    task = task_of_files(tmp_path / "a.bin", **more)
    assert task.bytes_per_token == len((ODD * 3).encode()) / len(tokens) and not task.notices


@pytest.mark.parametrize("content", [b"\xff\xfe", b'{"model": {"type": "BPE"}}', b"[" * 100_000])
def test_unfit_tokenizers_are_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "t.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"^task\.tokenizer: .*is not a tokenizer\.json.*\Z"):
        task_of_files(tmp_path / "a.txt", tokenizer=str(tmp_path / "t.json"))


def test_tokens_outside_of_the_tokenizer_are_refused(tokenizer: Path, tmp_path: Path) -> None:
    np.arange(1000, dtype=np.uint16).tofile(tmp_path / "a.bin")
    with pytest.raises(ConfigError, match="has tokens 0 to 399; the files have token 999"):
        task_of_files(tmp_path / "a.bin", tokenizer=str(tokenizer), held_out=0.1)
