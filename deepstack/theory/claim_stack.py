"""Small stacks without a run folder, on which claims are measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from deepstack.config import Config, with_overrides
from deepstack.config.schema import MATRICES
from deepstack.diagnostics import ModelUpdate
from deepstack.diagnostics.snapshot import matrices
from deepstack.distributed import ALONE
from deepstack.fast import make_step
from deepstack.model import build_model
from deepstack.parameters import Bank
from deepstack.schemes import Scheme, Tap
from deepstack.tasks import task_of
from deepstack.theory.claim import Part
from deepstack.training import make_optimizer, mean_loss, to_device
from deepstack.training.penalty import SpectralPenalty
from deepstack.training.schedule import learning_rate

SMALL: Mapping[str, Any] = {
    "model.d_model": 32, "task.seq_len": 16, "train.batch_size": 4, "train.warmup_steps": 0,
    "train.schedule": "constant",
}  # fmt: skip
POST_LN: Mapping[str, Any] = {
    "model.scheme": "post_ln", "model.depth": 4, "model.n_heads": 4, "train.batch_size": 8,
}  # fmt: skip
VALUE_PATH = ("v", "o", "w1", "w2")
FLAT = 0.2  # tolerance of a growth of 1 that is claimed to be of the same order
CPU = torch.device("cpu")


class Trial:
    """An initialised stack, the batches of its task, and a fixed probe batch.

    changes: dotted key -> value, added to SMALL.  They and the seed determine all numbers.
    """

    def __init__(self, seed: int, changes: Mapping[str, Any]) -> None:
        self.config = with_overrides(Config(), {**SMALL, **changes, "seed": seed})
        self.task = task_of(self.config)
        self.built = build_model(self.config, vocab_size=self.task.vocab_size)
        self.model = self.built.model
        self.probe = to_device(self.task.probe_batch(4), CPU)[0]

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of step 1, 2, …, each (batch, seq)."""
        return to_device(self.task.train_batch(step, self.config.train.batch_size), CPU)

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of a batch."""
        return mean_loss(self.model(inputs), targets)

    def unigram_losses(self, steps: int) -> Tensor:
        """Return the unigram's loss on the batch of each step, in nats, (steps,)."""
        batches = (
            self.task.train_batch(t, self.config.train.batch_size) for t in range(1, steps + 1)
        )
        return torch.tensor([self.task.unigram_loss(batch) for batch in batches]).double()

    def run(self, steps: int, after: Callable[[int], None] = lambda step: None) -> list[float]:
        """Train in memory with the usual training step and return the losses.

        after: called with the step, after each of them.
        """
        train = self.config.train
        penalty = SpectralPenalty(self.config, self.built, ALONE)
        step = make_step(
            lambda inputs, targets: penalty(self.loss(inputs, targets)),
            self.built.banks,
            self.built.trained,
            make_optimizer(train, self.built.trained, optim=self.built.optim),
            clip=train.clip,
            max_loss=train.max_loss,
            alive=torch.ones(()),
            project=self.built.projection(),
        )
        losses = []
        for t in range(1, steps + 1):
            self.built.at_step(t)
            losses.append(step(*self.batch(t), learning_rate(train, t)).loss.item())
            after(t)
        return losses

    def backward(self) -> None:
        """Compute the gradient of the first batch's loss, which the banks then hold."""
        self.built.banks.zero_gradients()
        self.loss(*self.batch(1)).backward()

    def banks_of(self, *roles: str) -> list[Bank]:
        """Return the banks that hold a parameter of one of these roles."""
        return [bank for bank in self.built.banks if set(bank.roles) & set(roles)]

    @property
    def layer_banks(self) -> list[Bank]:
        """The banks of the parameters inside the layers."""
        return [bank for bank in self.built.banks if bank.in_layers]

    def matrices(self) -> dict[str, Tensor]:
        """Return every matrix of the layers by role, (depth, n_out, n_in), not copied."""
        banks = self.layer_banks
        return matrices(banks, [bank.values() for bank in banks], range(len(banks)))

    def weights(self) -> dict[str, Tensor]:
        """Return copies of v, o, w1, w2 by role, each (depth, n_out, n_in)."""
        values = self.matrices()
        return {role: values[role].clone() for role in VALUE_PATH}

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients of v, o, w1, w2 by role, each (depth, n_out, n_in)."""
        banks = self.banks_of(*VALUE_PATH)
        values = matrices(banks, [bank.gradients() for bank in banks], range(len(banks)))
        return {role: values[role] for role in VALUE_PATH}

    def update_of(self, lr: float, banks: Sequence[Bank]) -> float:
        """Return ‖ΔF‖ of one SGD step on these banks, with their present gradients; undo it."""
        update = ModelUpdate(self.model, self.probe)
        with restored(banks):
            descend(banks, lr)
            return update.measure()["model_update"].item()


@contextmanager
def restored(banks: Sequence[Bank]) -> Iterator[None]:
    """Give the parameters of these banks their present values back at the end of the block."""
    values = [bank.values().clone() for bank in banks]
    yield
    for bank, old in zip(banks, values, strict=True):
        bank.copy_(old)


@torch.no_grad()
def descend(banks: Sequence[Bank], lr: float) -> None:
    """Take a step of plain gradient descent on the parameters of these banks."""
    for parameter in (parameter for bank in banks for parameter in bank.parameters):
        assert parameter.grad is not None
        parameter.sub_(parameter.grad, alpha=lr)


def started(seed: int, changes: Mapping[str, Any]) -> Trial:
    """Return the trial of a Post-LN stack of four layers with these changes."""
    return Trial(seed, {**POST_LN, **changes})


class SumTap(Tap):
    """Appends x, the residual sum r = z and the norm's output o of every sublayer to `rows`."""

    def __init__(self, rows: list[tuple[Tensor, Tensor, Tensor]]) -> None:
        self.rows = rows

    def enter(self, x: Tensor) -> None:
        self.x = x

    def norm(self, norm: Callable[[Tensor], Tensor], z: Tensor, last: bool) -> Tensor:
        o = norm(z)
        self.rows.append((self.x, z, o))
        return o


