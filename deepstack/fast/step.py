"""Defines the training step: every fast path computes the same as the plain eager step here.

A step computes the gradients of a batch in equal micro-batches and adds them in order.  The loss of
the batch is the sum of their losses, each divided by the predicted positions of the whole batch.
There is one set of gradients: each micro-batch adds its own, once computed, to the sums so far.  A
replayed step may compute micro-batches in threads at the same time, each into further tensors that
are added in the same order.  The numbers depend on the count of micro-batches, and on nothing else.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepstack import config as conf
from deepstack.base.gc_control import gc_paused
from deepstack.fast.gpu.deferred_gradients import forget
from deepstack.model.banks import Bank, Banks, global_norm
from deepstack.model.build import Built
from deepstack.tasks import IGNORE

Loss = Callable[..., Tensor]
"""(inputs, targets) -> mean loss, or (inputs, targets, count) -> summed loss / count."""


class BatchSum:
    """The gradients and the loss of a batch, summed over its equal micro-batches in order.

    loss: (inputs, targets) -> see `Loss`; the second form is needed from two micro-batches on.
    count: number of micro-batches.
    penalty: adds the gradients that do not depend on the batch, before all others.
    tensors: the sums, to which `add` adds: the gradients, and the loss, 0-d.
    """

    def __init__(
        self,
        loss: Loss,
        banks: Banks,
        count: int,
        device: torch.device,
        penalty: Callable[[], None] | None = None,
    ) -> None:
        self.loss_function, self.banks, self.count, self.penalty = loss, banks, count, penalty
        self.loss = torch.zeros((), device=device)
        self.divisor = [torch.zeros((), dtype=torch.int64, device=device)] if count > 1 else []
        gradients = [p.grad for bank in banks for p in bank.parameters if p.grad is not None]
        self.tensors = [*gradients, self.loss]

    def split(self, inputs: Tensor, targets: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return inputs and targets of each micro-batch, views of the batch."""
        return list(zip(inputs.chunk(self.count), targets.chunk(self.count), strict=True))

    def begin(self, targets: Tensor) -> None:
        """Set the sums to zero or to the penalty's, and count the predicted positions."""
        self.banks.zero_gradients()
        self.loss.zero_()
        for divisor in self.divisor:
            divisor.copy_((targets != IGNORE).sum())
        if self.penalty:
            self.penalty()

    def add(self, inputs: Tensor, targets: Tensor) -> None:
        """Add gradients and loss of a micro-batch."""
        with gc_paused():
            value = self.loss_function(inputs, targets, *self.divisor)
            try:
                value.backward()
            except BaseException:
                forget()
                raise
        self.loss.add_(value.detach())

    def compute(self, inputs: Tensor, targets: Tensor) -> None:
        """Compute gradients and loss of a batch; only reads parameters."""
        self.begin(targets)
        for part in self.split(inputs, targets):
            self.add(*part)


class Measured(NamedTuple):
    """The measurements of a step, as 0-d tensors on the device; the host does not wait for them.

    loss: of the batch before the update.
    grad_norm: before clipping.
    probe: the probe's measurements after the update, by name.
    settle: None, or a function that measures the probe now instead of with the next step; until
        then `probe` holds older numbers.
    """

    loss: Tensor
    grad_norm: Tensor
    probe: dict[str, Tensor]
    settle: Callable[[], None] | None = None


LossAndNorm = tuple[Tensor, Tensor]  # the loss and the norm of all gradients


@dataclass(frozen=True)
class Update:
    """A training step in parts, (inputs, targets) -> Measured.

    batch: the sums over the batch.
    total: () -> LossAndNorm of the whole batch, after all micro-batches.
    apply: LossAndNorm -> Measured; changes parameters.
    """

    batch: BatchSum
    total: Callable[[], LossAndNorm]
    apply: Callable[[Tensor, Tensor], Measured]

    def gradients(self, inputs: Tensor, targets: Tensor) -> LossAndNorm:
        """Compute the gradients of the batch; only reads parameters."""
        self.batch.compute(inputs, targets)
        return self.total()

    def __call__(self, inputs: Tensor, targets: Tensor) -> Measured:
        return self.apply(*self.gradients(inputs, targets))


