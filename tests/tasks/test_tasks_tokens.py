"""The task tokens: files in published layouts are read back exactly, and unfit ones refused."""

import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from deepstack.base.errors import ConfigError, ResourceError
from deepstack.tasks import IGNORE, Task, build_task

RAMP = np.arange(1000)


def build(path: Path | str, *, seq_len: int = 8, family: str = "decoder", **more: Any) -> Task:
    return build_task("tokens", {"path": str(path), **more}, seq_len=seq_len, seed=0, family=family)


def nanogpt(path: Path, tokens: NDArray[Any] = RAMP) -> Path:
    """As nanoGPT's prepare.py writes it: bare uint16."""
    tokens.astype(np.uint16).tofile(path)
    return path


def llm_c(path: Path, tokens: NDArray[Any] = RAMP, kind: str = "<u2", **other: int) -> Path:
    """As write_datafile of llm.c/dev/data/data_common.py writes it."""
    header = np.zeros(256, dtype="<i4")
    values = {"magic": 20240520, "version": 1, "count": len(tokens)} | other
    header[:3] = list(values.values())
    path.write_bytes(header.tobytes() + tokens.astype(kind).tobytes())
    return path


def npy(path: Path, tokens: NDArray[Any] = RAMP) -> Path:
    np.save(path, tokens)
    return path


def shown(task: Task, held_out: bool = False) -> set[int]:
    """All tokens of many windows."""
    draw, tokens = task.validation_batch if held_out else task.train_batch, set[int]()
    for batch in (draw(i, 200) for i in range(20)):
        assert np.array_equal(batch.inputs[:, 1:], batch.targets[:, :-1])
        tokens.update(np.unique([batch.inputs, batch.targets]).tolist())
    return tokens


LAYOUTS: dict[str, Callable[[Path], Path]] = {
    "nanogpt.bin": nanogpt,
    "llm_c.bin": llm_c,
    "llama3.bin": lambda path: llm_c(path, kind="<u4", magic=20240801, version=7),
    "int64.npy": npy,
    "big_endian.npy": lambda path: npy(path, RAMP.astype(">i4")),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_tokens_of_each_layout_are_read_back(name: str, tmp_path: Path) -> None:
    path = LAYOUTS[name](tmp_path / name)
    task = build(path)
    train, held = shown(task), shown(task, held_out=True)
    assert train | held == set(range(1000)) and not train & held
    batch = task.train_batch(3, 50)
    assert np.array_equal(batch.targets, batch.inputs + 1) and batch.inputs.dtype == np.int64
    assert task.vocab_size == 1000 and task.memory == 0 and task.bytes_per_token is None
    assert task.data == {
        "name": name,
        "bytes": path.stat().st_size,
        "tokens": 1000,
        "held_out_tokens": len(held),
        "held_out": {"by": "blocks", "count": 3, "length": 35},
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "vocab_size": 1000,
    }
    # every held-out token is new to the training part
    batch = task.validation_batch(0, 4)
    assert task.unigram_loss(batch) == pytest.approx(np.log(len(train) + 1000))
    assert task.references_on(batch) == {"unigram_entropy": task.unigram_loss(batch)}


def test_bare_uint32_is_read_if_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    (RAMP + 70_000).astype("<u4").tofile(path)
    task = build(path, layout="uint32")
    assert shown(task) | shown(task, held_out=True) == set(range(70_000, 71_000))


def test_shards_are_a_pattern_and_windows_lie_within_one(tmp_path: Path) -> None:
    for i in range(4):
        llm_c(tmp_path / f"fine_train_{i:06}.bin", RAMP[:100] + 100 * i)
    llm_c(tmp_path / "fine_val_000000.bin", RAMP[:50] + 900)
    paths = {"path": tmp_path / "fine_train_*.bin", "held_out_path": f"{tmp_path}/fine_val_*.bin"}
    task = build(**paths)
    assert shown(task) == set(range(400)) and shown(task, held_out=True) == set(range(900, 950))
    shards = task.train_batch(0, 500).inputs // 100
    assert (shards == shards[:, :1]).all()
    assert np.bincount(shards[:, 0]).min() > 80  # all shards alike
    names = task.data["name"], task.data["held_out_name"]
    assert names == ("fine_train_*.bin", "fine_val_*.bin") and str(tmp_path) not in str(task.data)
    llm_c(tmp_path / "fine_val_000000.bin", RAMP[:50] + 901)
    assert build(**paths).data["sha256"] != task.data["sha256"]


def test_blocks_of_every_shard_are_held_out(tmp_path: Path) -> None:
    for i in range(3):
        nanogpt(tmp_path / f"{i}.bin", RAMP[:100] + 100 * i)
    task = build(tmp_path, held_out=0.5)
    train, held = shown(task), shown(task, held_out=True)
    assert not train & held and {token // 100 for token in held} == {0, 1, 2}
    assert train | held == set(range(300)) and 120 <= len(held) <= 180


def test_encoders_fill_in_masks_and_encoder_decoders_spans(tmp_path: Path) -> None:
    path = nanogpt(tmp_path / "a.bin")
    task = build(path, family="encoder", seq_len=40)
    batch = task.train_batch(0, 200)
    assert task.vocab_size == 1001 and ((batch.inputs == 1000) == batch.masked).all()
    assert ((batch.targets != IGNORE).sum(axis=1) == 6).all()
    spans = build(path, family="encoder_decoder", seq_len=40).train_batch(0, 5).inputs
    assert ((spans[:, :40] == 1000).sum(axis=1) == 2).all() and (spans[:, 40] == 1000).all()


def test_the_vocabulary_may_be_larger_but_not_smaller(tmp_path: Path) -> None:
    path = nanogpt(tmp_path / "a.bin")
    task = build(path, vocab_size=50_304)
    assert task.vocab_size == task.data["vocab_size"] == 50_304
    with pytest.raises(ConfigError, match="found 999; the files have token 999, so allowed 1,000"):
        build(path, vocab_size=999)


UNFIT: list[tuple[str, bytes | Callable[[Path], object], str]] = [
    ("a.bin", b"", "is empty"),
    ("a.bin", b"abc", "has 3 bytes, no whole number of uint16 tokens"),
    ("a.bin", b"abcd", "the training part is too short: its longest piece has 1"),
    ("a.txt", b"words", "text with task.tokenizer=tokenizer.json"),
    ("a.bin", lambda f: llm_c(f, count=999), "its header says 999 tokens, and 2,000 bytes"),
    ("a.bin", lambda f: llm_c(f, version=2), "begins with 20240520, 2; allowed 20240520, 1 or"),
    ("a.bin", lambda f: llm_c(f, magic=20240522), "it begins with 20240522, 1; allowed"),
    ("a.npy", lambda f: npy(f, RAMP * 1.5), "found float64 of shape"),
    ("a.npy", lambda f: npy(f, -RAMP), "found token -"),
    ("a.npy", lambda f: npy(f, np.array([{}, print], dtype=object)), "cannot read"),  # a pickle
    ("a.npy", lambda f: os.truncate(npy(f), 8000), "cannot read"),
]


@pytest.mark.parametrize(("name", "make", "expected"), UNFIT)
def test_unfit_files_are_refused(
    name: str, make: bytes | Callable[[Path], object], expected: str, tmp_path: Path
) -> None:
    """make: the content of the file, or a function that writes it."""
    path = tmp_path / name
    path.write_bytes(make) if isinstance(make, bytes) else make(path)
    began = time.monotonic()
    with pytest.raises(ConfigError, match=rf"^task\.path: .*{expected}.*\Z") as raised:
        build(path)
    assert time.monotonic() - began < 1 and raised.value.key == "task.path"
    assert len(str(raised.value)) < 1000


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"path": None}, "task.path: found null; give a file"),
        ({"held_out_path": "/missing"}, "task.held_out_path: no such file"),
        ({"end_token": "<s>"}, "task.end_token: found '<s>' without task.tokenizer"),
        ({"layout": "int8"}, "task.layout: found"),
        ({"layout": "llm.c"}, "task.path: .*it begins with 65536, 196610; allowed 20240520"),
        ({"vocab_size": 2**23}, "task.vocab_size: found"),
    ],
)
def test_unfit_options_are_refused(more: dict[str, Any], expected: str, tmp_path: Path) -> None:
    options = {"path": str(nanogpt(tmp_path / "a.bin"))} | more
    with pytest.raises(ConfigError, match=f"^{expected}"):
        build_task("tokens", options, seq_len=8, seed=0)