@contextmanager
def tapped(schemes: Sequence[Scheme], tap: Tap) -> Iterator[None]:
    """Let these schemes pass their values through the tap inside of the block."""
    for scheme in schemes:
        scheme.tap = tap
    try:
        yield
    finally:
        for scheme in schemes:
            scheme.tap = None


def gains(weights: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return v and w of every sublayer, (2 depth,) each, attention first, from v, o, w1, w2.

    Attention: w² = d Var(W_V), v² = d Var(W_O).  Feed-forward: w² = d Var(W_1)/2, since ReLU keeps
    half of the second moment, and v² = m Var(W_2).
    """
    power = {role: w.shape[2] * w.square().mean(dim=(1, 2)) for role, w in weights.items()}
    w = torch.stack([power["v"], power["w1"] / 2], dim=1).flatten().sqrt()
    v = torch.stack([power["o"], power["w2"]], dim=1).flatten().sqrt()
    return v, w


def by_sublayer(matrices: Mapping[str, Tensor]) -> Tensor:
    """Return the norm of each sublayer's part of v, o, w1, w2: (2 depth,), attention first."""
    square = {role: m.square().sum(dim=(1, 2)) for role, m in matrices.items()}
    both = [square["v"] + square["o"], square["w1"] + square["w2"]]
    return torch.stack(both, dim=1).flatten().sqrt()


def flat_part(quantity: str, updates: Tensor, stated: bool = True) -> Part:
    """Return the part that ‖ΔF‖, (seeds, depths), is as large at the last depth as at the first."""
    ratios = updates[:, -1] / updates[:, 0]
    return Part.mean(quantity, 1.0, ratios, tolerance=FLAT, stated=stated)


def growth(seeds: Sequence[int], changes: dict[str, Any], depths: Sequence[int]) -> Tensor:
    """Return ‖ΔF‖ of one SGD step on the matrices, over the learning rate: (seeds, depths)."""
    lr = 1e-6 if changes["model.scheme"] == "post_ln" else 1e-4
    updates = torch.zeros(len(seeds), len(depths), dtype=torch.float64)
    for i, seed in enumerate(seeds):
        for j, depth in enumerate(depths):
            trial = Trial(seed, changes | {"model.depth": depth})
            trial.backward()
            updates[i, j] = trial.update_of(lr, trial.banks_of(*MATRICES)) / lr
    return updates
