"""Text through a tokenizer, and data sets saved by Hugging Face datasets (extras)."""

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.configs import config_with

import deepstack
from deepstack.base.errors import ConfigError
from deepstack.tasks import Task, build_task
from deepstack.tasks.tokens import read_corpus

pytestmark = pytest.mark.slow
tokenizers = pytest.importorskip("tokenizers", reason="needs the extra [text]")

TEXT = "".join(f"Line {i}: the größte of words, and more words.\n" for i in range(3000))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE of 400 tokens, trained on TEXT, with truncation and padding set."""
    library = tokenizers.ByteLevelBPETokenizer()
    settings = {"vocab_size": 400, "special_tokens": ["<|endoftext|>"], "show_progress": False}
    library.train_from_iterator([TEXT], **settings)
    library.enable_truncation(10)
    library.enable_padding(length=20)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    library.save(str(path))
    return path


def encoded(tokenizer: Path, text: str) -> list[int]:
    library = tokenizers.Tokenizer.from_file(str(tokenizer))
    library.no_truncation()
    library.no_padding()
    return library.encode(text).ids


def build(path: Path | str, family: str = "decoder", **more: Any) -> Task:
    return build_task("tokens", {"path": str(path), **more}, seq_len=16, seed=0, family=family)


def all_tokens(path: Path | str, **more: Any) -> list[int]:
    names = ("tokenizer", "end_token", "column", "states")
    reading = dict.fromkeys(names) | {"layout": "auto", "encoding": "utf-8"} | more
    corpus = read_corpus(str(path), None, 0.1, **reading)
    return np.concatenate([part.tokens for part in (*corpus.train, *corpus.held)]).tolist()


def test_text_becomes_the_tokens_of_the_tokenizer(tokenizer: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text(TEXT, encoding="utf-8")
    task = build(path, tokenizer=str(tokenizer))
    assert all_tokens(path, tokenizer=str(tokenizer)) == encoded(tokenizer, TEXT)
    assert task.vocab_size == 400 and task.memory == 2 * task.data["tokens"]
    assert task.data["tokenizer"] == {
        "name": "tokenizer.json",
        "sha256": hashlib.sha256(tokenizer.read_bytes()).hexdigest(),
    }
    held = encoded(tokenizer, TEXT)[-task.data["held_out_tokens"] :]
    library = tokenizers.Tokenizer.from_file(str(tokenizer))
    assert task.bytes_per_token == len(library.decode(held).encode()) / len(held)
    assert TEXT.endswith(library.decode(held))
    assert build(path, "encoder", tokenizer=str(tokenizer)).bytes_per_token is None


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
        build(tmp_path / "*.txt", **more | {"end_token": "<s>"})


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
def test_bytes_of_tokens_are_those_of_the_text_as_it_was(make: Any, tmp_path: Path) -> None:
    make(tmp_path / "t.json")
    (tmp_path / "train.txt").write_text("plain words follow here\n" * 30, encoding="utf-8")
    (tmp_path / "held.txt").write_text(ODD, encoding="utf-8")
    more = {"tokenizer": str(tmp_path / "t.json"), "held_out_path": str(tmp_path / "held.txt")}
    task = build(tmp_path / "train.txt", **more)
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
    task = build(tmp_path / "a.bin", tokenizer=str(tmp_path / "t.json"))
    assert task.bytes_per_token is None and task.data["held_out_bytes_per_token"] is None
    assert [line.partition(":")[0] for line in task.notices] == ["bits_per_byte"]
    assert not build(tmp_path / "a.bin", "encoder", tokenizer=str(tmp_path / "t.json")).notices


def test_files_of_a_byte_level_bpe_tell_their_bytes(tmp_path: Path) -> None:
    byte_level(tmp_path / "t.json")
    tokens = np.array(encoded(tmp_path / "t.json", ODD * 3), dtype=np.uint16)
    tokens.tofile(tmp_path / "a.bin")
    more = {"tokenizer": str(tmp_path / "t.json"), "held_out_path": str(tmp_path / "a.bin")}
    task = build(tmp_path / "a.bin", **more)
    assert task.bytes_per_token == len((ODD * 3).encode()) / len(tokens) and not task.notices


@pytest.mark.parametrize("content", [b"\xff\xfe", b'{"model": {"type": "BPE"}}', b"[" * 100_000])
def test_unfit_tokenizers_are_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "t.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"^task\.tokenizer: .*is no tokenizer\.json.*\Z"):
        build(tmp_path / "a.txt", tokenizer=str(tmp_path / "t.json"))


def test_tokens_outside_of_the_tokenizer_are_refused(tokenizer: Path, tmp_path: Path) -> None:
    np.arange(1000, dtype=np.uint16).tofile(tmp_path / "a.bin")
    with pytest.raises(ConfigError, match="has tokens 0 to 399; the files have token 999"):
        build(tmp_path / "a.bin", tokenizer=str(tokenizer), held_out=0.1)


def save(folder: Path, features: Any = None, **columns: list[Any]) -> Path:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict(columns, features).save_to_disk(folder, num_shards=2)
    return folder


def test_a_saved_data_set_of_tokens_is_mapped(tmp_path: Path) -> None:
    rows = [list(range(i, i + 30)) for i in range(100)]
    path = save(tmp_path / "d", input_ids=rows)
    task = build(path)
    assert all_tokens(path) == [token for row in rows for token in row]
    assert task.memory == 0 and task.vocab_size == 129
    datasets = pytest.importorskip("datasets")
    equal = datasets.Features(input_ids=datasets.Sequence(datasets.Value("int32"), length=30))
    assert all_tokens(save(tmp_path / "f", equal, input_ids=rows)) == all_tokens(path)
    other = save(tmp_path / "e", input_ids=rows, labels=rows[::-1])
    assert all_tokens(other, column="labels") == [token for row in rows[::-1] for token in row]


def test_a_saved_data_set_of_text_is_tokenized(tokenizer: Path, tmp_path: Path) -> None:
    rows = [f"Row {i} of größte words" for i in range(300)]
    folder = save(tmp_path / "d", text=rows)
    tokens = all_tokens(folder, tokenizer=str(tokenizer), end_token="<|endoftext|>")
    assert tokens == [t for row in rows for t in (*encoded(tokenizer, row), 0)]
    with pytest.raises(ConfigError, match=r"the text of 'text' needs task.tokenizer"):
        build(folder)
    with pytest.raises(ConfigError, match=r"has no column 'words'; set task.column"):
        build(folder, column="words")


def test_a_split_or_a_damaged_data_set_is_refused(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    one = datasets.Dataset.from_dict({"input_ids": [list(range(100))], "label": [[0.5]]})
    datasets.DatasetDict(train=one, test=one).save_to_disk(tmp_path / "d")
    with pytest.raises(ConfigError, match="has the splits test, train; give one"):
        build(tmp_path / "d")
    task = build(tmp_path / "d" / "train", held_out_path=str(tmp_path / "d" / "test"))
    assert task.data["tokens"] == 200
    with pytest.raises(ConfigError, match="allowed text or lists of integers"):
        build(tmp_path / "d" / "train", column="label")
    (arrow,) = (tmp_path / "d" / "train").glob("*.arrow")
    content = arrow.read_bytes()
    for damaged in (b"", b"words", content[:100], content[: len(content) // 2]):
        arrow.write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"^.*\Z"):
            build(tmp_path / "d" / "train")
    state = json.loads((tmp_path / "d" / "train" / "state.json").read_text())
    assert state["_data_files"]  # the format that is relied on
