"""The held-out part represents its text, and the validation set is one for a whole study."""

import math
import tracemalloc
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepstack.base.errors import ConfigError
from deepstack.config import Config, reading_text, with_overrides
from deepstack.tasks import IGNORE, TASKS, Task, build_task, task_families
from deepstack.tasks.held_out import given_split, held_out_numbers, split
from deepstack.tasks.parts import Part
from deepstack.tasks.text import read_corpus
from deepstack.tasks.windows import Reader


def part(first: int, end: int) -> Part:
    """Tokens whose values are their places in the text."""
    return Part(np.arange(first, end))


def tokens_of(parts: list[Part]) -> list[int]:
    return np.concatenate([part.tokens for part in parts]).tolist() if parts else []


@pytest.mark.parametrize("share", [0.1, 0.05, 0.3, 0.5, 0.75, 0.9, 0.001, 1e-6])
@pytest.mark.parametrize("total", [40, 1000, 20_000, 300_000])
def test_every_token_is_for_training_or_held_out(total: int, share: float) -> None:
    sizes = [total // 3, 0, total - total // 3]
    parts = [part(0, sizes[0]), part(0, 0), part(sizes[0], total)]
    halves = split(parts, sizes, share, 2)
    train, held = tokens_of(halves.train), tokens_of(halves.held)
    assert sorted(train + held) == list(range(total))
    length = halves.record["length"]
    assert abs(len(held) - share * total) <= length + 1
    assert len(halves.held) == len(halves.blocks) and halves.record["by"] == "blocks"
    assert halves.record["count"] == len(set(halves.blocks))
    for one in (*halves.train, *halves.held):  # no part crosses a border
        assert np.array_equal(one.tokens, np.arange(one.tokens[0], one.tokens[-1] + 1))
        assert (one.tokens[0] < sizes[0]) == (one.tokens[-1] < sizes[0])


def test_blocks_are_spread_over_the_text() -> None:
    """One of ten in turn, of 4,096 tokens in a large text."""
    total = 20_000_000
    halves = split([Part(np.zeros(total, dtype=np.uint8))], [total], 0.1, 64)
    record = halves.record
    assert record["length"] == pytest.approx(4096, abs=1) and record["count"] == 488
    assert {len(one.tokens) for one in halves.held} <= {record["length"], record["length"] + 1}
    gaps = [len(one.tokens) / record["length"] for one in halves.train[1:-1]]
    assert min(gaps) > 8.9 and max(gaps) < 9.1


@pytest.mark.parametrize(
    ("total", "window", "length"),
    [(466_273, 16, 364), (466_273, 256, 1026), (10_000_000, 16, 4096), (10_000_000, 4096, 16_393)],
)
def test_the_length_of_a_block_follows_the_text_and_the_window(
    total: int, window: int, length: int
) -> None:
    tokens = Part(np.zeros(total, dtype=np.uint8))
    assert split([tokens], [total], 0.1, window).record["length"] == pytest.approx(length, rel=1e-2)


@pytest.mark.parametrize("share", [Fraction(1, 10), Fraction(1, 3), Fraction(7, 10)])
@pytest.mark.parametrize("offset", [Fraction(1, 20), Fraction(1, 2), Fraction(19, 20)])
def test_one_of_every_few_is_held_out(share: Fraction, offset: Fraction) -> None:
    numbers = held_out_numbers(1000, share, offset)
    floors = [math.floor(share * i + offset) for i in range(1001)]
    assert numbers == [i for i in range(1000) if floors[i + 1] > floors[i]]


def test_the_split_is_the_most_representative_one() -> None:
    """Of each ten blocks the k-th has k/9 of b's: only the fifth and sixth are like the text."""
    length, tens = 90, 128
    block = [np.arange(length) < length * k // 9 for k in range(10)]
    text = np.concatenate(block * tens).astype(np.uint8)
    held = np.array(tokens_of(split([Part(text)], [len(text)], 0.1, 2).held))
    assert abs(held.mean() - 0.5) == pytest.approx(1 / 18, abs=1e-3)  # of the others up to 1/2


def test_whole_files_of_a_text_of_many_are_held_out(tmp_path: Path) -> None:
    for i in range(120):
        (tmp_path / f"{i:03}.txt").write_text(f"{i:03} " * 50)
    task = build_task("text", {"path": str(tmp_path)}, seq_len=16, seed=0, family="decoder")
    assert task.data["held_out"] == {"by": "files", "count": 12}
    batch, blocks = task.validation_set(240)
    words = ["".join(map(chr, row)).split()[1:-1] for row in batch.inputs]
    held = {word for row in words for word in row}
    assert len(held) == 12 and sorted(set(blocks.tolist())) == list(range(12))
    assert all(len(set(row)) == 1 for row in words)  # no window has two files
    seen = "".join(map(chr, task.train_batch(1, 500).inputs.ravel()))
    assert not any(f" {word} " in seen for word in held)
    few = {file: file.write_text("words " * 50) for file in list(tmp_path.iterdir())[:50]}
    for file in few:
        file.unlink()
    task = build_task("text", {"path": str(tmp_path)}, seq_len=16, seed=0)
    assert task.data["held_out"]["by"] == "blocks"  # of fewer than 100 files


def test_a_held_out_path_is_cut_into_blocks_for_the_standard_error() -> None:
    halves = given_split([part(0, 1000)], [part(5000, 6000), part(7000, 7500)], 10)
    assert tokens_of(halves.train) == list(range(1000))
    assert tokens_of(halves.held) == [*range(5000, 6000), *range(7000, 7500)]
    assert halves.record == {"by": "path", "count": 37, "length": 40}
    assert set(halves.blocks) == set(range(37))


@pytest.mark.parametrize("files", [1, 80])
def test_windows_never_have_tokens_of_both_sides(files: int) -> None:
    """Some blocks of a text of many files lie in two of them."""
    size = 50_000 // files
    texts = [part(i * size, (i + 1) * size) for i in range(files)]
    halves = split(texts, [size] * files, 0.1, 17)
    assert (len(set(halves.blocks)) < len(halves.blocks)) == (files > 1)
    held = set(tokens_of(halves.held))
    source = Reader("decoder", 16, 0.15, (1, 0, 0), 3).source(50_000, halves)
    random = np.random.default_rng(0)
    assert not set(source.draw(random, 5000, False).inputs.ravel().tolist()) & held
    batch, blocks = source.draw_validation(random, 0, 3000)
    assert set(batch.inputs.ravel().tolist()) <= held
    places = {token: i for i, one in enumerate(halves.held) for token in one.tokens.tolist()}
    there = [halves.blocks[places[token]] for token in batch.inputs[:, 0].tolist()]
    assert there == blocks.tolist()


def text_task(seed: int, **options: Any) -> Task:
    return build_task("text", options, seq_len=16, seed=seed)


def equal(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", [name for name in TASKS if name not in ("markov", "tokens")])
def test_all_seeds_have_one_validation_set(name: str) -> None:
    """Of a Markov chain the seed determines the chain itself."""
    family = task_families(name)[-1]
    options = {"n": 3, "max_k": 1} if name == "hops" else {}
    tasks = [build_task(name, options, seq_len=16, seed=seed, family=family) for seed in (0, 7)]
    sets = [task.validation_set(150) for task in tasks]
    assert equal(sets[0][0], sets[1][0]) and np.array_equal(sets[0][1], sets[1][1])
    assert not equal(*(task.train_batch(1, 8) for task in tasks))
    # The batch size does not matter, and a smaller set is the beginning of a larger one.
    batches = [tasks[0].validation_batch(i, 25) for i in range(6)]
    for array, parts in zip(sets[0][0], zip(*batches, strict=True), strict=True):
        assert np.array_equal(array, np.concatenate(parts))
    assert equal(tasks[0].validation_set(50)[0], sets[0][0].rows(slice(50)))
    assert equal(tasks[0].validation_set(60, 90)[0], sets[0][0].rows(slice(90, 150)))


@pytest.mark.parametrize("count", [128, 300, 1216])
def test_the_validation_set_is_spread_over_the_blocks(count: int) -> None:
    _, blocks = text_task(0).validation_set(count)
    numbers = np.bincount(blocks, minlength=128)
    assert len(numbers) == 128 and np.abs(numbers - count / 128).max() <= 2


@pytest.mark.parametrize("source", ["topics", "stdlib"])
@pytest.mark.parametrize("family", ["encoder", "decoder"])
def test_no_constant_guess_is_better_than_chance_by_more_than_its_error(
    family: str, source: str
) -> None:
    """The best guess is chosen in hindsight, from the validation positions themselves."""
    task = build_task("text", {"source": source}, seq_len=32, seed=0, family=family)
    batch, blocks = task.validation_set(1024 if family == "encoder" else 256)
    losses = task.chance_losses(batch)
    chance = losses[batch.masked].mean()
    counts = np.bincount(batch.targets[batch.masked])
    shares = counts[counts > 0] / counts.sum()
    hindsight = -(shares * np.log(shares)).sum()
    means = [losses[blocks == b][batch.masked[blocks == b]].mean() for b in np.unique(blocks)]
    error = np.std(means, ddof=1) / math.sqrt(len(means))
    assert 0 < chance - hindsight < error and error < 0.1
    of_all = losses[batch.targets != IGNORE].mean()
    assert (of_all < chance) == (family == "encoder")  # some positions show their byte


@pytest.mark.parametrize("source", ["topics", "stdlib"])
def test_the_held_out_text_is_like_the_training_text(source: str) -> None:
    """The best constant guess of held-out bytes is hardly better than training frequencies."""
    task = build_task("text", {"source": source}, seq_len=16, seed=0)
    assert task.unigram is not None
    content = np.frombuffer(read_corpus(None, source=source).content, dtype=np.uint8)
    every = np.bincount(content, minlength=256)
    held = every - np.round(task.unigram * (task.training_tokens + 256) - 1)
    assert held.sum() == task.data["held_out_bytes"] and held.min() >= 0
    shares = held / held.sum()
    best = -(shares[shares > 0] * np.log(shares[shares > 0])).sum()
    assert -(shares * np.log(task.unigram)).sum() - best < 0.01  # 0.104 of the last tenth of topics


def test_the_standard_library_is_a_text_of_files() -> None:
    task, corpus = text_task(0, source="stdlib"), read_corpus(None, source="stdlib")
    assert task.data["name"] == "cpython-stdlib" and task.data["licence"] == "PSF-2.0"
    assert task.data["held_out"]["by"] == "files" and len(corpus.file_sizes) > 300
    assert sum(corpus.file_sizes) == len(corpus.content) > 5_000_000
    assert b"def dataclass(" in corpus.content and b"/site-packages/numpy" not in corpus.content
    assert read_corpus(None, source="stdlib") is corpus  # read once
    with pytest.raises(ConfigError, match=r"task.source: found stdlib beside task.path=a.txt"):
        text_task(0, source="stdlib", path="a.txt")


def test_a_text_counts_how_often_it_is_read() -> None:
    task = text_task(0)
    config = with_overrides(Config(), {"train.steps": 1000, "train.batch_size": 64})
    times = 1000 * 64 * 16 / (task.data["bytes"] - task.data["held_out_bytes"])
    assert task.times_read(config) == pytest.approx(times)
    assert reading_text([0.1234]) == "the text is read 0.12 times"
    assert "read 0.12 to 5.9 times: above 2 " in reading_text([0.1234, 5.87])
    assert build_task("copy", {}, seq_len=16, seed=0).times_read(config) is None


def test_a_small_share_of_a_huge_text_takes_little_memory() -> None:
    """Ten billion tokens, of which ten thousand are held out in 128 blocks."""
    tokens = np.broadcast_to(np.zeros(1, dtype=np.uint8), 10**10)
    tracemalloc.start()
    halves = split([Part(tokens)], [10**10], 1e-6, 16)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()
    assert halves.record == {"by": "blocks", "length": 78, "count": 128}


@pytest.mark.parametrize(
    ("sizes", "share", "window", "by"),
    [([4000] * 12, 0.9, 16, "blocks"), ([20] * 200, 0.1, 64, "blocks")],
)
def test_few_files_and_files_below_a_window_are_divided_by_blocks(
    sizes: list[int], share: float, window: int, by: str
) -> None:
    tokens = np.random.default_rng(0).integers(0, 256, sum(sizes)).astype(np.uint8)
    assert split([Part(tokens)], sizes, share, window).record["by"] == by
