"""Tasks that repeat their input: `copy` and `reverse`."""

import math
from collections.abc import Callable
from typing import Annotated

import numpy as np
from pydantic import Field

from deepstack.config import Family
from deepstack.tasks.registry import task
from deepstack.tasks.task import IGNORE, Batch, Task
from deepstack.tasks.windows import Integers

VocabSize = Annotated[int, Field(ge=2, le=65536, description="number of different tokens")]


@task("copy")
def copy(
    *, seq_len: int, seed: int, family: Family = "encoder", vocab_size: VocabSize = 16
) -> Task:
    """target_i = input_i: predict the tokens that are shown, the task that needs no layer at all.

    Tokens are independent and uniform; every position is predicted. Knowing nothing costs
    ln(vocab_size) nats, the reference "uniform_entropy". A decoder is shown some tokens and a mark,
    token vocab_size, and repeats the last half of them; an encoder-decoder translates.
    """
    return repeated("copy", seq_len, seed, family, vocab_size, lambda tokens: tokens)


@task("reverse")
def reverse(
    *, seq_len: int, seed: int, family: Family = "encoder", vocab_size: VocabSize = 16
) -> Task:
    """target_i = input_{n-1-i}: predict the sequence backwards, which needs attention by position.

    n is seq_len. Tokens are independent and uniform; every position is predicted. Knowing nothing
    costs ln(vocab_size) nats, the reference "uniform_entropy". A decoder is shown some tokens and a
    mark, token vocab_size, and repeats the last half backwards; an encoder-decoder translates.

    An encoder of odd n reads the middle answer at its own position. Without attention the loss is
    (1 - 1/n) ln(vocab_size) then, the reference "context_free_entropy".
    """
    built = repeated("reverse", seq_len, seed, family, vocab_size, lambda tokens: tokens[:, ::-1])
    if family == "encoder" and seq_len % 2:
        without = (1 - 1 / seq_len) * math.log(vocab_size)
        built.references["context_free_entropy"] = without
    return built


def repeated(
    name: str,
    seq_len: int,
    seed: int,
    family: Family,
    vocab_size: int,
    answer: Callable[[Integers], Integers],
) -> Task:
    """Build a task that predicts answer(u) from uniform tokens u.

    | family          | inputs (mark = vocab_size)           | targets                          |
    |-----------------|--------------------------------------|----------------------------------|
    | encoder         | u                                    | answer(u)                        |
    | decoder         | u, mark, y without its last token    | nothing over u, then y           |
    | encoder_decoder | u; mark, answer(u) without its last  | answer(u)                        |

    y = answer(the last seq_len // 2 tokens of u); the length of u makes the inputs seq_len long.
    """
    count = seq_len // 2 if family == "decoder" else seq_len
    length = seq_len - count if family == "decoder" else seq_len

    def draw(random: np.random.Generator, batch_size: int, held_out: bool) -> Batch:
        tokens = random.integers(vocab_size, size=(batch_size, length))
        targets = answer(tokens[:, -count:])
        if family == "encoder":
            return Batch(tokens, targets, np.zeros(targets.shape, dtype=bool))
        inputs = np.hstack([tokens, shifted_right(targets, vocab_size)])
        if family == "decoder":
            targets = np.hstack([np.full_like(tokens, IGNORE), targets])
        return Batch(inputs, targets, targets != IGNORE)

    return Task(
        name=name,
        vocab_size=vocab_size + (family != "encoder"),
        seed=seed,
        draw=draw,
        references={"uniform_entropy": math.log(vocab_size)},
        unigram=None if family == "encoder" else np.full(vocab_size, 1 / vocab_size),
        data={"name": name},
    )


def shifted_right(targets: Integers, mark: int) -> Integers:
    """Return the decoder's input: a mark, then the targets without their last token."""
    return np.insert(targets[:, :-1], 0, mark, axis=1)
