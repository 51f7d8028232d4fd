"""Small stacks without a run folder, on which claims are measured."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deepstack.config import Config, values, with_overrides
from deepstack.config.roles import MATRICES
from deepstack.diagnostics import ModelUpdate, Snapshot, take
from deepstack.diagnostics.snapshot import matrices
from deepstack.fast import make_step
from deepstack.fast.distributed import ALONE
from deepstack.instruments.ledger.claim import Null, Part
from deepstack.instruments.ledger.statistics import per_seed
from deepstack.model import build_model
from deepstack.model.banks import Bank
from deepstack.tasks import task_of
from deepstack.training import make_optimizer, mean_loss, to_device
from deepstack.training.parts.penalty import SpectralPenalty
from deepstack.training.schedule import learning_rate

KEYS = {key.split(".", 1)[-1].replace(".", "_"): key for key in values(Config())}
KEYS |= {"scheme_options": "model.scheme_options", "task": "task.name"}
"""Short names of settings, as in depth and norm_kind, and their keys."""
SMALL = {"d_model": 32, "seq_len": 16, "batch_size": 4, "warmup_steps": 0, "schedule": "constant"}
POST_LN = {"scheme": "post_ln", "depth": 4, "n_heads": 4, "batch_size": 8}
FLAT = 0.2  # tolerance of a growth of 1 that is claimed to be of the same order
CPU = torch.device("cpu")


def trial_config(seed: int, **changes: Any) -> Config:
    """Return the configuration of a trial."""
    settings = {KEYS[name]: value for name, value in {**SMALL, **changes}.items()}
    return with_overrides(Config(), settings | {"seed": seed})


class Trial:
    """An initialised stack, the batches of its task, and a fixed probe batch.

    changes: short name of a setting -> value, added to SMALL.  They and the seed determine all
        numbers.
    """

    def __init__(self, seed: int, **changes: Any) -> None:
        self.config = trial_config(seed, **changes)
        self.task = task_of(self.config)
        self.built = build_model(self.config, vocab_size=self.task.vocab_size)
        self.model = self.built.model
        self.layer_banks = [bank for bank in self.built.banks if bank.in_layers]
        self.probe_batch = to_device(self.task.probe_batch(4), CPU)
        self.probe = self.probe_batch[0]

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of step 1, 2, …, each (batch, seq)."""
        return to_device(self.task.train_batch(step, self.config.train.batch_size), CPU)

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of a batch."""
        return mean_loss(self.model(inputs), targets)

    def run(self, steps: int, after: Callable[[int], None] = lambda step: None) -> list[float]:
        """Train in memory with the usual training step and return the losses.

        after: called with the step, after each of them.
        """
        train, penalty = self.config.train, SpectralPenalty(self.config, self.built, ALONE)
        optimizer = make_optimizer(train, self.built)
        step = make_step(lambda *batch: penalty(self.loss(*batch)), self.built, optimizer, train)
        losses = []
        for t in range(1, steps + 1):
            self.built.at_step(t)
            losses.append(step(*self.batch(t), learning_rate(train, t)).loss.item())
            after(t)
        return losses

    def backward(self, step: int = 1) -> None:
        """Compute the gradient of the loss of a step's batch, which the banks then hold."""
        self.built.banks.zero_gradients()
        self.loss(*self.batch(step)).backward()

    def banks_of(self, *roles: str) -> list[Bank]:
        """Return the banks that hold a parameter of one of these roles."""
        return [bank for bank in self.built.banks if set(bank.roles) & set(roles)]

    def values(self) -> list[Tensor]:
        """Return copies of the parameters of every bank of the layers."""
        return [bank.values().clone() for bank in self.layer_banks]

    def matrices(self) -> dict[str, Tensor]:
        """Return every matrix of the layers by role, (depth, n_out, n_in), not copied."""
        values = [bank.values() for bank in self.layer_banks]
        return matrices(self.layer_banks, values)

    def snapshots(
        self,
        batch: tuple[Tensor, Tensor] | None = None,
        initial: Sequence[Tensor] | None = None,
    ) -> list[Snapshot]:
        """Return each side's snapshot on a batch (default: of step 1); initial: values at θ_0."""
        inputs, targets = batch or self.batch(1)
        loss, initial = partial(mean_loss, targets=targets), initial or self.values()
        return take(self.model, self.layer_banks, inputs, loss, before=None, initial=initial)

    def mean_spectral_norm(self) -> float:
        """Return the geometric mean of ‖W‖₂ over the matrices of the layers."""
        by_role = (torch.linalg.matrix_norm(W.double(), ord=2) for W in self.matrices().values())
        return torch.cat([norms.log() for norms in by_role]).mean().exp().item()


@torch.no_grad()
def descend(banks: Sequence[Bank], lr: float) -> None:
    """Take a step of plain gradient descent on the parameters of these banks."""
    for parameter in (parameter for bank in banks for parameter in bank.parameters):
        assert parameter.grad is not None
        parameter.sub_(parameter.grad, alpha=lr)


def small_stack(seed: int, **changes: Any) -> Trial:
    """Return the trial of a Post-LN stack of four layers with these changes."""
    return Trial(seed, **{**POST_LN, **changes})


def flat_part(quantity: str, updates: Tensor, depths: Sequence[int], stated: bool = True) -> Part:
    """Return the part that ‖ΔF‖, (seeds, depths), is as large at the last depth as at the first."""
    ratios = updates[:, -1] / updates[:, 0]
    null = Null(math.sqrt(depths[-1] / depths[0]), "grows as √N")
    return Part.mean(quantity, 1.0, ratios, null=null, tolerance=FLAT, stated=stated)


def growth(
    seeds: Sequence[int],
    depths: Sequence[int],
    roles: Sequence[str] = MATRICES,
    step: float = 1e-4,
    **changes: Any,
) -> Tensor:
    """Return ‖ΔF‖ of one SGD step on these roles, over its size: (seeds, depths)."""

    def update(seed: int, depth: int) -> float:
        trial = Trial(seed, depth=depth, **changes)
        trial.backward()
        model_update = ModelUpdate(trial.model, trial.probe)
        descend(trial.banks_of(*roles), step)
        return model_update.measure()["model_update"].item() / step

    return per_seed(lambda seed: [update(seed, depth) for depth in depths], seeds)
