"""The validation loss, on batches that are the same at every evaluation of a run."""

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
from deepstack.tasks import IGNORE, Batch, Task


def to_device(batch: Batch, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of a batch as tensors on the device."""
    inputs, targets = torch.from_numpy(batch.inputs), torch.from_numpy(batch.targets)
    if device.type == "cuda":  # pinned memory lets the copy run beside the kernels
        inputs, targets = inputs.pin_memory(), targets.pin_memory()
    return inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)


SOLVED = 0.95  # accuracy above which answers of k steps count as solved

# Tokens of a forward pass without gradients: several batches, as launches dominate narrow layers.
TOKENS_AT_ONCE = {"cpu": 2**11, "cuda": 2**14}


class Evaluation:
    """Validation loss over all predicted positions, and over those whose token is not shown.

    The second is compared with the unigram's on the same positions: where a masked position may
    show its own byte, copying is enough to get below the entropy of all predicted positions.
    """

    def __init__(self, task: Task, train: conf.Train, device: torch.device) -> None:
        self.device = device
        size, count = train.batch_size, train.eval_batches
        first = task.validation_batch(0, size)
        # Each batch is copied into its place, so that only one copy of all of them is in memory.
        joined = Batch(*(np.empty((count * len(a), *a.shape[1:]), a.dtype) for a in first))
        optimal = []
        for i in range(count):
            batch = task.validation_batch(i, size) if i else first
            for array, part in zip(joined, batch, strict=True):
                array[i * size : (i + 1) * size] = part
            if (loss := task.optimal_loss(batch)) is not None:
                optimal.append(loss)
        # Every batch of a task predicts equally many positions, so a mean of means is the mean.
        floor = sum(optimal) / len(optimal) if optimal else None
        floors = {"unigram_loss": task.unigram_loss(joined), "optimal_loss": floor}
        self.floors = {name: loss for name, loss in floors.items() if loss is not None}
        self.bytes_per_token = task.bytes_per_token
        of_bytes = ("bits_per_byte",) if self.bytes_per_token else ()
        self.levels = task.levels if task.level_of else ()
        self.answer_columns = answer_columns(self.levels)
        self.columns = (*EVALS_COLUMNS, *self.floors, *of_bytes, *self.answer_columns)
        if task.level_of:
            self.predicted = joined.targets != IGNORE
            self.truth = joined.targets[self.predicted]
            self.level = task.level_of(joined)[self.predicted]
        group = size * max(1, TOKENS_AT_ONCE[device.type] // first.inputs.size)
        groups = [slice(i, i + group) for i in range(0, count * size, group)]
        # Micro-batches and the number of logits bound the memory of a pass.  The losses of a group
        # are added together.
        rows = group if train.micro_batches == 1 else size // train.micro_batches
        logits = first.targets.shape[1] * task.vocab_size
        self.rows = min(rows, max(1, conf.MOST_LOGITS // logits))
        self.batches = [
            Batch(joined.inputs[rows], joined.targets[rows], joined.masked[rows]) for rows in groups
        ]

    def measure(
        self, model: Transformer, forward: Callable[[Tensor], Tensor]
    ) -> dict[str, float | None]:
        """Return one row of evals.csv without its step; waits for the device.

        forward: inputs -> logits of the model.
        """
        totals = torch.zeros(4, dtype=torch.float64, device=self.device)
        guesses: list[NDArray[np.int64]] = []
        with torch.no_grad(), evaluating(model), model.statistics("followed"):
            for batch in self.batches:
                inputs, targets = to_device(batch, self.device)
                shown = torch.from_numpy(batch.masked).to(self.device)
                parts = []
                for part, wanted in zip(
                    inputs.split(self.rows), targets.split(self.rows), strict=True
                ):
                    logits = forward(part)
                    if self.levels:
                        guesses.append(logits.argmax(dim=-1).cpu().numpy())
                    parts.append(position_losses(logits, wanted))
                losses, flat = torch.cat(parts), shown.flatten()
                totals += torch.stack(
                    [losses.sum(), (targets != IGNORE).sum(), losses[flat].sum(), flat.sum()]
                )
        total, count, masked_total, masked_count = totals.tolist()
        bits = total / count / math.log(2)
        row: dict[str, float | None] = {
            "loss": total / count,
            "loss_masked": masked_total / masked_count if masked_count else None,
            "bits_per_token": bits,
        }
        if self.bytes_per_token:
            row["bits_per_byte"] = bits / self.bytes_per_token
        row |= self.floors
        if self.levels:
            right = np.concatenate(guesses)[self.predicted] == self.truth
            row |= accuracies(right, self.level, self.levels)
        return row


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
