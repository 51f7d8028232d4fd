"""A small stack on real text, without a run folder: what claims about stacks are measured on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deepstack.config import Config, with_overrides
from deepstack.diagnostics import ModelUpdate
from deepstack.model import build_model
from deepstack.speed import Bank, make_step
from deepstack.tasks import build_task
from deepstack.training import make_optimizer, mean_loss, to_device

SMALL = {"model.d_model": 32, "task.seq_len": 16, "train.batch_size": 4}
VALUE_PATH = ("v", "o", "w1", "w2")
MATRICES = ("q", "k", *VALUE_PATH)
FLAT = 0.2  # 'the same order': what a growth of 1 may differ by
CPU = torch.device("cpu")


class Trial:
    """A configuration's initialised stack, batches of the text task and a fixed probe batch.

    changes: dotted key -> value, beside SMALL.  Everything follows from them and the seed.
    """

    def __init__(self, seed: int, changes: Mapping[str, Any]) -> None:
        settings = {**SMALL, **changes, "seed": seed}
        self.config = with_overrides(Config(), settings)
        self.task = build_task("text", {}, seq_len=self.config.task.seq_len, seed=seed)
        self.built = build_model(self.config, vocab_size=self.task.vocab_size)
        self.model = self.built.model
        self.probe = to_device(self.task.probe_batch(4), CPU)[0]

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of step 1, 2, …, each (batch, seq)."""
        return to_device(self.task.train_batch(step, self.config.train.batch_size), CPU)

    def backward(self) -> None:
        """Leave the gradient of the first batch's loss in the banks."""
        self.built.banks.zero_gradients()
        inputs, targets = self.batch(1)
        mean_loss(self.model(inputs), targets).backward()

    def banks_of(self, *roles: str) -> list[Bank]:
        """The banks that hold a parameter of one of these roles."""
        return [bank for bank in self.built.banks if set(bank.roles) & set(roles)]

    def weights(self) -> dict[str, Tensor]:
        """Copies of v, o, w1, w2 by role, each (depth, n_out, n_in)."""
        found: dict[str, Tensor] = {}
        for bank in self.banks_of(*VALUE_PATH):
            found |= {role: torch.cat(parts).clone() for role, parts in bank.by_role()}
        return {role: found[role] for role in VALUE_PATH}

    def gradients(self) -> dict[str, Tensor]:
        """Gradients of v, o, w1, w2 by role, each (depth, n_out, n_in)."""
        found: dict[str, Tensor] = {}
        for bank in self.banks_of(*VALUE_PATH):
            parts = bank.gradients().chunk(len(bank.roles), dim=1)
            found |= dict(zip(bank.roles, parts, strict=True))
        return {role: found[role] for role in VALUE_PATH}

    def update_of(self, lr: float, banks: list[Bank]) -> float:
        """‖ΔF‖ of one SGD step on these banks alone, with the gradients that are there; undone."""
        update = ModelUpdate(self.model, self.probe)
        kept = [p.detach().clone() for bank in banks for p in bank.parameters]
        with torch.no_grad():
            for bank in banks:
                for p in bank.parameters:
                    assert p.grad is not None
                    p.sub_(p.grad, alpha=lr)
            moved = update.measure()["model_update"].item()
            for p, before in zip([p for b in banks for p in b.parameters], kept, strict=True):
                p.copy_(before)
        return moved

    def stepper(self) -> Callable[[int], float]:
        """step -> the loss of its batch before the update, which is made."""
        train = self.config.train
        make = make_step(
            lambda x, y: mean_loss(self.model(x), y),
            self.built.banks,
            self.built.trained,
            make_optimizer(train, self.built.trained, optim=self.built.optim),
            clip=train.clip,
            max_loss=train.max_loss,
            alive=torch.ones(()),
        )
        return lambda step: make(*self.batch(step), train.lr).loss.item()


def exponents(x: Sequence[float], y: Tensor) -> Tensor:
    """The slopes of log y over log x by least squares: y (draws, len(x)) -> (draws,)."""
    at = torch.tensor(x, dtype=torch.float64).log()
    at -= at.mean()
    return (y.double().log() * at).sum(dim=1) / at.square().sum()


def gains(weights: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """v and w of every sublayer, (2 depth,) each, attention first, from v, o, w1, w2.

    Attention: w² = d Var(W_V), v² = d Var(W_O).  Feed-forward: w² = d Var(W_1)/2, since ReLU keeps
    half of the second moment, and v² = m Var(W_2).
    """
    power = {role: w.shape[2] * w.square().mean(dim=(1, 2)) for role, w in weights.items()}
    w = torch.stack([power["v"], power["w1"] / 2], dim=1).flatten().sqrt()
    v = torch.stack([power["o"], power["w2"]], dim=1).flatten().sqrt()
    return v, w


def by_sublayer(matrices: Mapping[str, Tensor]) -> Tensor:
    """The norm of what each sublayer has of v, o, w1, w2: (2 depth,), attention first."""
    square = {role: m.square().sum(dim=(1, 2)) for role, m in matrices.items()}
    both = [square["v"] + square["o"], square["w1"] + square["w2"]]
    return torch.stack(both, dim=1).flatten().sqrt()


def growth(seeds: Sequence[int], changes: dict[str, Any], depths: Sequence[int]) -> Tensor:
    """‖ΔF‖ of one SGD step on the matrices, over the learning rate: (seeds, depths)."""
    lr = 1e-6 if changes["model.scheme"] == "post_ln" else 1e-4
    found = torch.zeros(len(seeds), len(depths), dtype=torch.float64)
    for i, seed in enumerate(seeds):
        for j, depth in enumerate(depths):
            trial = Trial(seed, changes | {"model.depth": depth})
            trial.backward()
            found[i, j] = trial.update_of(lr, trial.banks_of(*MATRICES)) / lr
    return found
