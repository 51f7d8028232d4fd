"""Tasks whose data are drawn from a known law, so that the best possible loss is known too."""

import math
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from deepstack.tasks.task import IGNORE, STRUCTURE, Batch, Task, choose_positions, task

VocabSize = Annotated[int, Field(ge=2, le=65536, description="number of different tokens")]

Floats = NDArray[np.float64]


@task("copy")
def copy(*, seq_len: int, seed: int, vocab_size: VocabSize = 16) -> Task:
    """target_i = input_i: predict the tokens that are shown, the task that needs no layer at all.

    Tokens are independent and uniform; every position is predicted. Knowing nothing costs
    ln(vocab_size) nats, the reference "uniform_entropy".
    """

    def draw(random: np.random.Generator, batch_size: int, held_out: bool) -> Batch:
        tokens = random.integers(0, vocab_size, (batch_size, seq_len))
        return Batch(tokens, tokens.copy(), np.zeros(tokens.shape, dtype=bool))

    return Task(
        name="copy",
        vocab_size=vocab_size,
        seed=seed,
        draw=draw,
        references={"uniform_entropy": math.log(vocab_size)},
        data={"name": "copy"},
    )


@task("reverse")
def reverse(*, seq_len: int, seed: int, vocab_size: VocabSize = 16) -> Task:
    """target_i = input_{n-1-i}: predict the sequence backwards, which needs attention by position.

    n is seq_len. Tokens are independent and uniform; every position is predicted. Knowing nothing
    costs ln(vocab_size) nats, the reference "uniform_entropy".
    """

    def draw(random: np.random.Generator, batch_size: int, held_out: bool) -> Batch:
        tokens = random.integers(0, vocab_size, (batch_size, seq_len))
        backwards = np.ascontiguousarray(tokens[:, ::-1])
        return Batch(tokens, backwards, np.zeros(tokens.shape, dtype=bool))

    return Task(
        name="reverse",
        vocab_size=vocab_size,
        seed=seed,
        draw=draw,
        references={"uniform_entropy": math.log(vocab_size)},
        data={"name": "reverse"},
    )


@task("markov")
def markov(
    *,
    seq_len: int,
    seed: int,
    states: Annotated[int, Field(ge=2, le=256, description="number of states")] = 16,
    concentration: Annotated[
        float,
        Field(ge=0.01, le=1000, description="of the Dirichlet rows: low is predictable"),
    ] = 0.1,
    mask_rate: Annotated[
        float, Field(gt=0, le=1, description="share of the positions that are predicted")
    ] = 0.15,
) -> Task:
    """P(x_i | x_{i-1}) = T[x_{i-1}, x_i]: fill in the [MASK]s of a random Markov chain.

    The chain T belongs to the run's seed: another seed is another chain, with other entropies. A
    sequence starts in the stationary distribution. Token [MASK] = `states` replaces exactly
    max(1, round(mask_rate seq_len)) tokens of each, and only these are predicted. The best
    possible loss on those very positions is exact: `Task.optimal_loss`. The reference
    "unigram_entropy" is the entropy of the stationary distribution in nats: what a predictor that
    ignores the context pays.
    """
    transition = random_chain(np.random.default_rng([seed, STRUCTURE]), states, concentration)
    start = stationary_distribution(transition)

    def draw(random: np.random.Generator, batch_size: int, held_out: bool) -> Batch:
        tokens = walk(random, transition, start, batch_size, seq_len)
        masked = choose_positions(random, batch_size, seq_len, mask_rate)
        return Batch(np.where(masked, states, tokens), np.where(masked, tokens, IGNORE), masked)

    def exact_loss(batch: Batch) -> float:
        posterior = forward_backward(batch.inputs, transition, start)
        truth = posterior[batch.masked, batch.targets[batch.masked]]
        return float(-np.log(truth).mean())

    return Task(
        name="markov",
        vocab_size=states + 1,
        seed=seed,
        draw=draw,
        references={"unigram_entropy": float(-(start * np.log(start)).sum())},
        data={"name": "markov"},
        exact_loss=exact_loss,
        unigram=start,
    )


def random_chain(random: np.random.Generator, states: int, concentration: float) -> Floats:
    """T = 0.999 D + 0.001 / states, with the rows of D ~ Dirichlet(concentration).

    The small constant reaches every state from every other: without it a low concentration
    gives absorbing states, and no unique stationary distribution. Returns (states, states).
    """
    rows = random.dirichlet(np.full(states, concentration), size=states)
    return 0.999 * rows + 0.001 / states


def stationary_distribution(transition: Floats) -> Floats:
    """The p with p = p T and sum(p) = 1. Returns (states,)."""
    states = len(transition)
    # One of the equations p (T - 1) = 0 follows from the others; the sum takes its place.
    equations = transition.T - np.eye(states)
    equations[-1] = 1.0
    solution: Floats = np.linalg.solve(equations, np.eye(states)[-1])
    return solution


def walk(
    random: np.random.Generator, transition: Floats, start: Floats, batch_size: int, seq_len: int
) -> NDArray[np.int64]:
    """x_0 ~ start, x_i ~ T[x_{i-1}]: sequences of the chain. Returns (batch, seq)."""
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
    """P(x_i = s | shown) = f_i(s) b_i(s) / sum_s f_i(s) b_i(s), exactly, for every position i.

    f_i = e_i * (T^T f_{i-1}) and b_{i-1} = T (e_i * b_i), where e_i(s) is 1 if position i shows
    s or [MASK], else 0. Both are rescaled to sum 1 at every position, which changes no posterior
    and keeps them from underflowing. inputs: (batch, seq), [MASK] = states.
    Returns (batch, seq, states). Source: Baum, Petrie, Soules and Weiss 1970, Ann. Math. Statist.
    """
    batch_size, seq_len = inputs.shape
    states = len(start)
    evidence = np.vstack([np.eye(states), np.ones(states)])[inputs.T]  # (seq, batch, states)
    posterior = np.empty_like(evidence)
    prior = np.broadcast_to(start, (batch_size, states))
    for i in range(seq_len):
        posterior[i] = _rescaled(evidence[i] * prior)
        prior = posterior[i] @ transition
    backward = np.ones((batch_size, states))
    for i in reversed(range(seq_len)):
        posterior[i] = _rescaled(posterior[i] * backward)
        backward = _rescaled((evidence[i] * backward) @ transition.T)
    return posterior.transpose(1, 0, 2)


def _rescaled(weights: Floats) -> Floats:
    scaled: Floats = weights / weights.sum(axis=-1, keepdims=True)
    return scaled
