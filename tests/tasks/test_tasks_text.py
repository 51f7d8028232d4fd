"""The text task: exact reference losses, exact masks, honest records, unfit texts refused."""

import hashlib
import math
import os
import re
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from deepstack.base.errors import ConfigError
from deepstack.tasks import IGNORE, Task, build_task
from deepstack.tasks.chance import given_shown
from deepstack.tasks.files import PIECE, find_files
from deepstack.tasks.text import MASK, Corpus, halves_of, read_corpus


def build(seq_len: int = 32, **options: object) -> Task:
    return build_task("text", options, seq_len=seq_len, seed=0)


def test_the_default_text_is_recorded() -> None:
    built, content = build(), read_corpus(None).content
    assert built.data == {
        "name": "cpython-topics",
        "sha256": hashlib.sha256(content).hexdigest(),
        "bytes": len(content),
        "licence": "PSF-2.0",
        "held_out_bytes": built.data["held_out_bytes"],
        "held_out": built.data["held_out"],
    }
    assert built.data["held_out_bytes"] == pytest.approx(len(content) / 10, rel=0.02)
    assert content.decode("utf-8").count("Python") > 100 and built.vocab_size == 257
    assert len(content) > 300_000
    if sys.version_info[:2] == (3, 11):
        assert len(content) == 466_273
    references = built.references_on(built.validation_set(512)[0])
    assert 3.1 < references["unigram_entropy"] < 3.4
    assert 2.8 < references["context_free_entropy"] < references["unigram_entropy"]
    assert built.optimal_loss(built.train_batch(1, 2)) is None


