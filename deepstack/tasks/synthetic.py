"""Tasks whose data have a known distribution, so that the best possible loss is known too.

The answers of `hops` and `group` compose k maps one after the other: larger k need more layers.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, permutations
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from deepstack.base.errors import ConfigError
from deepstack.base.options import FirstDefault
from deepstack.config import Family
from deepstack.tasks.task import IGNORE, STRUCTURE, Batch, Task, choose_positions, task
from deepstack.tasks.windows import Floats, MaskRate

ALL_LEVELS = 32  # k up to which each k has its column; above, powers of two have one

Integers = NDArray[np.int64]
OneStack = Literal["encoder", "decoder"]
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


@task("markov")
def markov(
    *,
    seq_len: int,
    seed: int,
    family: Family = "encoder",
    states: Annotated[int, Field(ge=2, le=256, description="number of states")] = 16,
    concentration: Annotated[
        float, Field(ge=0.01, le=1000, description="of the Dirichlet rows: low is predictable")
    ] = 0.1,
    mask_rate: MaskRate = 0.15,
) -> Task:
    """P(x_i | x_{i-1}) = T[x_{i-1}, x_i]: fill in the [MASK]s of a random Markov chain.

    The run's seed determines the chain T: another seed gives a chain with other entropies. A
    sequence starts in the stationary distribution. Token [MASK] = `states` replaces exactly
    max(1, round(mask_rate seq_len)) tokens of each, and only these are predicted. The best
    possible loss on these positions is exact: `Task.optimal_loss`. The reference "unigram_entropy",
    the entropy of the stationary distribution in nats, is the loss of a predictor without context.

    A decoder predicts each next state, at best with T itself. An encoder-decoder reads the sequence
    with its [MASK]s and translates all of it into another language: state s becomes word[s], a
    permutation that the seed determines. It predicts each word from the words before.
    """
    structure = np.random.default_rng([seed, STRUCTURE])
    transition = random_chain(structure, states, concentration)
    start = stationary_distribution(transition)
    word = structure.permutation(states) if family == "encoder_decoder" else np.arange(states)
    state_of = np.argsort(word)
    length = seq_len + (family == "decoder")

    def draw(random: np.random.Generator, batch_size: int, held_out: bool) -> Batch:
        tokens = walk(random, transition, start, batch_size, length)
        if family == "decoder":
            return Batch(tokens[:, :-1], tokens[:, 1:], np.ones((batch_size, seq_len), dtype=bool))
        masked = choose_positions(random, batch_size, seq_len, max(1, round(mask_rate * seq_len)))
        shown = np.where(masked, states, tokens)
        if family == "encoder":
            return Batch(shown, np.where(masked, tokens, IGNORE), masked)
        target = word[tokens]
        # The inputs never show the predicted word, whether they show its state or not.
        hidden = np.ones_like(masked)
        return Batch(np.hstack([shown, shifted_right(target, states)]), target, hidden)

    def exact_loss(batch: Batch) -> float:
        if family == "decoder":
            p = transition[batch.inputs, batch.targets]
        else:
            shown = batch.inputs[:, :seq_len]
            before = shown if family == "encoder" else state_of[batch.targets]
            posterior = state_posterior(shown, before, transition, start)
            p = posterior[batch.masked, state_of[batch.targets[batch.masked]]]
        return float(-np.log(p).mean())

    return Task(
        name="markov",
        vocab_size=states + 1,
        seed=seed,
        draw=draw,
        references={"unigram_entropy": float(-(start * np.log(start)).sum())},
        data={"name": "markov"},
        exact_loss=exact_loss,
        unigram=start[state_of],
    )


def random_chain(random: np.random.Generator, states: int, concentration: float) -> Floats:
    """Draw T = 0.999 D + 0.001 / states, with the rows of D ~ Dirichlet(concentration).

    The small constant connects all states: without it a low concentration gives absorbing states
    and no unique stationary distribution. Returns (states, states).
    """
    rows = random.dirichlet(np.full(states, concentration), size=states)
    return 0.999 * rows + 0.001 / states


def stationary_distribution(transition: Floats) -> Floats:
    """Return the p with p = p T and sum(p) = 1, (states,)."""
    states = len(transition)
    # One of the equations p (T - 1) = 0 follows from the others; the sum takes its place.
    equations = transition.T - np.eye(states)
    equations[-1] = 1.0
    solution: Floats = np.linalg.solve(equations, np.eye(states)[-1])
    return solution


def walk(
    random: np.random.Generator, transition: Floats, start: Floats, batch_size: int, seq_len: int
) -> Integers:
    """Draw sequences of the chain, x_0 ~ start, x_i ~ T[x_{i-1}]. Returns (batch, seq)."""
    # Distribution functions without their last value, 1: counting the values that do not exceed u
    # then gives a state in 0..states-1 whatever the rounding. The last row is for the start.
    bounds = np.cumsum(np.vstack([transition, start]), axis=1)[:, :-1]
    tokens = [np.full(batch_size, len(start))]
    for u in random.random((seq_len, batch_size, 1)):
        tokens.append((bounds[tokens[-1]] <= u).sum(axis=1))
    return np.stack(tokens[1:], axis=1)


def state_posterior(shown: Integers, before: Integers, transition: Floats, start: Floats) -> Floats:
    """Return P(x_i = s | before_1 … before_{i-1}, shown_i … shown_n) for every position i.

    With before = shown it is the posterior of x_i given a whole sequence (Baum, Petrie, Soules and
    Weiss 1970, Ann. Math. Statist.). With the true states before, it is the distribution of the
    next state.

    It is f_i(s) e_i(s) b_i(s), rescaled over s. Here e_i(s) is 1 if shown_i is s or [MASK], else 0.
    For before_i this is d_i(s). The rest is f_i = T^T (d_{i-1} * f_{i-1}), b_{i-1} = T (e_i * b_i).

    shown, before: (batch, seq), [MASK] = states.

    Returns (batch, seq, states).
    """
    states = len(start)
    evidence = np.vstack([np.eye(states), np.ones(states)])

    def messages(tokens: Integers, matrix: Floats, first: Floats) -> Floats:
        """Return m_0 = first and m_i = (evidence of token i-1 * m_{i-1}) matrix."""
        result = [np.broadcast_to(first, (len(tokens), states))]
        for column in tokens.T[:-1]:
            result.append(rescaled(evidence[column] * result[-1]) @ matrix)
        return np.stack(result, axis=1)

    forward = messages(before, transition, start)
    backward = messages(shown[:, ::-1], transition.T, np.ones(states))[:, ::-1]
    return rescaled(forward * evidence[shown] * backward)


def rescaled(weights: Floats) -> Floats:
    """Return the weights with sum 1 over the last axis: no product of many of them underflows."""
    scaled: Floats = weights / weights.sum(axis=-1, keepdims=True)
    return scaled


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
