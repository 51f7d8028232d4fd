"""The interface of tasks: batches as a pure function of (seed, step), and reference losses."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from deepstack.base.errors import PluginError
from deepstack.base.registry import place_of
from deepstack.config import Config

IGNORE = -100
"""Target of a position where nothing is predicted (the default of torch's cross-entropy)."""

# The second word of every random seed. A task that draws more than batches (the Markov chain) uses
# STRUCTURE for it, so that no stream repeats another.
TRAIN, VALIDATION, PROBE, STRUCTURE = 1, 2, 3, 4
# The validation set is the same for all seeds of a study: its stream has this seed, and is drawn in
# pieces of so many sequences, whatever the batch size.
OF_ALL_SEEDS, PIECE = 0, 64


class Batch(NamedTuple):
    """Input sequences and their targets.

    inputs: (batch, seq) int64, the tokens that the model reads. For an encoder-decoder: the source,
        seq_len tokens, followed by the decoder's input, the target shifted right.
    targets: (batch, seq or target) int64, the true token, or IGNORE where nothing is predicted.
    masked: like targets, bool, the predicted positions whose token the inputs do not reveal. They
        show [MASK]; in a decoder, they predict the next token.
    """

    inputs: NDArray[np.int64]
    targets: NDArray[np.int64]
    masked: NDArray[np.bool_]

    def rows(self, which: slice) -> "Batch":
        """Return some of the sequences."""
        contiguous = np.ascontiguousarray
        inputs, targets, masked = self
        return Batch(
            contiguous(inputs[which]), contiguous(targets[which]), contiguous(masked[which])
        )


@dataclass(frozen=True, eq=False)
class Task:
    """A source of batches, batch = draw(random(seed, stream, index)): equal steps, equal batches.

    A task keeps no state between batches, so a resumed run needs no random state of it.

    name, vocab_size: of the model and the run folder; tokens are 0..vocab_size-1.
    seed: of the run.
    draw: (random, batch_size, held_out) -> Batch. `held_out` asks for data never trained on.
    draw_validation: (random, first, count) -> Batch, blocks (count,): the sequences from number
        `first` on of a set that is spread over the held-out blocks of a text.  None: `draw` makes
        the set, and each sequence is a block.
    references: losses in nats to compare the training loss with, which are known exactly.
    data: name, sha256 and bytes of the training data, as recorded with the run.
    exact_loss: Batch -> the least expected loss, in nats, at the predicted positions of that batch.
    levels, level_of: the numbers k of steps that answers take, each with its own accuracy in
        evals.csv, and Batch -> the k of each predicted position, (batch, target).
    unigram: frequencies of the tokens among the `masked` targets of the training data, (tokens,).
    guess: Batch -> P(true) at the `masked` positions, (count,), of the best predictor that reads
        the query and not the data it asks about. None: that predictor is the unigram.
    given_shown: (shown, true) -> P(true | token shown there), of predicted positions that are not
        `masked`, for the best predictor without context; None if it is unknown.
    training_tokens, window: tokens of the training text, and tokens that a sequence reads of it.
    memory: bytes of data that the task holds in memory.
    bytes_per_token: of the held-out text, if a loss per byte can be computed from one per token.
    notices: lines about the data for the user, at the start of a run.
    """

    name: str
    vocab_size: int
    seed: int
    draw: Callable[[np.random.Generator, int, bool], Batch]
    draw_validation: (
        Callable[[np.random.Generator, int, int], tuple[Batch, NDArray[np.int64]]] | None
    ) = None
    references: dict[str, float] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    exact_loss: Callable[[Batch], float] | None = None
    unigram: NDArray[np.float64] | None = None
    guess: Callable[[Batch], NDArray[np.float64]] | None = None
    given_shown: Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.float64]] | None = None
    training_tokens: int | None = None
    window: int = 0
    levels: tuple[int, ...] = ()
    level_of: Callable[[Batch], NDArray[np.int64]] | None = None
    memory: int = 0
    bytes_per_token: float | None = None
    notices: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        size = self.vocab_size
        if isinstance(size, bool) or not isinstance(size, int | np.integer) or size < 2:
            raise PluginError(
                f"task {self.name!r}: found vocab_size={size!r}; allowed an integer >= 2, tokens "
                "are 0 to vocab_size - 1"
            )
        try:
            inspect.signature(self.draw).bind(None, 2, True)
        except TypeError as error:
            raise PluginError(
                f"task {self.name!r}: {place_of(self.draw)}{error}; write Task(name, vocab_size, "
                "seed, draw) with a function draw(random, batch_size, held_out)"
            ) from None

    @cached_property
    def lengths(self) -> tuple[int, int]:
        """Return the length of the inputs and of the targets, the same in every batch."""
        batch = self.draw(np.random.default_rng([self.seed, PROBE, 0]), 2, True)
        return batch.inputs.shape[1], batch.targets.shape[1]

    @property
    def target_len(self) -> int:
        """Return the number of positions of the stack that predicts: seq_len for one stack."""
        return self.lengths[1]

    def train_batch(self, step: int, batch_size: int) -> Batch:
        """Return the batch of a training step: a pure function of (seed, step, batch_size)."""
        return self._batch(TRAIN, step, batch_size, held_out=False)

    def validation_batch(self, index: int, batch_size: int) -> Batch:
        """Return sequences number index * batch_size … of the validation set."""
        return self.validation_set(batch_size, index * batch_size)[0]

    def validation_set(self, count: int, first: int = 0) -> tuple[Batch, NDArray[np.int64]]:
        """Return `count` held-out sequences of the validation set, from `first` on; their blocks.

        The set is the same at every evaluation, and for every seed, batch size, scheme and depth.
        Blocks are numbers, (count,); losses of one block are not independent of each other.
        """
        begin = first - first % PIECE
        pieces = [self._piece(start) for start in range(begin, first + count, PIECE)]
        batches, blocks = zip(*pieces, strict=True)
        joined = Batch(*map(np.concatenate, zip(*batches, strict=True)))
        which = slice(first - begin, first - begin + count)
        return joined.rows(which), np.concatenate(blocks)[which]

    def _piece(self, first: int) -> tuple[Batch, NDArray[np.int64]]:
        """Return PIECE sequences of the validation set and their blocks."""
        random = np.random.default_rng([OF_ALL_SEEDS, VALIDATION, first // PIECE])
        if self.draw_validation is None:
            batch, blocks = self.draw(random, PIECE, True), np.arange(first, first + PIECE)
        else:
            batch, blocks = self.draw_validation(random, first, PIECE)
        return self._checked(batch, PIECE), blocks

    def probe_batch(self, batch_size: int) -> Batch:
        """Return the fixed held-out batch on which the model update is measured."""
        return self._batch(PROBE, 0, batch_size, held_out=True)

    def optimal_loss(self, batch: Batch) -> float | None:
        """Return the mean of -ln P(true | inputs) over the predicted positions, in nats.

        None if the task's distribution is not known exactly.
        """
        return None if self.exact_loss is None else self.exact_loss(batch)

    def chance_losses(self, batch: Batch) -> NDArray[np.float64]:
        """Return -ln p of the best predictor without context at each position, (batch, target).

        It sees only the token shown at the position itself.  NaN where nothing is predicted, or
        where that predictor is unknown.
        """
        losses = np.full(batch.targets.shape, np.nan)
        true = batch.targets[batch.masked]
        if len(true) and self.guess is not None:
            losses[batch.masked] = -np.log(self.guess(batch))
        elif len(true) and self.unigram is not None:
            losses[batch.masked] = -np.log(self.unigram[true])
        if self.given_shown is not None:
            seen = (batch.targets != IGNORE) & ~batch.masked
            losses[seen] = -np.log(self.given_shown(batch.inputs[seen], batch.targets[seen]))
        return losses

    def unigram_loss(self, batch: Batch) -> float | None:
        """Return the mean of `chance_losses` over the `masked` positions, in nats.

        None without such positions, or if the predictor is unknown.
        """
        return mean_or_none(self.chance_losses(batch)[batch.masked])

    def references_on(self, batch: Batch) -> dict[str, float]:
        """Return the references; for a text, the means of `chance_losses` on this batch."""
        if self.draw_validation is None:
            return self.references
        losses = self.chance_losses(batch)
        of_all = losses[batch.targets != IGNORE]
        means = {"unigram_entropy": mean_or_none(losses[batch.masked])}
        if len(of_all) > batch.masked.sum():
            means["context_free_entropy"] = mean_or_none(of_all)
        return self.references | {name: mean for name, mean in means.items() if mean is not None}

    def times_read(self, config: Config) -> float | None:
        """Return how often a run reads the training text; None if the task has no such text."""
        if not self.training_tokens:
            return None
        return config.train.steps * config.train.batch_size * self.window / self.training_tokens

    def _batch(self, stream: int, index: int, batch_size: int, *, held_out: bool) -> Batch:
        random = np.random.default_rng([self.seed, stream, index])
        return self._checked(self.draw(random, batch_size, held_out), batch_size)

    def _checked(self, batch: Batch, batch_size: int) -> Batch:
        """Return a batch for torch.  Raises PluginError if it is wrong."""
        if wrong := self._wrong(batch, batch_size):
            raise PluginError(f"task {self.name!r}: {place_of(self.draw)}{wrong}")
        return batch.rows(slice(None))  # torch takes no reversed view

    def _wrong(self, batch: Batch, batch_size: int) -> str:
        """Describe the mistake in a batch, or return ''."""
        if not isinstance(batch, Batch):
            return f"draw gave {type(batch).__name__}; allowed a Batch(inputs, targets, masked)"
        for name, kind in (("inputs", np.int64), ("targets", np.int64), ("masked", np.bool_)):
            value, wanted = getattr(batch, name), np.dtype(kind)
            if not isinstance(value, np.ndarray) or value.dtype != wanted:
                actual = value.dtype if isinstance(value, np.ndarray) else type(value).__name__
                return f"draw gave {name} of {actual}; allowed a numpy array of {wanted}"
            if value.ndim != 2 or len(value) != batch_size:
                return f"draw gave {name} {value.shape}; allowed ({batch_size}, length)"
        inputs, targets, masked = batch
        if masked.shape != targets.shape:
            return f"draw gave masked {masked.shape}; allowed the shape of targets {targets.shape}"
        if (inputs.shape[1], targets.shape[1]) != self.lengths:
            of_inputs, of_targets = self.lengths
            return (
                f"draw gave inputs {inputs.shape} and targets {targets.shape}; allowed the lengths "
                f"{of_inputs} and {of_targets} of the probe batch in every batch"
            )
        predicted = targets != IGNORE
        if not predicted.any():
            return "draw gave a batch with nothing to predict: every target is IGNORE"
        if masked[~predicted].any():
            return "draw gave masked where the target is IGNORE; allowed predicted positions alone"
        for name, tokens in (("inputs", inputs), ("targets", targets[predicted])):
            least, most = tokens.min(), tokens.max()
            if least < 0 or most >= self.vocab_size:
                bad = least if least < 0 else most
                return f"draw gave {name} with {bad}; allowed 0 to {self.vocab_size - 1}"
        return ""


def mean_or_none(losses: NDArray[np.float64]) -> float | None:
    """Return the mean of losses; None without any, or if one is unknown."""
    return float(losses.mean()) if len(losses) and not np.isnan(losses).any() else None


def choose_positions(
    random: np.random.Generator, batch_size: int, seq_len: int, count: int
) -> NDArray[np.bool_]:
    """Choose exactly `count` positions of each row, all sets equally likely.

    Returns (batch, seq), True at the chosen ones.
    """
    keys = random.random((batch_size, seq_len))
    # Compare with the count-th smallest key and do not use argpartition: its order depends on the
    # processor, and equal seeds must give equal batches everywhere.
    bound = np.partition(keys, count - 1, axis=1)[:, count - 1 : count]
    return keys <= bound
