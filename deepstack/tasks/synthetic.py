"""Tasks whose data have a known distribution, so that the best possible loss is known too.

The answers of `hops` and `group` compose k maps one after the other: larger k need more layers.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from deepstack.config import Family
from deepstack.errors import ConfigError
from deepstack.tasks.task import IGNORE, STRUCTURE, Batch, Task, choose_positions, task
from deepstack.tasks.windows import Floats, MaskRate

ALL_LEVELS = 32  # k up to which each k has its column; above, powers of two have one

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
    """
    return repeated("reverse", seq_len, seed, family, vocab_size, lambda tokens: tokens[:, ::-1])


def repeated(
    name: str,
    seq_len: int,
    seed: int,
    family: Family,
    vocab_size: int,
    answer: Callable[[NDArray[np.int64]], NDArray[np.int64]],
) -> Task:
    """Build a task that predicts answer(u) from uniform tokens u.

    | family          | inputs (mark = vocab_size)           | targets                          |
    |-----------------|--------------------------------------|----------------------------------|
    | encoder         | u                                    | answer(u)                        |
    | decoder         | u, mark, y without its last token    | nothing over u, then y           |
    | encoder_decoder | u; mark, answer(u) without its last  | answer(u)                        |

    y = answer(the last seq_len // 2 tokens of u); the length of u makes the inputs seq_len long.
    """
    half = seq_len // 2
    shown = seq_len - half if family == "decoder" else seq_len

    def draw(random: np.random.Generator, batch_size: int, held_out: bool) -> Batch:
        tokens = random.integers(0, vocab_size, (batch_size, shown))
        if family == "encoder":
            target = np.ascontiguousarray(answer(tokens))
            return Batch(tokens, target, np.zeros(tokens.shape, dtype=bool))
        target = answer(tokens[:, -half:] if family == "decoder" else tokens)
        mark = np.full((batch_size, 1), vocab_size)
        inputs = np.hstack([tokens, mark, target[:, :-1]])
        if family == "decoder":
            target = np.hstack([np.full((batch_size, shown), IGNORE), target])
        return Batch(inputs, np.ascontiguousarray(target), target != IGNORE)

    return Task(
        name=name,
        vocab_size=vocab_size + (family != "encoder"),
        seed=seed,
        draw=draw,
        references={"uniform_entropy": math.log(vocab_size)},
        data={"name": name},
        unigram=None if family == "encoder" else np.full(vocab_size, 1 / vocab_size),
    )


