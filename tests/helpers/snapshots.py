"""A small model and its snapshots, for the tests of diagnostics."""

from typing import Any

import torch
from torch import Tensor

from deepstack.diagnostics import Snapshot, evaluate, take
from deepstack.diagnostics.skipped_layers import losses_without
from deepstack.model import build_model
from deepstack.model.build import Built
from deepstack.tasks import task_of
from deepstack.training import mean_loss, to_device
from helpers.configs import config_with

CPU = torch.device("cpu")
SMALL = {
    "model.depth": 3, "model.d_model": 16, "task.name": "reverse", "task.seq_len": 8,
    "train.batch_size": 4, "log.probe_sequences": 3,
}  # fmt: skip


class ToyModel:
    """A small model with numbers that training could have left, and its snapshots."""

    def __init__(self, skipped: int = 0, **changes: Any) -> None:
        self.config = config_with(SMALL, **changes)
        self.task = task_of(self.config)
        self.built: Built = build_model(self.config, vocab_size=self.task.vocab_size)
        self.model = self.built.model
        self.tokens, self.targets = to_device(self.task.probe_batch(3), CPU)
        if self.built.model.schemes[0].reads_data:
            self.built.calibrate(self.tokens)
        random = torch.Generator().manual_seed(5)
        with torch.no_grad():  # gains, biases and scalars of a trained stack are not 1 and 0
            for p in self.model.parameters():
                if p.ndim == 1:
                    p += 0.1 * torch.randn(p.shape, generator=random)
        self.banks = [bank for bank in self.built.banks if bank.in_layers]
        self.skipped = skipped

    def loss(self, logits: Tensor) -> Tensor:
        return mean_loss(logits, self.targets)

    def snapshots(self) -> list[Snapshot]:
        values = [bank.values().clone() for bank in self.banks]
        before = [v + 0.01 for v in values]
        without = losses_without(self.model, self.tokens, self.loss, self.skipped)
        added = {"skip_loss": without} if self.skipped else {}
        return take(
            self.model, self.banks, self.tokens, self.loss,
            before=before, initial=values, added=added,
        )  # fmt: skip

    def values(self) -> dict[str, Tensor]:
        return evaluate(self.snapshots())

    def change(self) -> None:
        """Change every parameter, as a step does."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter += 0.05 * parameter.abs() + 0.01

    def diagnostics(self, passes: Any) -> dict[str, Tensor]:
        """Every diagnostic; passes: of `run_passes`, None for the eager ones."""
        initial = [bank.values().clone() for bank in self.banks]
        before, start = [v + 0.01 for v in initial], [v - 0.02 for v in initial]
        return evaluate(
            take(
                self.model, self.banks, self.tokens, self.loss,
                before=before, initial=start, passes=passes,
            )
        )  # fmt: skip
