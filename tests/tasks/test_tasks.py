"""Tasks: exact references against brute force, pure batches, validated options, refused texts."""

import itertools
import math
import subprocess
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from helpers.configs import config_with

from deepstack.base.errors import ConfigError, PluginError
from deepstack.config import with_overrides
from deepstack.tasks import IGNORE, TASKS, Batch, Task, build_task, task, task_of, task_options
from deepstack.tasks.markov import markov, random_chain, stationary_distribution, walk
from deepstack.tasks.task import STRUCTURE, choose_positions
from deepstack.tasks.text import read_corpus

NAMES = [name for name in TASKS.names() if name != "tokens"]  # which reads a file of the user's


def build(name: str, seq_len: int = 32, seed: int = 0, **options: object) -> Task:
    return build_task(name, options, seq_len=seq_len, seed=seed)


# Every task


@pytest.mark.parametrize("name", NAMES)
def test_batches_depend_on_seed_stream_and_step_alone(name: str) -> None:
    def batches(built: Task) -> list[Batch]:
        drawn = [built.train_batch(1, 4), built.train_batch(0, 4), built.probe_batch(4)]
        return [*drawn, built.validation_batch(1, 4), built.validation_batch(0, 4)]

    built = build(name, 64)
    first = batches(built)
    for a, b in zip(first, batches(built), strict=True):
        assert all(map(np.array_equal, a, b))
    for a, b in itertools.combinations([*first, build(name, 64, 1).train_batch(1, 4)], 2):
        assert a.inputs.shape == (4, 64) and not np.array_equal(a.inputs, b.inputs)


MEMORY = r"""
import re, sys
from deepstack.tasks import build_task
def peak():
    return int(re.search(r"VmHWM:\s+(\d+)", open("/proc/self/status").read())[1]) * 1024
before = peak()
task = build_task(sys.argv[1], {"path": sys.argv[2]}, seq_len=64, seed=0)
task.train_batch(0, 64), task.validation_batch(0, 64)
print(peak() - before, task.memory, "torch" in sys.modules)
"""
BLOCKS = {
    "text": "words and more wörds in a text of many lines\n".encode() * 1000,
    "tokens": np.random.default_rng(0).integers(0, 50_000, 10**6).astype("<u2").tobytes(),
}