@task("markov")
def markov(
    *,
    seq_len: int,
    seed: int,
    family: Family = "encoder",
    states: Annotated[int, Field(ge=2, le=256, description="number of states")] = 16,
    concentration: Annotated[
        float,
        Field(ge=0.01, le=1000, description="of the Dirichlet rows: low is predictable"),
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
    length = seq_len + (family == "decoder")

    def draw(random: np.random.Generator, batch_size: int, held_out: bool) -> Batch:
        tokens = walk(random, transition, start, batch_size, length)
        if family == "decoder":
            return Batch(
                tokens[:, :-1].copy(), tokens[:, 1:].copy(), np.ones_like(tokens[:, 1:], bool)
            )
        masked = choose_positions(random, batch_size, seq_len, max(1, round(mask_rate * seq_len)))
        shown = np.where(masked, states, tokens)
        if family == "encoder":
            return Batch(shown, np.where(masked, tokens, IGNORE), masked)
        target = word[tokens]
        begin = np.full((batch_size, 1), states)
        # The inputs never show the predicted word, whether they show its state or not.
        hidden = np.ones(target.shape, dtype=bool)
        return Batch(np.hstack([shown, begin, target[:, :-1]]), target, hidden)

    def exact_loss(batch: Batch) -> float:
        if family == "decoder":
            return float(-np.log(transition[batch.inputs, batch.targets]).mean())
        if family == "encoder":
            posterior = forward_backward(batch.inputs, transition, start)
            truth = posterior[batch.masked, batch.targets[batch.masked]]
            return float(-np.log(truth).mean())
        states_of_words = np.argsort(word)[batch.targets]
        p = next_state(batch.inputs[:, :seq_len], states_of_words, transition, start)
        return float(-np.log(p).mean())

    return Task(
        name="markov",
        vocab_size=states + 1,
        seed=seed,
        draw=draw,
        references={"unigram_entropy": float(-(start * np.log(start)).sum())},
        data={"name": "markov"},
        exact_loss=exact_loss,
        unigram=start[np.argsort(word)],
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
) -> NDArray[np.int64]:
    """Draw sequences of the chain, x_0 ~ start, x_i ~ T[x_{i-1}]. Returns (batch, seq)."""
    # Inverse distribution functions without their last value, 1: counting the values that do not
    # exceed u then gives a state in 0..states-1 whatever the rounding.
    first = np.cumsum(start)[:-1]
    following = np.cumsum(transition, axis=1)[:, :-1]
    u = random.random((seq_len, batch_size, 1))
    tokens = np.empty((seq_len, batch_size), dtype=np.int64)
    tokens[0] = (first <= u[0]).sum(axis=1)
    for i in range(1, seq_len):
        tokens[i] = (following[tokens[i - 1]] <= u[i]).sum(axis=1)
    return np.ascontiguousarray(tokens.T)


def forward_backward(inputs: NDArray[np.int64], transition: Floats, start: Floats) -> Floats:
    """Return P(x_i = s | shown) = f_i(s) b_i(s) / sum_s f_i(s) b_i(s) for every position i.

    f_i = e_i * (T^T f_{i-1}) and b_{i-1} = T (e_i * b_i), where e_i(s) is 1 if position i shows
    s or [MASK], else 0. Both are rescaled to sum 1 at every position, which changes no posterior
    and keeps them from underflowing. inputs: (batch, seq), [MASK] = states.
    Returns (batch, seq, states). Source: Baum, Petrie, Soules and Weiss 1970, Ann. Math. Statist.
    """
    evidence = evidence_of(inputs, len(start))
    forward = np.empty_like(evidence)
    prior = np.broadcast_to(start, evidence[0].shape)
    for i in range(len(evidence)):
        forward[i] = _rescaled(evidence[i] * prior)
        prior = forward[i] @ transition
    posterior = _rescaled(forward * backward_messages(evidence, transition))
    return posterior.transpose(1, 0, 2)


def evidence_of(shown: NDArray[np.int64], states: int) -> Floats:
    """Return e, 1 where a position shows the state or [MASK], else 0: (seq, batch, states)."""
    evidence: Floats = np.vstack([np.eye(states), np.ones(states)])[shown.T]
    return evidence


def backward_messages(evidence: Floats, transition: Floats) -> Floats:
    """Return b of `forward_backward`, (seq, batch, states)."""
    backward = np.ones_like(evidence)
    for i in reversed(range(len(evidence) - 1)):
        backward[i] = _rescaled((evidence[i + 1] * backward[i + 1]) @ transition.T)
    return backward


def next_state(
    shown: NDArray[np.int64], truth: NDArray[np.int64], transition: Floats, start: Floats
) -> Floats:
    """Return P(x_i = truth_i | shown, x_1 … x_{i-1} = truth) for every position i.

    It is T[x_{i-1}, s] e_i(s) b_i(s), rescaled over s, with e and b as in `forward_backward`: given
    the state before, x_i does not depend on earlier ones. shown, truth: (batch, seq), [MASK] =
    states in shown. Returns (batch, seq).
    """
    evidence = evidence_of(shown, len(start))
    prior = np.concatenate(
        [np.broadcast_to(start, (1, *evidence.shape[1:])), transition[truth.T[:-1]]]
    )
    posterior = _rescaled(prior * evidence * backward_messages(evidence, transition))
    probabilities: Floats = np.take_along_axis(posterior, truth.T[:, :, None], axis=2)[:, :, 0]
    return probabilities.T


def _rescaled(weights: Floats) -> Floats:
    scaled: Floats = weights / weights.sum(axis=-1, keepdims=True)
    return scaled


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