def test_a_file_that_is_written_to_during_a_run_ends_it(tmp_path: Path) -> None:
    path = nanogpt(tmp_path / "a.bin", np.arange(50_000))
    task = build(path)
    os.truncate(path, 10)  # reading the mapped file would now end the process
    with pytest.raises(ResourceError, match="was written to while a run read it"):
        task.train_batch(1, 4)


def test_a_change_whose_time_is_put_back_ends_the_run_too(tmp_path: Path) -> None:
    path = nanogpt(tmp_path / "a.bin", np.arange(50_000))
    task, before = build(path), path.stat()
    with path.open("r+b") as file:
        file.write(b"\x01\x02")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(ResourceError, match="was written to while a run read it"):
        task.train_batch(1, 4)


def test_a_change_between_the_check_and_the_reading_ends_the_run_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = nanogpt(tmp_path / "a.bin", np.arange(50_000))
    task, empty = build(path), np.empty

    def change(*words: Any, **more: Any) -> Any:
        if isinstance(words[0], tuple):  # the windows; np.unique makes other arrays
            path.write_bytes(b"\xff" * path.stat().st_size)  # in place: token 65535
        return empty(*words, **more)

    monkeypatch.setattr(np, "empty", change)
    with pytest.raises(ResourceError, match="was written to while a run read it"):
        task.train_batch(1, 4)


def test_a_file_that_is_replaced_during_a_run_stays_as_it_was(tmp_path: Path) -> None:
    task = build(nanogpt(tmp_path / "a.bin"))
    nanogpt(tmp_path / "b.bin", RAMP + 5000)
    os.replace(tmp_path / "b.bin", tmp_path / "a.bin")
    before = shown(task)
    assert before < set(range(1000)) and len(before) > 850
    (tmp_path / "a.bin").unlink()
    assert shown(task) == before


def test_a_tokenizer_without_its_integration_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deepstack.tasks.token_files.import_extensions", lambda kind: [])
    (tmp_path / "a.txt").write_text("words")
    (tmp_path / "t.json").write_text("{}")
    with pytest.raises(ConfigError, match="no integrations/tokenizers"):
        build(tmp_path / "a.txt", tokenizer=str(tmp_path / "t.json"))
