"""Data sets saved by Hugging Face datasets (extra [datasets])."""

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.tokenizer_files import all_tokens, encoded, task_of_files

from deepstack.base.errors import ConfigError


def save(folder: Path, features: Any = None, **columns: list[Any]) -> Path:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict(columns, features).save_to_disk(folder, num_shards=2)
    return folder


@pytest.mark.slow
def test_a_saved_data_set_of_tokens_is_mapped(tmp_path: Path) -> None:
    rows = [list(range(i, i + 30)) for i in range(100)]
    path = save(tmp_path / "d", input_ids=rows)
    task = task_of_files(path)
    assert all_tokens(path) == [token for row in rows for token in row]
    assert task.memory == 0 and task.vocab_size == 129
    datasets = pytest.importorskip("datasets")
    equal = datasets.Features(input_ids=datasets.Sequence(datasets.Value("int32"), length=30))
    assert all_tokens(save(tmp_path / "f", equal, input_ids=rows)) == all_tokens(path)
    other = save(tmp_path / "e", input_ids=rows, labels=rows[::-1])
    assert all_tokens(other, column="labels") == [token for row in rows[::-1] for token in row]


@pytest.mark.slow
def test_a_saved_data_set_of_text_is_tokenized(tokenizer: Path, tmp_path: Path) -> None:
    rows = [f"Row {i} of größte words" for i in range(300)]
    folder = save(tmp_path / "d", text=rows)
    tokens = all_tokens(folder, tokenizer=str(tokenizer), end_token="<|endoftext|>")
    assert tokens == [t for row in rows for t in (*encoded(tokenizer, row), 0)]
    with pytest.raises(ConfigError, match=r"the text of 'text' needs task.tokenizer"):
        task_of_files(folder)
    with pytest.raises(ConfigError, match=r"has no column 'words'; set task.column"):
        task_of_files(folder, column="words")


@pytest.mark.slow
def test_a_split_or_a_damaged_data_set_is_refused(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    one = datasets.Dataset.from_dict({"input_ids": [list(range(100))], "label": [[0.5]]})
    datasets.DatasetDict(train=one, test=one).save_to_disk(tmp_path / "d")
    with pytest.raises(ConfigError, match="has the splits test, train; give one"):
        task_of_files(tmp_path / "d")
    task = task_of_files(tmp_path / "d" / "train", held_out_path=str(tmp_path / "d" / "test"))
    assert task.data["tokens"] == 200
    with pytest.raises(ConfigError, match="allowed text or lists of integers"):
        task_of_files(tmp_path / "d" / "train", column="label")
    (arrow,) = (tmp_path / "d" / "train").glob("*.arrow")
    content = arrow.read_bytes()
    for damaged in (b"", b"words", content[:100], content[: len(content) // 2]):
        arrow.write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"^.*\Z"):
            task_of_files(tmp_path / "d" / "train")
    state = json.loads((tmp_path / "d" / "train" / "state.json").read_text())
    assert state["_data_files"]  # the format that is relied on


def test_a_wrong_state_is_refused(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "../a.arrow"}]}')
    with pytest.raises(ConfigError, match=r"^task\.path: .*is not the state of a saved data set"):
        task_of_files(tmp_path)


@pytest.mark.slow
def test_padding_is_left_out(tmp_path: Path) -> None:
    rows = [list(range(i, i + 30)) for i in range(100)]
    masks = [[1] * (30 - i % 5) + [0] * (i % 5) for i in range(100)]
    pairs = list(zip(rows, masks, strict=True))
    padded = [[t if m else 0 for t, m in zip(*pair, strict=True)] for pair in pairs]
    path = save(tmp_path / "d", input_ids=padded, attention_mask=masks)
    kept = [t for pair in pairs for t, m in zip(*pair, strict=True) if m]
    assert all_tokens(path) == kept and task_of_files(path).memory > 0
    full = save(tmp_path / "f", input_ids=rows, attention_mask=[[1] * 30] * 100)
    assert all_tokens(full) == [t for row in rows for t in row]
    assert task_of_files(full).memory == 0  # still mapped
    uneven = save(tmp_path / "u", input_ids=rows, attention_mask=[[1] * 29] * 100)
    with pytest.raises(ConfigError, match="attention_mask has other lengths than input_ids"):
        task_of_files(uneven)
