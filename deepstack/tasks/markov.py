"""The task `markov`: chains of tokens with a known distribution, so with a known best loss."""

from typing import Annotated

import numpy as np
from pydantic import Field

from deepstack.config import Family
from deepstack.tasks.copying import shifted_right
from deepstack.tasks.registry import task
from deepstack.tasks.task import IGNORE, STRUCTURE, Batch, Task, choose_positions
from deepstack.tasks.windows import Floats, Integers, MaskRate


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