@pytest.mark.parametrize("megabytes", [80, pytest.param(300, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", BLOCKS)
def test_a_large_file_takes_its_size_as_text_and_little_as_tokens(
    name: str, megabytes: int, tmp_path: Path
) -> None:
    """In a process that does not import torch."""
    path = tmp_path / "large.bin"
    with path.open("wb") as file:
        while file.tell() < megabytes * 10**6:
            file.write(BLOCKS[name])
    words = [sys.executable, "-c", MEMORY, name, path]
    out = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    used, estimate, imported = out.split()
    assert imported == "False"
    if name == "tokens":
        assert int(used) < 40e6 + 0.2e6 * megabytes
    else:
        assert int(estimate) == path.stat().st_size
        assert 0.9 * int(estimate) < int(used) < 1.3 * int(estimate)


def test_chosen_positions_are_exact_and_uniform() -> None:
    chosen = choose_positions(np.random.default_rng(0), 4000, 10, 3)
    assert (chosen.sum(axis=1) == 3).all()
    # Standard deviation of each mean is sqrt(0.3 * 0.7 / 4000) = 0.0072.
    assert np.abs(chosen.mean(axis=0) - 0.3).max() < 5 * 0.0072
    assert choose_positions(np.random.default_rng(0), 9, 10, 10).all()
    assert (build("markov", 10, mask_rate=1e-9).train_batch(1, 9).masked.sum(axis=1) == 1).all()


# Options


def test_options_are_listed_with_type_default_and_description() -> None:
    options = task_options("text")
    assert options["path"].type == "non-empty text or null"
    assert options["mask_split"].type == "a list of 3 values, each a number from 0 to 1"
    assert options["mask_rate"].default == 0.15
    for name in NAMES:
        assert all(option.description for option in task_options(name).values())


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("text", {"mask_rat": 0.2}, ["task.mask_rat:", "did you mean 'mask_rate'?", "mask_split"]),
        ("text", {"mask_rate": 0.0}, ["task.mask_rate: found 0.0; allowed a number above 0 up"]),
        ("text", {"mask_rate": "0.5"}, ['task.mask_rate: found "0.5"; allowed a number']),
        ("text", {"mask_split": [0.5, 0.1, 0.1]}, ["the three shares must sum to 1"]),
        ("text", {"mask_rate": 2, "x": 1, "held_out": 2}, ["task.mask_rate", "task.x", "held_out"]),
        ("hops", {"n": 16}, ["task.n: found 16, which needs task.seq_len = 2 n + 2 q for"]),
        ("markov", {"states": 1}, ["task.states: found 1; allowed an integer from 2 to 256"]),
    ],
)
def test_bad_options_are_refused(
    name: str, options: dict[str, object], expected: list[str]
) -> None:
    with pytest.raises(ConfigError) as raised:
        build_task(name, options, seq_len=32, seed=0)
    message = str(raised.value)
    assert len(message.splitlines()) == len(options)
    assert raised.value.key == f"task.{next(iter(options))}"
    assert [part for part in expected if part not in message] == []


def test_a_function_that_is_not_a_task_is_refused() -> None:
    def positional(seq_len: int, seed: int) -> Task: ...

    def bare(*, seq_len: int, seed: int, size=3) -> Task: ...  # type: ignore[no-untyped-def]

    def seedless(*, seq_len: int) -> Task: ...

    def silent(*, seq_len: int, seed: int) -> Task: ...

    def vague(*, seq_len: int, seed: int, family: str) -> Task: ...

    for function, message in (
        (positional, "parameter 'seq_len' must be keyword-only"),
        (bare, "'size' must be keyword-only; an option also needs a type annotation"),
        (seedless, "needs the parameters seq_len and seed"),
        (silent, "needs a docstring"),
        (vague, "parameter 'family' must be a Literal"),
    ):
        function.__doc__ = None if function is silent else "Docstring."
        with pytest.raises(PluginError, match=f"task 'mine': .*{message}"):
            task("mine")(function)
        assert "mine" not in TASKS


def test_a_configuration_has_a_list_for_a_tuple() -> None:
    @task("mine")
    def mine(*, seq_len: int, seed: int, pair: tuple[float, float] = (0.0, 1.0)) -> Task:
        """Return a task that has its pair as data."""
        return Task("mine", 64, seed, build("copy").draw, data={"pair": pair})

    built = build_task("mine", {"pair": [0.25, 0.75]}, seq_len=32, seed=0)
    assert built.data == {"pair": (0.25, 0.75)}
    with pytest.raises(ConfigError, match=r"found .*; allowed a list of 2 values, each a number"):
        build_task("mine", {"pair": [0.25, "0.75"]}, seq_len=32, seed=0)


# copy and reverse


@pytest.mark.parametrize(("name", "order"), [("copy", 1), ("reverse", -1)])
def test_copy_and_reverse(name: str, order: int) -> None:
    built = build(name, vocab_size=7)
    batch = built.train_batch(1, 400)
    assert np.array_equal(batch.targets, batch.inputs[:, ::order]) and not batch.masked.any()
    assert built.vocab_size == 7 and built.optimal_loss(batch) is None
    assert built.references == {"uniform_entropy": pytest.approx(math.log(7))}
    shares = np.bincount(batch.inputs.ravel(), minlength=7) / batch.inputs.size
    assert np.abs(shares - 1 / 7).max() < 5 * math.sqrt(1 / 7 / batch.inputs.size)


# markov


@pytest.mark.parametrize(("states", "concentration"), [(2, 1000.0), (16, 0.1), (256, 0.01)])
def test_the_chain_is_stochastic_and_its_start_stationary(
    states: int, concentration: float
) -> None:
    transition = random_chain(np.random.default_rng(1), states, concentration)
    start = stationary_distribution(transition)
    assert transition.shape == (states, states)
    assert (transition > 0).all() and (start > 0).all()
    np.testing.assert_allclose(transition.sum(axis=1), 1, atol=1e-12)
    np.testing.assert_allclose(start @ transition, start, atol=1e-12)


def test_the_walk_follows_the_chain() -> None:
    transition = random_chain(np.random.default_rng(1), 4, 1.0)
    start = stationary_distribution(transition)
    tokens = walk(np.random.default_rng(0), transition, start, 4000, 21)
    for i in (0, 10, 20):
        shares = np.bincount(tokens[:, i], minlength=4) / 4000
        assert np.abs(shares - start).max() < 5 * math.sqrt(0.25 / 4000)
    counts = np.zeros((4, 4))
    np.add.at(counts, (tokens[:, :-1], tokens[:, 1:]), 1)
    seen = counts.sum(axis=1, keepdims=True)
    assert (np.abs(counts / seen - transition) < 5 * np.sqrt(0.25 / seen)).all()


@pytest.mark.parametrize("mask_rate", [0.2, 0.5, 1.0])
def test_the_optimal_loss_equals_brute_force_enumeration(mask_rate: float) -> None:
    states, seq_len, seed = 3, 6, 5
    built = build("markov", seq_len, seed, states=states, mask_rate=mask_rate, concentration=0.5)
    transition = random_chain(np.random.default_rng([seed, STRUCTURE]), states, 0.5)
    start = stationary_distribution(transition)
    batch = built.train_batch(1, 8)
    losses = []
    for shown, truth, masked in zip(*batch, strict=True):
        weights = np.zeros((seq_len, states))
        for sequence in itertools.product(range(states), repeat=seq_len):
            if all(m or s == x for m, s, x in zip(masked, shown, sequence, strict=True)):
                steps = itertools.pairwise(sequence)
                weight = start[sequence[0]] * math.prod(transition[a, b] for a, b in steps)
                weights[np.arange(seq_len), sequence] += weight
        posterior = weights / weights.sum(axis=1, keepdims=True)
        losses += [-math.log(posterior[i, truth[i]]) for i in np.flatnonzero(masked)]
    assert built.optimal_loss(batch) == pytest.approx(np.mean(losses), rel=1e-12)


def test_the_default_chain_leaves_much_to_learn_and_is_masked_exactly() -> None:
    built = build("markov", 64)
    optimal = built.optimal_loss(built.validation_batch(0, 64))
    assert optimal < 0.6 * built.references["unigram_entropy"]
    batch = built.train_batch(3, 16)
    assert (batch.masked.sum(axis=1) == 10).all()
    for where in (batch.targets != IGNORE, batch.inputs == 16):
        assert np.array_equal(batch.masked, where)
    assert (built.vocab_size, built.data) == (17, {"name": "markov"})
    assert build("markov", seed=1).references != built.references


def test_the_optimal_loss_of_a_long_sequence_does_not_underflow() -> None:
    built = build("markov", 5000, states=3, concentration=0.05, mask_rate=0.9)
    with np.errstate(all="raise"):
        loss = built.optimal_loss(built.train_batch(1, 2))
    assert loss is not None and 0 < loss < math.log(3)


# --- decoders: translations, spans cut out of a text, the next byte -------------------------------


config = partial(config_with, {"task.name": "markov", "task.seq_len": 8})


def test_a_markov_translation_has_an_exact_optimum() -> None:
    """Enumerating all sequences gives the probability of each next word."""
    task = task_of(config(model__family="encoder_decoder", task__seq_len=4, task__states=3))
    batch = task.validation_batch(0, 5)
    structure = np.random.default_rng([0, 4])
    chain = random_chain(structure, 3, 0.1)
    start, word = stationary_distribution(chain), structure.permutation(3)
    total = 0.0
    everything = list(np.ndindex(3, 3, 3, 3))
    for inputs, target in zip(batch.inputs, batch.targets, strict=True):
        shown, truth = inputs[:4], [int(np.flatnonzero(word == w)[0]) for w in target]
        assert (inputs[4:] == [3, *target[:-1]]).all()
        fitting = [s for s in everything if all(o in (3, t) for o, t in zip(shown, s, strict=True))]
        weight = {s: start[s[0]] * np.prod([chain[a, b] for a, b in pairwise(s)]) for s in fitting}
        for i in range(4):
            before = [w for s, w in weight.items() if list(s[:i]) == truth[:i]]
            right = [w for s, w in weight.items() if list(s[: i + 1]) == truth[: i + 1]]
            total -= np.log(sum(right) / sum(before))
    assert task.optimal_loss(batch) == pytest.approx(total / 20, rel=1e-9)


def test_spans_are_cut_out_and_become_targets() -> None:
    given = config(model__family="encoder_decoder", task__name="text", task__seq_len=20)
    batch = task_of(given).train_batch(1, 300)
    source, shown = batch.inputs[:, :20], batch.inputs[:, 20:]
    assert shown.shape == (300, 3) and ((source == 256).sum(axis=1) == 1).all()
    assert (shown[:, 0] == 256).all() and (shown[:, 1:] == batch.targets[:, :-1]).all()
    counts = (source == 256).sum(axis=0)  # each of 20 places equally likely: 15 +- 3.8
    assert counts.min() > 0 and counts.max() < 15 + 6 * 3.8
    several = with_overrides(given, {"task.mask_rate": 0.5, "task.span": 2})
    batch = task_of(several).train_batch(1, 300)
    is_mask = batch.inputs[:, :20] == 256
    assert (is_mask.sum(axis=1) == 5).all() and not (is_mask[:, 1:] & is_mask[:, :-1]).any()
    with pytest.raises(ConfigError, match=r"task\.span: found 30"):
        task_of(with_overrides(given, {"task.span": 30}))


def test_a_cut_window_put_together_is_text() -> None:
    """The source with its spans filled in again is a stretch of the held-out text."""
    sizes = {"task__seq_len": 20, "task__mask_rate": 0.4}
    given = config(model__family="encoder_decoder", task__name="text", **sizes)
    text = read_corpus(None).content
    batch = task_of(given).validation_batch(0, 6)
    for inputs, target in zip(batch.inputs, batch.targets, strict=True):
        spans = iter(target.reshape(-1, 3))
        whole = [b for token in inputs[:20] for b in (next(spans) if token == 256 else [token])]
        assert bytes(np.array(whole, dtype=np.uint8)) in text


def test_a_decoder_of_text_predicts_the_next_byte() -> None:
    batch = task_of(config(model__family="decoder", task__name="text")).train_batch(3, 4)
    assert (batch.inputs[:, 1:] == batch.targets[:, :-1]).all() and batch.masked.all()


def test_the_unigram_of_a_chain_is_of_the_words_that_are_predicted() -> None:
    """An encoder-decoder predicts words, which are not in the order of the states."""
    chain = markov(seq_len=8, seed=0, family="encoder_decoder", states=4)
    targets = chain.draw(np.random.default_rng(0), 4000, False).targets
    shares = np.bincount(targets.ravel(), minlength=4)[:4] / targets.size
    assert shares == pytest.approx(np.asarray(chain.unigram)[:4], abs=0.02)
