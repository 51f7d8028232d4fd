"""Defines the training step: every fast path computes the same as the plain eager step here.

A step computes the gradients of a batch in equal shards and adds them in order.  Each shard
computes the gradients of its sequences from zero; the loss of the batch is the sum of the shards'
losses, each divided by the predicted positions of the whole batch.  An eager step runs one shard
after the other and keeps the gradients of all but the last in further tensors.  A replayed step
writes them there directly, so that threads can run the shards at the same time.  The order of all
sums is fixed: the numbers depend on the count of shards, and on nothing else.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
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


class Shard(NamedTuple):
    """One part of a batch.

    compute: (inputs, targets) of the whole batch -> None; computes gradients and loss of the part.
    gradients: the tensors that it fills.
    copies: those to which it then copies them; none for the last part.
    """

    compute: Callable[[Tensor, Tensor], None]
    gradients: list[Tensor]
    copies: list[Tensor]


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


def split_batch(
    loss: Loss, banks: Banks, count: int, device: torch.device
) -> tuple[list[Shard], Callable[[], Tensor]]:
    """Return the shards of a batch, which have equal numbers of sequences, and their total.

    total: adds the gradients of all shards to `.grad`, in order, and returns the batch's loss.

    loss: see `Loss`; the second form is needed from two shards on.
    """
    gradients = [p.grad for bank in banks for p in bank.parameters if p.grad is not None]
    copies = [[torch.empty_like(g) for g in gradients] for _ in range(count - 1)] + [[]]
    losses = [torch.zeros((), device=device) for _ in range(count)]

    def compute(index: int, inputs: Tensor, targets: Tensor) -> None:
        banks.zero_gradients()
        divisor = [(targets != IGNORE).sum()] if count > 1 else []
        with gc_paused():
            value = loss(inputs.chunk(count)[index], targets.chunk(count)[index], *divisor)
            try:
                value.backward()
            except BaseException:
                forget()
                raise
        losses[index].copy_(value.detach())
        if copies[index]:
            torch._foreach_copy_(copies[index], gradients)

    def total() -> Tensor:
        for previous, following in pairwise([*copies[:-1], gradients]):
            torch._foreach_add_(following, previous)
        return sum(losses[1:], start=losses[0].clone())

    shards = [Shard(partial(compute, i), gradients, copies[i]) for i in range(count)]
    return shards, total


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
        the gradients over the ranks and returns the loss of the whole batch.
    norm_of: the norm of all gradients after `share`.
    capture: turns update and probe into one function, such as a CUDA graph.
    """
    device = optimizer.param_groups[0]["params"][0].device
    shards, total_of_shards = split_batch(loss, built.banks, train.shards, device)
    diverged = torch.zeros((), device=device)
    # torch's fused optimizers divide gradients by grad_scale and skip the step if found_inf is 1.
    untyped: Any = optimizer  # torch's classes do not declare these
    untyped.found_inf = diverged
    change_parameters, constrain = bare_step(optimizer), built.projection()

    def total() -> LossAndNorm:
        value = total_of_shards()
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

    update = capture(Update(shards, total, apply), probe and partial(measure, probe))
    return Step(update, optimizer)


def bare_step(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Return the optimizer's step without the wrappers that torch adds.

    The wrappers import torch's compiler, which takes a second.  They only call hooks, which are
    not used here, and disable gradients.
    """
    return torch.no_grad()(partial(inspect.unwrap(type(optimizer).step), optimizer))
