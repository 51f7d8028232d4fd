"""Defines the training step: every fast path computes the same as the plain eager step here.

A step computes the gradients of a batch in equal shards and adds them in order.  Each shard
computes the gradients of its sequences from zero; the loss of the batch is the sum of the shards'
losses, each divided by the predicted positions of the whole batch.  An eager step runs one shard
after the other and keeps the gradients of all but the last in further tensors.  A replayed step
writes them there directly, so that threads can run the shards at the same time.  The order of all
sums is fixed: the numbers depend on the count of shards, and on nothing else.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepstack import config as conf
from deepstack.fast.gpu.deferred_gradients import forget
from deepstack.gc_control import gc_paused
from deepstack.model.build import Built
from deepstack.parameters.banks import Bank, Banks, global_norm
from deepstack.tasks import IGNORE

Loss = Callable[..., Tensor]
"""(inputs, targets) -> mean loss, or (inputs, targets, count) -> summed loss / count."""


class Shard(NamedTuple):
    """One part of a batch.

    compute: (inputs, targets) of the whole batch -> None; computes gradients and loss of the part.
    gradients: the tensors that it fills.  copies: those to which it then copies them; none for the
    last part.
    """

    compute: Callable[[Tensor, Tensor], None]
    gradients: list[Tensor]
    copies: list[Tensor]


class ShardedBatch:
    """A loss by shards of a batch, which have equal numbers of sequences.

    loss: see `Loss`; the second form is needed from two shards on.
    """

    def __init__(self, loss: Loss, banks: Banks, count: int, device: torch.device) -> None:
        self.loss, self.banks = loss, banks
        gradients = [p.grad for bank in banks for p in bank.parameters if p.grad is not None]
        gradient_copies = [[torch.empty_like(g) for g in gradients] for _ in range(count - 1)]
        self.losses = [torch.zeros((), device=device) for _ in range(count)]
        self.shards = [
            Shard(partial(self.compute, index), gradients, copies)
            for index, copies in enumerate([*gradient_copies, []])
        ]

    def compute(self, index: int, inputs: Tensor, targets: Tensor) -> None:
        """Compute gradients and loss of one shard; only reads parameters."""
        self.banks.zero_gradients()
        with gc_paused():
            value = self.loss_of(index, inputs, targets)
            try:
                value.backward()
            except BaseException:
                forget()
                raise
        self.losses[index].copy_(value.detach())
        if copies := self.shards[index].copies:
            torch._foreach_copy_(copies, self.shards[index].gradients)

    def loss_of(self, index: int, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the part of the mean loss that a shard contributes."""
        count = len(self.shards)
        if count == 1:
            return self.loss(inputs, targets)
        size = len(inputs) // count
        rows = slice(index * size, (index + 1) * size)
        return self.loss(inputs[rows], targets[rows], (targets != IGNORE).sum())

    def total(self) -> Tensor:
        """Add the gradients of all shards to `.grad`, in order; return the loss of the batch."""
        *earlier, last = self.shards
        sums = [*(shard.copies for shard in earlier), last.gradients]
        for first, following in pairwise(sums):
            torch._foreach_add_(following, first)
        return sum(self.losses[1:], start=self.losses[0].clone())


class Measured(NamedTuple):
    """The measurements of a step, as 0-d tensors on the device; the host does not wait for them.

    loss: of the batch before the update.  grad_norm: before clipping.
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

    shards: the parts of the batch, whose gradients only read parameters.
    total: () -> LossAndNorm of the whole batch, after all shards.
    apply: LossAndNorm -> Measured; changes parameters.
    """

    shards: Sequence[Shard]
    total: Callable[[], LossAndNorm]
    apply: Callable[[Tensor, Tensor], Measured]

    def gradients(self, inputs: Tensor, targets: Tensor) -> LossAndNorm:
        """Compute the gradients of the batch; only reads parameters."""
        for shard in self.shards:
            shard.compute(inputs, targets)
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

    probe: measures the model after the update; a 'model_update' that is not finite masks the next
    update.
    share: called after the backward pass with the loss of this rank's part of the batch; reduces
    gradients to those of the whole batch and returns its loss.
    norm_of: the norm of all gradients after `share`.
    capture: turns update and probe into one function, such as a CUDA graph.
    """
    project = built.projection()
    make_update = bare_step(optimizer)
    untyped: Any = optimizer  # torch's classes do not declare found_inf and grad_scale
    undiverged = torch.ones((), device=optimizer.param_groups[0]["params"][0].device)
    last_update = torch.zeros_like(undiverged)  # ‖ΔF‖ of the previous step
    batch = ShardedBatch(loss, built.banks, train.shards, undiverged.device)

    def total() -> LossAndNorm:
        value = batch.total()
        return share(value) if share else value, norm_of(built.trained)

    def apply(value: Tensor, norm: Tensor) -> Measured:
        # Each is False for NaN.
        good = (norm < math.inf) & (value <= train.max_loss) & (last_update < math.inf)
        undiverged.mul_(good)
        # torch's fused optimizers divide gradients by grad_scale and skip the step on found_inf.
        untyped.found_inf = 1.0 - undiverged
        if train.clip is not None:
            untyped.grad_scale = (norm / train.clip).clamp(min=1.0)
        make_update()
        if project is not None:
            project()
        return Measured(value, norm, {})

    def masking_probe(probe: Probe) -> dict[str, Tensor]:
        values = probe()
        if "model_update" in values:
            last_update.copy_(values["model_update"])
        return values

    update = capture(Update(batch.shards, total, apply), probe and partial(masking_probe, probe))
    return Step(update, optimizer)


def bare_step(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Return the optimizer's step without the wrappers that torch adds.

    The wrappers import torch's compiler, which takes a second.  They only call hooks, which are
    not used here, and disable gradients.
    """
    step: Any = type(optimizer).step
    while hasattr(step, "__wrapped__"):
        step = step.__wrapped__

    def run() -> None:
        with torch.no_grad():
            step(optimizer)

    return run
