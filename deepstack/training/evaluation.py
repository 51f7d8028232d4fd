"""The validation loss, on a set of sequences that is the same at every evaluation of a study."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import takewhile

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from deepstack import config as conf
from deepstack.diagnostics import evaluating
from deepstack.model import Transformer
from deepstack.model.loss import mean_loss as mean_loss
from deepstack.records import EVALS_COLUMNS
from deepstack.tasks import IGNORE, PIECE, Batch, Task


def to_device(batch: Batch, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of a batch as tensors on the device."""
    inputs, targets = torch.from_numpy(batch.inputs), torch.from_numpy(batch.targets)
    if device.type == "cuda":  # pinned memory lets the copy run beside the kernels
        inputs, targets = inputs.pin_memory(), targets.pin_memory()
    return inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)


SOLVED = 0.95  # accuracy above which answers of k steps count as solved

# Tokens of a forward pass without gradients: several batches, as launches dominate narrow layers.
TOKENS_AT_ONCE = {"cpu": conf.TOKENS_AT_ONCE, "cuda": 2**14}

Losses = NDArray[np.float64]


class Evaluation:
    """Validation loss over all predicted positions, and over those whose token is not shown.

    The second is compared with the loss without context on the same positions: where a masked
    position may show its own byte, copying is enough to get below the entropy of all of them.

    Each loss has a standard error over the blocks of the validation set (`standard_error`).

    sequences: the number that a run's record states, which holds if the config leaves it open.
    references: losses without context on this set, and those that the task knows exactly.
    record: the size of the set, for meta.json.
    """

    def __init__(
        self,
        task: Task,
        config: conf.Config,
        device: torch.device,
        sequences: int | None = None,
    ) -> None:
        self.device, train = device, config.train
        first, _ = task.validation_set(PIECE)
        length = first.inputs.shape[1]
        positions = float((first.targets != IGNORE).sum(axis=1).mean())
        count = conf.validation_sequences(config, length, positions)
        if sequences and config.train.eval_batches == "auto":
            count = sequences
        joined, self.blocks = task.validation_set(count)
        self.predicted = joined.targets != IGNORE
        self.masked = joined.masked
        chance = task.chance_losses(joined)
        self.chance = row_sums(chance, self.masked)
        self.references = task.references_on(joined)
        floors = {"unigram_loss": task.unigram_loss(joined), "optimal_loss": optimum(task, joined)}
        self.floors = {name: loss for name, loss in floors.items() if loss is not None}
        self.bytes_per_token = task.bytes_per_token
        self.levels = task.levels if task.level_of else ()
        self.answer_columns = answer_columns(self.levels)
        self.columns = (
            *EVALS_COLUMNS,
            *self.floors,
            *(("bits_per_byte",) if self.bytes_per_token else ()),
            *self.answer_columns,
            "loss_se",
            "loss_masked_se",
            *(("margin_se",) if "unigram_loss" in self.floors else ()),
        )
        if task.level_of:
            self.truth = joined.targets[self.predicted]
            self.level = task.level_of(joined)[self.predicted]
        self.record = {
            "sequences": count,
            "positions": int(self.predicted.sum()),
            "blocks": len(np.unique(self.blocks)),
        }
        group = max(1, TOKENS_AT_ONCE[device.type] // length)
        # Micro-batches and the number of logits bound the memory of a pass.  The losses of a group
        # are added together.
        rows = group if train.micro_batches == 1 else train.batch_size // train.micro_batches
        logits = joined.targets.shape[1] * task.vocab_size
        self.rows = min(rows, max(1, conf.MOST_LOGITS // logits))
        groups = [slice(i, i + group) for i in range(0, count, group)]
        self.batches = [joined.rows(rows) for rows in groups]

    def measure(
        self, model: Transformer, forward: Callable[[Tensor], Tensor]
    ) -> dict[str, float | None]:
        """Return one row of evals.csv without its step; waits for the device.

        forward: inputs -> logits of the model.
        """
        parts: list[Tensor] = []
        guesses: list[NDArray[np.int64]] = []
        with torch.no_grad(), evaluating(model), model.statistics("followed"):
            for batch in self.batches:
                inputs, targets = to_device(batch, self.device)
                for part, wanted in zip(
                    inputs.split(self.rows), targets.split(self.rows), strict=True
                ):
                    logits = forward(part)
                    if self.levels:
                        guesses.append(logits.argmax(dim=-1).cpu().numpy())
                    parts.append(position_losses(logits, wanted).view(wanted.shape))
        losses = torch.cat(parts).cpu().numpy().astype(np.float64)
        loss, loss_se = self.mean(row_sums(losses, self.predicted), self.predicted)
        row: dict[str, float | None] = {"loss": loss, "bits_per_token": loss / math.log(2)}
        if self.bytes_per_token:
            row["bits_per_byte"] = loss / math.log(2) / self.bytes_per_token
        row |= self.floors
        if self.levels:
            right = np.concatenate(guesses)[self.predicted] == self.truth
            row |= accuracies(right, self.level, self.levels)
        row["loss_se"] = loss_se
        if self.masked.any():
            masked = row_sums(losses, self.masked)
            row["loss_masked"], row["loss_masked_se"] = self.mean(masked, self.masked)
            if "unigram_loss" in self.floors:
                row["margin_se"] = self.mean(masked - self.chance, self.masked)[1]
        return row

    def mean(self, sums: Losses, positions: NDArray[np.bool_]) -> tuple[float, float | None]:
        """Return the mean of a loss over positions, and its standard error over blocks.

        sums: of each sequence, (sequences,).
        """
        return standard_error(sums, positions.sum(axis=1), self.blocks)


def optimum(task: Task, batch: Batch) -> float | None:
    """Return the optimal loss of a task on a batch in nats, or None; works in pieces."""
    if task.exact_loss is None:
        return None
    pieces = [batch.rows(slice(i, i + 512)) for i in range(0, len(batch.inputs), 512)]
    counts = [int((piece.targets != IGNORE).sum()) for piece in pieces]
    sums = (task.exact_loss(one) * count for one, count in zip(pieces, counts, strict=True))
    return sum(sums) / sum(counts)


def row_sums(losses: Losses, positions: NDArray[np.bool_]) -> Losses:
    """Return the sum of each sequence's losses at these positions, (sequences,)."""
    return np.where(positions, losses, 0.0).sum(axis=1)


def standard_error(
    sums: Losses, counts: NDArray[np.int64], blocks: NDArray[np.int64]
) -> tuple[float, float | None]:
    """Return the mean of values in blocks, and its standard error; None for fewer than two blocks.

    Values of one block may depend on each other.  So the mean is a ratio of sums S_b and numbers
    n_b over B blocks: m = Σ S_b / Σ n_b, with the variance B/(B - 1) Σ (S_b - m n_b)² / (Σ n_b)²
    (Cochran 1977, Sampling Techniques, section 6.3).

    sums, counts, blocks: of sequences, (sequences,); the number of a sequence's block.
    """
    _, index = np.unique(blocks, return_inverse=True)
    totals, numbers = np.bincount(index, sums), np.bincount(index, counts)
    mean, number = float(totals.sum() / numbers.sum()), len(totals)
    if number < 2:
        return mean, None
    squares = float(((totals - mean * numbers) ** 2).sum())
    return mean, math.sqrt(number / (number - 1) * squares) / float(numbers.sum())


def position_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of every position in nats, (batch * seq,); 0 where none is predicted."""
    flat = logits.flatten(0, 1).float()
    return F.cross_entropy(flat, targets.flatten(), ignore_index=IGNORE, reduction="none")


def answer_columns(levels: Sequence[int]) -> dict[str, tuple[str, str, str]]:
    """Return symbol, unit and meaning of the columns of `accuracies`; none without levels."""
    if not levels:
        return {}
    meaning = "Share of the validation answers that are right"
    of_level = {
        f"accuracy_{k}": ("", "", f"{meaning}, of those that take k = {k} steps.") for k in levels
    }
    solved = f"Largest k up to which every accuracy is above {SOLVED:g}; 0: none."
    return {"accuracy": ("", "", f"{meaning}."), **of_level, "solved": ("k", "", solved)}


def accuracies(
    right: NDArray[np.bool_], level: NDArray[np.int64], levels: Sequence[int]
) -> dict[str, float | None]:
    """Return the accuracies and the largest k solved; None for a k without an answer.

    right, level: (answers,), whether an answer is right, and the number k of its steps.
    """
    row: dict[str, float | None] = {"accuracy": float(right.mean())}
    for k in levels:
        of_level = right[level == k]
        row[f"accuracy_{k}"] = float(of_level.mean()) if len(of_level) else None
    solved = takewhile(lambda k: (row[f"accuracy_{k}"] or 0.0) > SOLVED, levels)
    return row | {"solved": max(solved, default=0)}
