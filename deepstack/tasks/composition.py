"""Tasks whose answers compose k maps one after the other: larger k need more layers."""

import math
from dataclasses import replace
from itertools import accumulate, permutations
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from deepstack.base.errors import ConfigError
from deepstack.base.options import FirstDefault
from deepstack.tasks.registry import task
from deepstack.tasks.task import IGNORE, Batch, Task
from deepstack.tasks.windows import Floats, Integers

ALL_LEVELS = 32  # k up to which each k has its column; above, powers of two have one

OneStack = Literal["encoder", "decoder"]


@task("hops")
def hops(
    *,
    seq_len: int,
    seed: int,
    family: OneStack = "encoder",
    n: Annotated[int, Field(ge=2, le=4096, description="number of elements"), FirstDefault(8)] = 17,
    max_k: Annotated[int, Field(ge=1, le=1024, description="largest k of a query")] = 8,
    one_cycle: Annotated[
        bool,
        Field(description="whether p is one cycle; else k does not order difficulty"),
        FirstDefault(False),
    ] = True,
) -> Task:
    """target = p^k(s) for queries (s, k) on a permutation p: k look-ups, one after the other.

    A sequence has the n pairs (i, p(i)) in random order, then (seq_len - 2 n) / 2 queries of two
    tokens, s and n + k - 1. The answer is predicted at the second. p, s and k = 1 … max_k are
    uniform; p is another one in each sequence. A decoder gets the same batches.

    p is one cycle and max_k < n / 2, so that no way from s to the answer is shorter than k steps.
    With one_cycle=false p is any permutation and max_k is free. The cycle of s then has each length
    l = 1 … n equally often, and an answer takes min(k mod l, -k mod l) steps: a larger k is not
    always more difficult.

    Knowing nothing costs ln(n) nats, the reference "uniform_entropy". Knowing (s, k) and not p
    costs the reference "context_free_entropy", and unigram_loss in evals.csv: ln(n - 1) with one
    cycle. Otherwise p^k(s) = s with probability d/n, d the number of l <= n that divide k, and all
    other elements are equally likely. The best loss is 0.
    """
    queries, odd = divmod(seq_len - 2 * n, 2)
    if odd or queries < 1:
        text = f"{2 * n + 2}, {2 * n + 4}, …; here it is {seq_len}"
        raise ConfigError(
            f"task.n: found {n}, which needs task.seq_len = 2 n + 2 q for q queries: {text}",
            key="task.n",
        )
    if one_cycle and 2 * max_k >= n:
        fewer = f"task.max_k={(n - 1) // 2}, " if n > 2 else ""
        raise ConfigError(
            f"task.max_k: found {max_k} with task.n={n}; allowed below n / 2, as an answer is "
            f"nearer backwards along one cycle otherwise: give {fewer}task.n={2 * max_k + 1} or "
            "task.one_cycle=false",
            key="task.max_k",
        )
    stays = np.array([0.0 if one_cycle else share_that_returns(n, k) for k in range(max_k + 1)])

    def guess(batch: Batch) -> Floats:
        """Return P(answer | s, k)."""
        start, k = batch.inputs[:, 2 * n :: 2], batch.inputs[:, 2 * n + 1 :: 2] - n + 1
        same = batch.targets[:, 2 * n + 1 :: 2] == start
        p: Floats = np.where(same, stays[k], (1 - stays[k]) / (n - 1))
        return p.ravel()

    def draw(random: np.random.Generator, batch_size: int, held_out: bool) -> Batch:
        elements = np.tile(np.arange(n), (batch_size, 1))
        image = random.permuted(elements, axis=1)
        if one_cycle:  # the order of the elements along it
            order, image = image, elements.copy()
            np.put_along_axis(image, order, np.roll(order, -1, axis=1), axis=1)
        first = random.permuted(elements, axis=1)
        start = random.integers(n, size=(batch_size, queries))
        k = random.integers(1, max_k + 1, size=(batch_size, queries))
        answer = start
        for done in range(max_k):
            answer = np.where(done < k, np.take_along_axis(image, answer, axis=1), answer)
        inputs = np.empty((batch_size, seq_len), dtype=np.int64)
        inputs[:, ::2] = np.hstack([first, start])
        inputs[:, 1::2] = np.hstack([np.take_along_axis(image, first, axis=1), n + k - 1])
        targets = np.full_like(inputs, IGNORE)
        targets[:, 2 * n + 1 :: 2] = answer
        return Batch(inputs, targets, targets != IGNORE)

    task = Task("hops", n + max_k, seed, draw, guess=guess, level_of=lambda b: b.inputs - n + 1)
    without = np.mean([loss_of_guess(n, share) for share in stays[1:]])
    return with_uniform_answers(task, n, max_k, float(without))


def share_that_returns(n: int, k: int) -> float:
    """Return P(p^k(s) = s) for a uniform permutation p of n: the l <= n that divide k, over n."""
    return sum(k % length == 0 for length in range(1, n + 1)) / n


def loss_of_guess(n: int, share: float) -> float:
    """Return the entropy of an answer that is s with probability `share`, else any other of n."""
    others = (1 - share) / (n - 1)
    return -sum(p * math.log(p) * count for p, count in ((share, 1), (others, n - 1)) if p)


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
    NC^1 (Barrington 1989): no fixed depth suffices for all k, unless TC^0 = NC^1. A decoder gets
    the same batches.

    Knowing nothing costs ln(d!) nats, the reference "uniform_entropy"; the best loss is 0. The
    answer at k = 1 is the token shown there, which needs no attention. So loss_masked leaves it
    out, as the tasks with [MASK] do, and over all k a stack without attention gets to
    (1 - 1/seq_len) ln(d!), the reference "context_free_entropy".
    """
    elements = np.array(list(permutations(range(degree))))
    size = len(elements)
    # Permutations in lexicographic order are numbers in base d in rising order.
    base = degree ** np.arange(degree - 1, -1, -1)
    numbers = elements @ base

    def multiply(before: Integers, after: Integers) -> Integers:
        product = np.take_along_axis(elements[after], elements[before], axis=1)
        return np.searchsorted(numbers, product @ base)

    def draw(random: np.random.Generator, batch_size: int, held_out: bool) -> Batch:
        inputs = random.integers(size, size=(batch_size, seq_len))
        targets = np.stack([*accumulate(inputs.T, multiply)], axis=1)
        return Batch(inputs, targets, np.tile(levels > 1, (batch_size, 1)))

    levels = np.arange(1, seq_len + 1)
    task = Task("group", size, seed, draw, level_of=lambda b: np.tile(levels, (len(b.inputs), 1)))
    without = (1 - 1 / seq_len) * math.log(size)
    return with_uniform_answers(task, size, seq_len, without)


def with_uniform_answers(task: Task, answers: int, largest: int, without: float) -> Task:
    """Return the task with the records of answers that are uniform and follow from the inputs.

    answers: their number.
    largest: the largest k.
    without: the least loss over all predicted positions without the data that the answers depend
        on.  All k up to 32, powers of two above, and the largest have a column.
    """
    levels = range(1, largest + 1)
    return replace(
        task,
        references={"uniform_entropy": math.log(answers), "context_free_entropy": without},
        data={"name": task.name},
        exact_loss=lambda batch: 0.0,
        unigram=np.full(answers, 1 / answers),
        levels=tuple(k for k in levels if k <= ALL_LEVELS or k.bit_count() == 1 or k == largest),
    )
