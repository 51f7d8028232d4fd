"""The batches of a run, and the loss of each one that its training minimises."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from deepstack import config as conf
from deepstack.diagnostics import Culprit, culprit
from deepstack.fast import BatchSum
from deepstack.model.chunked_loss import ChunkedLoss
from deepstack.training.evaluation import mean_loss, to_device
from deepstack.training.parts.ranks import RankModel, dropout_seed


class Objective:
    """The loss of this rank's share of each batch, in the precision of the training.

    built: the model on this rank.
    """

    def __init__(self, model: RankModel) -> None:
        self.built, self.plan = model.built, model.plan
        self._share_of = model.share_of
        self._count: float | None = None  # divisor of the loss of this rank's share of a batch

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of a step on the device, and set the model to this step."""
        config = self.plan.config
        if config.model.dropout:  # a function of seed and step: nothing to save or restore
            torch.manual_seed(dropout_seed(config.seed, step, self.plan.ranks.rank))
        self.built.at_step(step)
        batch = self.plan.task.train_batch(step, config.train.batch_size)
        part, self._count = self._share_of(batch)
        return to_device(part, self.plan.device)

    def autocast(self) -> torch.autocast:
        """Return a context for bf16 matrix products, disabled unless `train.precision` is bf16."""
        bf16 = self.plan.config.train.precision == "bf16"
        return torch.autocast(self.plan.device.type, torch.bfloat16, enabled=bf16)

    def logits(self, inputs: Tensor) -> Tensor:
        """Return the model's logits of a batch."""
        with self.autocast():
            return self.built.model(inputs)

    def loss(self, inputs: Tensor, targets: Tensor, count: Tensor | None = None) -> Tensor:
        """Return the mean loss of a batch, or the contribution of a part of it.

        count: predicted positions of the whole batch, of which these are a micro-batch.
        """
        divisor = count if self._count is None else self._count
        model, train = self.built.model, self.plan.config.train
        loss = partial(mean_loss, smoothing=train.label_smoothing, z_loss=train.z_loss)
        with self.autocast(), model.statistics("own_and_followed"):
            if conf.chunk_rows(targets.numel(), self.plan.task.vocab_size):
                return model(inputs, ChunkedLoss(loss, targets, divisor))
            logits = model(inputs)
        return loss(logits, targets, divisor)

    def culprit(self, step: int, add_gradient: Callable[[], None] | None) -> Culprit:
        """Return the first non-finite layer of a step, repeated without its update.

        add_gradient: adds the gradients that do not depend on the batch.
        """
        count, device = self.plan.config.train.parts, self.plan.device
        sums = BatchSum(self.loss, self.built.banks, count, device, add_gradient)
        parts = sums.split(*self.batch(step))

        def backward() -> Tensor:
            sums.compute(*self.batch(step))  # with the same dropout
            return sums.loss

        with self.autocast():
            return culprit(self.built, [inputs for inputs, _ in parts], backward)