def write(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    return str(path)


def test_windows_are_uniform_over_the_whole_part(tmp_path: Path) -> None:
    path = write(tmp_path / "ramp.txt", bytes(range(128)))
    built = build(8, path=path, mask_rate=1, mask_split=[0, 0, 1])
    train, _ = halves_of(read_corpus(path), 0.1, 8)
    firsts = [part.tokens[i] for part in train.train for i in range(len(part.tokens) - 7)]
    counts = np.bincount(built.train_batch(1, 200 * len(firsts)).inputs[:, 0], minlength=256)
    assert set(np.flatnonzero(counts)) == set(firsts)  # the last window of each part too
    assert np.abs(counts[firsts] - 200).max() < 5 * math.sqrt(200)


@pytest.mark.parametrize("mask_split", [(0.8, 0.1, 0.1), (1.0, 0.0, 0.0), (0.2, 0.5, 0.3)])
def test_masks_are_exact_and_split_as_asked(mask_split: tuple[float, float, float]) -> None:
    built = build(64, mask_split=list(mask_split))
    plain = build(64, mask_rate=1, mask_split=[0, 0, 1])
    batch, tokens = built.train_batch(9, 2000), plain.train_batch(9, 2000).inputs
    predicted = batch.targets != IGNORE
    assert (predicted.sum(axis=1) == 10).all()
    # The windows are drawn first, so another mask leaves them alone.
    assert np.array_equal(batch.targets[predicted], tokens[predicted])
    assert np.array_equal(batch.inputs[~predicted], tokens[~predicted])
    assert np.array_equal(batch.masked, batch.inputs == MASK)
    show_mask, random, _ = mask_split
    changed = batch.inputs[predicted] != tokens[predicted]
    masked = batch.masked[predicted]
    n = predicted.sum()
    expected = random * 255 / 256  # one random byte in 256 is the byte itself
    for share, observed in [(show_mask, masked.mean()), (expected, (changed & ~masked).mean())]:
        assert abs(observed - share) <= 5 * math.sqrt(share * (1 - share) / n)
    if random > 0.3:
        counts = np.bincount(batch.inputs[predicted][changed & ~masked], minlength=256)
        assert counts.min() > 0, "every byte is noise, the first and the last too"
        chi_squared = ((counts - counts.mean()) ** 2).sum() / counts.mean()
        assert chi_squared < 600  # 255 degrees of freedom, but less of frequent bytes


def test_the_unigram_loss_is_that_of_the_validation_positions(tmp_path: Path) -> None:
    built = build(16, path=write(tmp_path / "ab.txt", b"a" * 600 + b"b" * 400))
    batch = built.validation_set(200)[0]
    train = np.concatenate([part.tokens for part in halves_of(*corpus_of(tmp_path), 16)[0].train])
    share = {byte: (int((train == byte).sum()) + 1) / (len(train) + 256) for byte in b"ab"}
    losses = [-math.log(share[byte]) for byte in batch.targets[batch.masked]]
    assert built.unigram_loss(batch) == pytest.approx(sum(losses) / len(losses))
    assert built.references_on(batch)["unigram_entropy"] == built.unigram_loss(batch)


def corpus_of(folder: Path) -> tuple[Corpus, float]:
    return read_corpus(str(folder / "ab.txt")), 0.1


@pytest.mark.parametrize("mask_split", [(0.8, 0.1, 0.1), (1, 0, 0), (0, 1, 0), (0.5, 0, 0.5)])
def test_the_loss_without_context_is_what_counting_gives(
    mask_split: tuple[float, float, float],
) -> None:
    """Bayes' rule by a table of the joint law of (true, shown) with all 257 that may be shown."""
    content = np.frombuffer(read_corpus(None).content, dtype=np.uint8)
    p = (np.bincount(content, minlength=256) + 1) / (len(content) + 256)
    m, r, k = mask_split
    law = np.concatenate([np.full((256, 256), r / 256), np.full((256, 1), m)], axis=1)
    law[np.arange(256), np.arange(256)] += k
    joint = p[:, None] * law
    true, shown = np.nonzero(joint)
    expected = (joint / np.where(joint.sum(axis=0) > 0, joint.sum(axis=0), 1))[true, shown]
    assert given_shown(p, mask_split)(shown, true) == pytest.approx(expected, abs=1e-12)
    # No predictor that sees the shown token does better on the batches of the task.
    built = build(64, mask_split=list(mask_split), mask_rate=1)
    batch = built.validation_set(2000)[0]
    exact = -(joint[true, shown] * np.log(expected)).sum()
    of_all = built.chance_losses(batch)
    assert of_all.mean() == pytest.approx(exact, abs=0.05)
    references = built.references_on(batch)
    if m < 1:
        assert references["context_free_entropy"] == pytest.approx(of_all.mean())
    if m > 0:
        masked = of_all[batch.masked].mean()
        assert references["unigram_entropy"] == pytest.approx(masked)


def test_a_folder_is_its_files_in_order(tmp_path: Path) -> None:
    folder = tmp_path / "books"
    (folder / "b").mkdir(parents=True)
    (folder / ".git").mkdir()
    write(folder / "b" / "1.txt", b"second")
    write(folder / "a.txt", "first \u00fc".encode())
    write(folder / "c.txt", b"third")
    write(folder / "empty.txt", b"")
    write(folder / ".hidden", b"\xff")
    write(folder / ".git" / "x", b"\xff")
    corpus = read_corpus(str(folder))
    assert corpus.name == "books" and corpus.content.decode() == "first \u00fc\n\nsecond\n\nthird"
    assert read_corpus(f"{folder}/*.txt").content.decode() == "first \u00fc\n\nthird"
    assert read_corpus(f"{folder}/**/[1c].txt").content == b"second\n\nthird"
    assert read_corpus(f"{folder}/*.txt").name == "*.txt"
    with pytest.raises(ConfigError, match=r"no file matches .*/\*\.md"):
        read_corpus(f"{folder}/*.md")


def test_a_path_may_be_relative_and_look_like_a_pattern(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "a1.txt", b"other")
    write(tmp_path / "a[1].txt", b"word")
    monkeypatch.chdir(tmp_path)
    assert (read_corpus("a[1].txt").name, read_corpus("a[1].txt").content) == ("a[1].txt", b"word")
    assert (read_corpus(".").name, read_corpus(".").content) == (tmp_path.name, b"other\n\nword")


@pytest.mark.parametrize("encoding", ["utf-16", "shift_jis"])
def test_other_encodings_become_utf8(encoding: str, tmp_path: Path) -> None:
    text = ("日本語 word\n" if encoding == "shift_jis" else "für word\n") * 200_000
    path = write(tmp_path / "a.txt", text.encode(encoding))
    assert read_corpus(path, encoding).content == text.encode()
    assert build(32, path=path, encoding=encoding).data["bytes"] == len(text.encode())
    for wrong in ("utf9", "zip"):
        with pytest.raises(ConfigError, match=r"task.encoding: found"):
            build(32, path=path, encoding=wrong)


def test_a_letter_may_lie_across_two_pieces(tmp_path: Path) -> None:
    content = b"a" * (PIECE - 1) + "€".encode() + b"b" * PIECE
    assert read_corpus(write(tmp_path / "a.txt", content)).content == content
    path = write(tmp_path / "b.txt", content[: PIECE + 1] + b"b")
    with pytest.raises(ConfigError, match=f"byte 0xe2 at position {PIECE - 1:,}"):
        read_corpus(path)


def test_tasks_of_several_seeds_share_one_text(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", b"word " * 100)
    first = read_corpus(path)
    assert read_corpus(path) is first and first.name == "a.txt"
    write(tmp_path / "a.txt", b"another " * 100)
    assert read_corpus(path).sha256 != first.sha256


@pytest.fixture
def unfit(tmp_path: Path) -> Path:
    """A folder with files and folders that are not text."""
    for name in ("hidden", "with_fifo"):
        (tmp_path / name).mkdir()
    write(tmp_path / "hidden" / ".a", b"text")
    os.mkfifo(tmp_path / "with_fifo" / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "huge").touch()
    os.truncate(tmp_path / "huge", 2**31 + 1)  # sparse: takes no space
    return tmp_path


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("missing.txt", "no such file or folder"),
        ("/dev/null", "/dev/null is not a regular file; allowed: a regular file"),
        ("hidden", "hidden ones skipped"),
        ("with_fifo", "pipe is not a regular file"),
        ("loop", "cannot read"),
        ("huge", "at most 2,147,483,648"),
        (b"", "is empty"),
        (b"abc\xffdef", "not UTF-8 text: byte 0xff at position 3"),
        (b"word " * 20, "the held-out part is too short: its longest piece has 10 tokens"),
    ],
)
def test_unfit_texts_are_refused(name: str | bytes, expected: str, unfit: Path) -> None:
    """name: of a path, or the content of a file."""
    path = write(unfit / "a.txt", name) if isinstance(name, bytes) else str(unfit / name)
    began = time.monotonic()
    with pytest.raises(ConfigError, match=rf"^task\.path: .*{re.escape(expected)}.*\Z") as raised:
        build(64, path=path)
    assert time.monotonic() - began < 1 and raised.value.key == "task.path"


def test_positions_that_are_shown_have_no_unigram_loss() -> None:
    task = build_task("text", {"mask_rate": 0.5}, seq_len=64, seed=3)
    batch = task.validation_batch(0, 16)
    assert task.unigram_loss(batch._replace(masked=np.zeros_like(batch.masked))) is None


def test_a_home_that_does_not_exist_is_a_missing_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.txt").write_text("words")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_files("~/text.txt")[1] == [tmp_path / "text.txt"]
    with pytest.raises(FileNotFoundError, match="no_such_user"):
        find_files("~no_such_user/text.txt")
