"""Tasks whose answers compose k maps one after the other: larger k need more layers."""

import itertools
import math
from dataclasses import replace
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from deepstack.errors import ConfigError
from deepstack.tasks.task import IGNORE, Batch, Task, task

ALL_LEVELS = 32  # k up to which each k has its column; above, powers of two have one

OneStack = Literal["encoder", "decoder"]


@task("hops")
def hops(
    *,
    seq_len: int,
    seed: int,
    family: OneStack = "encoder",
    n: Annotated[int, Field(ge=2, le=4096, description="number of elements")] = 8,
    max_k: Annotated[int, Field(ge=1, le=1024, description="largest k of a query")] = 8,
    one_cycle: Annotated[
        bool, Field(description="whether p is one cycle, so that p^k(s) is not s for k < n")
    ] = False,
) -> Task:
    """target = p^k(s) for queries (s, k) on a permutation p: k look-ups, one after the other.

    A sequence has the n pairs (i, p(i)) in random order, then (seq_len - 2 n) / 2 queries of two
    tokens, s and n + k - 1. The answer is predicted at the second. p, s and k = 1 … max_k are
    uniform; p is another one in each sequence. Knowing nothing costs ln(n) nats, the reference
    "uniform_entropy"; the best loss is 0. A decoder gets the same batches.
    """
    queries, rest = divmod(seq_len - 2 * n, 2)
    if queries < 1 or rest:
        text = f"{2 * n + 2}, {2 * n + 4}, …; here it is {seq_len}"
        raise ConfigError(
            f"task.n: found {n}, which needs task.seq_len = 2 n + 2 q for q queries: {text}",
            key="task.n",
        )

    def draw(random: np.random.Generator, batch_size: int, held_out: bool) -> Batch:
        elements = np.tile(np.arange(n), (batch_size, 1))
        image = random.permuted(elements, axis=1)
        if one_cycle:  # the order of the elements along it
            order, image = image, elements.copy()
            np.put_along_axis(image, order, np.roll(order, -1, axis=1), axis=1)
        first = random.permuted(elements, axis=1)
        pairs = np.stack([first, np.take_along_axis(image, first, axis=1)], axis=2)
        start = random.integers(0, n, (batch_size, queries))
        k = random.integers(1, max_k + 1, (batch_size, queries))
        answer = start
        for done in range(max_k):
            answer = np.where(done < k, np.take_along_axis(image, answer, axis=1), answer)
        query = np.stack([start, n + k - 1], axis=2)
        inputs = np.hstack([pairs.reshape(batch_size, -1), query.reshape(batch_size, -1)])
        targets = np.full(inputs.shape, IGNORE)
        targets[:, 2 * n + 1 :: 2] = answer
        return Batch(inputs, targets, targets != IGNORE)

    task = Task("hops", n + max_k, seed, draw, level_of=lambda batch: batch.inputs - n + 1)
    return with_uniform_answers(task, n, max_k)


@task("group")
def group(
    *,
    seq_len: int,
    seed: int,
    family: OneStack = "encoder",
    degree: Annotated[int, Field(ge=2, le=6, description="d of the symmetric group S_d")] = 5,
) -> Task:
    """target_k = g_k g_{k-1} … g_1 in S_d: the product of the first k permutations.

    Tokens are the d! permutations of d things in lexicographic order, independent and uniform;
    g h applies h first. k is the position, from 1. From d = 5 on, such products are complete for
    NC^1 (Barrington 1989): no fixed depth suffices for all k, unless TC^0 = NC^1.
    Knowing nothing costs ln(d!) nats, the reference "uniform_entropy"; the best loss is 0. A
    decoder gets the same batches.
    """
    elements = np.array(list(itertools.permutations(range(degree))))
    size = len(elements)
    # Permutations in lexicographic order are numbers in base d in rising order.
    base = degree ** np.arange(degree - 1, -1, -1)
    numbers = elements @ base

    def draw(random: np.random.Generator, batch_size: int, held_out: bool) -> Batch:
        inputs = random.integers(0, size, (batch_size, seq_len))
        targets = inputs.copy()
        for k in range(1, seq_len):
            after, before = elements[inputs[:, k]], elements[targets[:, k - 1]]
            product = np.take_along_axis(after, before, axis=1)
            targets[:, k] = np.searchsorted(numbers, product @ base)
        return Batch(inputs, targets, np.ones(inputs.shape, dtype=bool))

    levels = np.arange(1, seq_len + 1)
    task = Task("group", size, seed, draw, level_of=lambda b: np.tile(levels, (len(b.inputs), 1)))
    return with_uniform_answers(task, size, seq_len)


def with_uniform_answers(task: Task, answers: int, largest: int) -> Task:
    """Return the task with the records of answers that are uniform and follow from the inputs.

    answers: their number.  largest: the largest k.
    """
    return replace(
        task,
        references={"uniform_entropy": math.log(answers)},
        data={"name": task.name},
        exact_loss=lambda batch: 0.0,
        unigram=np.full(answers, 1 / answers),
        levels=chosen_levels(largest),
    )


def chosen_levels(largest: int) -> tuple[int, ...]:
    """Return the k that have a column: all up to 32, powers of two above, and the largest."""
    powers = {2**i for i in range(largest.bit_length())}
    few = set(range(1, min(largest, ALL_LEVELS) + 1))
    return tuple(sorted(few | powers | {largest}))
