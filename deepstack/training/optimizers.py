"""Optimizers: one class each, which makes a torch optimizer of parameter groups or is a rule."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from deepstack.base.kinds import Definition, Kind
from deepstack.config import Train
from deepstack.training.muon import Muon

OPTIMIZERS: Kind[Optimizer] = Kind("optimizer", "train.optimizer")


class Groups(NamedTuple):
    """The parameter groups of an optimizer, each with `params`, `factor` and `weight_decay`.

    others: the groups of all parameters, but for those in `matrices`.
    matrices: groups of the layers' matrices, of optimizers that take them apart.  `shape`: the
        matrices in a row of a parameter, (number, n_out, n_in).
    train: the settings.
    more: arguments of torch's optimizers on this device.
    """

    others: list[dict[str, Any]]
    matrices: list[dict[str, Any]]
    train: Train
    more: dict[str, Any]


class Optimizer(Definition, kind=OPTIMIZERS):
    """theta <- (1 - lr decay) theta - lr u, u from `update`; each rule is a subclass with a name.

    state: the names of what it remembers of each parameter, tensors like it that start at 0.
    static: a promise that every step runs the same operations and reads no Python value that
        changes.  Only then are steps recorded and replayed.
    elementwise: whether u of a number depends on no other number, so that parameters may be cut.
    adaptive: whether u has about the size 1, as Adam's, whatever the size of the gradient.
    takes_matrices: whether the layers' matrices have groups of their own.
    """

    state: ClassVar[tuple[str, ...]] = ()
    static: ClassVar[bool] = False
    elementwise: ClassVar[bool] = True
    adaptive: ClassVar[bool] = False
    takes_matrices: ClassVar[bool] = False

    def update(
        self, parameter: Tensor, gradient: Tensor, *state: Tensor
    ) -> tuple[Tensor, *tuple[Tensor, ...]]:
        """Return u and the new state, in the order of `state`; change no argument in place."""
        raise NotImplementedError

    def make(self, groups: Groups) -> torch.optim.Optimizer:
        """Return the optimizer of these groups."""
        return RuleOptimizer(self, groups.others, groups.train.lr)


class RuleOptimizer(torch.optim.Optimizer):
    """Moves every parameter by the `update` of a rule.

    Like torch's fused optimizers it divides gradients by `grad_scale` and skips the update if
    `found_inf` is 1, without a wait for the device.
    """

    found_inf: Tensor | None = None
    grad_scale: Tensor | None = None

    def __init__(self, rule: Optimizer, groups: list[dict[str, Any]], lr: float) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})
        self.rule = rule

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update all parameters once."""
        for group in self.param_groups:
            for p in group["params"]:
                for name in self.rule.state:
                    if name not in self.state[p]:
                        self.state[p][name] = torch.zeros_like(p)
                self._move(p, self.state[p], group)

    def _move(self, p: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        """Update one parameter and its state."""
        assert p.grad is not None
        gradient = p.grad if self.grad_scale is None else p.grad / self.grad_scale
        before = [state[name] for name in self.rule.state]
        u, *after = self.rule.update(p.detach(), gradient, *before)
        moved = p - group["lr"] * (u + group["weight_decay"] * p)
        for old, new in zip([p, *before], [moved, *after], strict=True):
            if self.found_inf is not None:
                new = torch.where(self.found_inf.to(torch.bool), old, new)
            old.copy_(new)


class SGD(Optimizer, name="sgd"):
    """theta <- theta - lr m,  m <- mu m + g, mu = `train.momentum`."""

    static = True

    def make(self, groups: Groups) -> torch.optim.Optimizer:
        train = groups.train
        return torch.optim.SGD(groups.others, lr=train.lr, momentum=train.momentum, fused=True)


class Adam(Optimizer, name="adam"):
    """theta <- theta - lr m/(sqrt(v) + eps), m and v the averages of g and g^2 by `train.betas`.

    The decay is added to the gradient.  Kingma & Ba 2014, arXiv:1412.6980.
    """

    static = adaptive = True
    kind: ClassVar[Any] = torch.optim.Adam

    def make(self, groups: Groups) -> torch.optim.Optimizer:
        train, betas = groups.train, (groups.train.betas[0], groups.train.betas[1])
        optimizer: torch.optim.Optimizer = self.kind(
            groups.others, lr=train.lr, betas=betas, eps=train.eps, fused=True, **groups.more
        )
        return optimizer


class AdamW(Adam, name="adamw"):
    """theta <- (1 - lr decay) theta - lr m/(sqrt(v) + eps), m and v as Adam's.

    Loshchilov & Hutter 2019, arXiv:1711.05101.
    """

    kind = torch.optim.AdamW


class MuonWithAdamW(AdamW, name="muon"):
    """W <- (1 - lr decay) W - lr s O(momentum) of the layers' matrices W; AdamW moves the others.

    See `deepstack.training.muon`; `train.muon` has its settings.
    """

    elementwise = False
    takes_matrices = True

    def make(self, groups: Groups) -> torch.optim.Optimizer:
        adam = super().make(groups) if groups.others else None
        if adam is not None and not groups.matrices:
            return adam
        train = groups.train
        dtype = torch.bfloat16 if train.precision == "bf16" else torch.float32
        return Muon(groups.matrices, adam, lr=train.lr, dtype=dtype, **train.muon.model_dump())