UpdateFunction = Callable[[Tensor, Tensor], Measured]
Probe = Callable[[], dict[str, Tensor]]


class Step:
    """A training step, (inputs, targets, lr) -> Measured."""

    def __init__(self, update: UpdateFunction, optimizer: torch.optim.Optimizer) -> None:
        self.update, self.optimizer = update, optimizer

    def __call__(self, inputs: Tensor, targets: Tensor, lr: float) -> Measured:
        for group in self.optimizer.param_groups:
            rate = lr * group["factor"]
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)  # a captured or replayed step reads it again
            else:
                group["lr"] = rate
        return self.update(inputs, targets)

    def release(self) -> None:
        """Free captured graphs and recorded memory, also while this object is referenced."""
        del self.update


def with_probe(update: UpdateFunction, probe: Probe | None) -> UpdateFunction:
    """Return a step that runs the update and then the probe, if there is one."""
    if probe is None:
        return update
    return lambda inputs, targets: update(inputs, targets)._replace(probe=probe())


def make_step(
    loss: Loss,
    built: Built,
    optimizer: torch.optim.Optimizer,
    train: conf.Train,
    *,
    penalty: Callable[[], None] | None = None,
    probe: Probe | None = None,
    share: Callable[[Tensor], Tensor] | None = None,
    norm_of: Callable[[Sequence[Bank]], Tensor] = global_norm,
    capture: Callable[[Update, Probe | None], UpdateFunction] = with_probe,
) -> Step:
    """Return a step (inputs, targets, lr) -> Measured: one update, or none after divergence.

    loss: (inputs, targets) -> the mean loss; see `Loss`.  Every parameter group has a key 'factor':
    its learning rate is lr * factor.  The gradient is scaled by min(1, train.clip / its norm).
    After a non-finite value, or a loss above `train.max_loss`, all later updates are masked on the
    device: the parameters stay unchanged, and the host does not wait.  After every update the
    scheme's constraint on parameters holds; under masked updates it changes them by rounding errors
    at most.

    penalty: adds gradients that do not depend on the batch.
    probe: measures the model after the update; a 'model_update' that is not finite masks the next
        update.
    share: called after the backward pass with the loss of this rank's part of the batch; reduces
        the gradients over the ranks and returns the loss of the whole batch.
    norm_of: the norm of all gradients after `share`.
    capture: turns update and probe into one function, such as a CUDA graph.
    """
    device = optimizer.param_groups[0]["params"][0].device
    batch = BatchSum(loss, built.banks, train.parts, device, penalty)
    diverged = torch.zeros((), device=device)
    # torch's fused optimizers divide gradients by grad_scale and skip the step if found_inf is 1.
    untyped: Any = optimizer  # torch's classes do not declare these
    untyped.found_inf = diverged
    change_parameters, constrain = bare_step(optimizer), built.projection()

    def total() -> LossAndNorm:
        value = batch.loss.clone()
        return share(value) if share else value, norm_of(built.trained)

    def apply(value: Tensor, norm: Tensor) -> Measured:
        is_usable = (norm < torch.inf) & (value <= train.max_loss)  # both are False for NaN
        diverged.masked_fill_(~is_usable, 1.0)
        if train.clip is not None:
            untyped.grad_scale = (norm / train.clip).clamp(min=1.0)
        change_parameters()
        if constrain:
            constrain()
        return Measured(value, norm, {})

    def measure(probe: Probe) -> dict[str, Tensor]:
        values = probe()
        if "model_update" in values:
            diverged.masked_fill_(~(values["model_update"] < torch.inf), 1.0)
        return values

    update = capture(Update(batch, total, apply), probe and partial(measure, probe))
    return Step(update, optimizer)


def bare_step(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Return the optimizer's step without the wrappers that torch adds.

    The wrappers import torch's compiler, which takes a second.  They only call hooks, which are
    not used here, and disable gradients.
    """
    return torch.no_grad()(partial(inspect.unwrap(type(optimizer).step), optimizer))
