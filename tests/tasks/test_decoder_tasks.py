"""What decoders learn: translations, spans cut out of a text, the next byte."""

from functools import partial
from itertools import pairwise

import numpy as np
import pytest
from helpers.configs import config_with

from deepstack.config import with_overrides
from deepstack.errors import ConfigError
from deepstack.tasks import task_of
from deepstack.tasks.synthetic import random_chain, stationary_distribution
from deepstack.tasks.text import read_corpus

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
