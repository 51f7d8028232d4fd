"""The model and batches that the ranks of one run share."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from deepstack import config as conf
from deepstack.base.errors import ConfigError
from deepstack.config.instruments import specs
from deepstack.fast.distributed import (
    RankGroup,
    ShardedBanks,
    parallelism,
    sharded_norm,
    sharded_sum,
)
from deepstack.model import build_model
from deepstack.model.banks import Bank, global_norm
from deepstack.model.build import Built
from deepstack.schemes import NORMS, Stream
from deepstack.tasks import IGNORE, Batch
from deepstack.training.optimizers import OPTIMIZERS
from deepstack.training.plan import RunPlan


def copy_views(stream: Stream) -> Stream:
    """Return the stream with a copy of each view in it.

    FSDP2 hooks the tensors that a module returns; an in-place operation would drop a view's hook.
    """
    if isinstance(stream, Tensor):
        return stream.clone() if stream._is_view() else stream
    if isinstance(stream, (tuple, list)):
        return type(stream)(copy_views(part) for part in stream)
    return stream


def shard(built: Built, ranks: RankGroup, device: torch.device) -> Built:
    """Return the model with its parameters sharded over the ranks, one group for each layer.

    Each rank has built the whole model from the seed, so that its numbers equal a single rank's;
    from here on it keeps its part of them.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    model = built.model
    for parameter in model.parameters():
        parameter.grad = None
    mesh = init_device_mesh(device.type, (ranks.size,))
    for module in (*model.layers, *model.stacks.values(), model):
        module.register_forward_hook(lambda _module, _inputs, output: copy_views(output))
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
    register_fsdp_forward_method(model, "hidden")
    named = {bank.key: [*map(model.get_parameter, bank.names)] for bank in built.banks}
    banks = ShardedBanks(built.banks, named, ranks)
    trained = {bank.key for bank in built.trained}
    return replace(built, banks=banks, trained=[b for b in banks if b.key in trained])


@dataclass(frozen=True)
class RankModel:
    """The model of a run on this rank, and what joins it with the other ranks.

    built: the whole model, or this rank's shards of its parameters.
    """

    plan: RunPlan
    built: Built

    def share_of(self, batch: Batch) -> tuple[Batch, float | None]:
        """Return this rank's sequences of a batch and the divisor of the sum of their losses.

        The loss is the mean over the predicted positions of the whole batch, however many of them
        each rank has.  Gradients of whole parameters are summed, so the divisor is the number of
        positions; FSDP2 takes the mean of gradients, so it is that number per rank.  None for a
        single rank.
        """
        ranks = self.plan.ranks
        if ranks.size == 1:
            return batch, None
        rows = ranks.share(len(batch.targets))
        part = Batch(batch.inputs[rows], batch.targets[rows], batch.masked[rows])
        count = float((batch.targets != IGNORE).sum())
        is_sharded = isinstance(self.built.banks, ShardedBanks)
        return part, count / ranks.size if is_sharded else count

    def reductions(
        self,
    ) -> tuple[Callable[[Tensor], Tensor] | None, Callable[[Sequence[Bank]], Tensor]]:
        """Return the all-reduce of gradients and loss (None for one rank) and the global norm.

        With repeated layers (`model.unique_layers`) the first also sums gradients over repetitions.
        """
        ranks, banks, trained = self.plan.ranks, self.built.banks, self.built.trained
        if isinstance(banks, ShardedBanks):
            return sharded_sum(trained, ranks), sharded_norm
        share = ranks.gradient_sum(trained)
        if not banks.loop:
            return share, global_norm

        def share_and_sum(loss: Tensor) -> Tensor:
            loss = share(loss) if share else loss
            banks.sum_repeats()
            return loss

        return share_and_sum, partial(global_norm, loop=banks.loop)

    def whole(self) -> Built | None:
        """Return the whole model on rank 0 and None on the others; all ranks must call this.

        For a sharded model it is a copy, which needs the memory of all parameters and gradients;
        log.layers_every=0 avoids it.
        """
        plan, built = self.plan, self.built
        if not isinstance(built.banks, ShardedBanks):
            return built if plan.ranks.is_rank0 else None
        values = built.banks.state()
        if not plan.ranks.is_rank0:
            return None
        vocab_size = plan.task.vocab_size
        model = build_model(plan.config, vocab_size=vocab_size, device=plan.device, draw=False)
        model.banks.load(values)
        buffers = dict(built.model.named_buffers())  # state of schemes besides parameters
        for name, buffer in model.model.named_buffers():
            buffer.copy_(buffers[name])
        return model


def build_for_ranks(plan: RunPlan) -> RankModel:
    """Return the model of a run on this rank: whole, or sharded if that is configured."""
    config, task, device, ranks = plan.config, plan.task, plan.device, plan.ranks
    sharded = plan.parallel == "fully_sharded"
    if sharded:
        config = conf.with_overrides(config, {"runtime.banks": False})  # FSDP2 has its own storage
    built = build_model(config, vocab_size=task.vocab_size, device=device)
    if built.model.schemes[0].reads_data:
        first = task.train_batch(1, config.train.batch_size)
        if config.model.dropout:  # the same masks on every rank
            torch.manual_seed(dropout_seed(config.seed, 0))
        built.calibrate(torch.from_numpy(first.inputs).to(device))
    for part in plan.parts:
        part.begin(plan, built)
    return RankModel(plan, shard(built, ranks, device) if sharded else built)


def dropout_seed(seed: int, step: int, rank: int = 0) -> int:
    """Return torch's seed for a step of a rank; ranks have different sequences and masks."""
    words = f"dropout/{seed}/{step}" + (f"/{rank}" if rank else "")
    return int.from_bytes(hashlib.sha256(words.encode()).digest()[:4], "little")


def refuse_cut_settings(config: conf.Config, ranks: RankGroup) -> None:
    """Raise ConfigError for settings that need a whole batch or whole matrices and have parts."""
    train, model, mode = config.train, config.model, parallelism(config, ranks)
    each, cuts_matrices = train.batch_size // ranks.size, mode == "fully_sharded"
    reason = "it needs whole matrices, and runtime.parallel=fully_sharded cuts them; "
    reason += "allowed with runtime.parallel=data"
    rules: list[tuple[str, object, str]] = [
        (
            "train.shards",
            mode and train.shards > 1,
            f"found {train.shards}, which needs one process; allowed 1, "
            f"or train.micro_batches={train.shards}",
        ),
        (
            "train.micro_batches",
            each % train.micro_batches,
            f"found {train.micro_batches}; allowed a divisor of the {each} sequences of a process",
        ),
        (
            "model.norm.kind",
            not NORMS[model.norm.kind].by_token and (mode or train.parts > 1),
            f"found {model.norm.kind}, which needs one process and train.shards=1 and "
            "train.micro_batches=1; or use rms",
        ),
        (
            "model.unique_layers",
            model.unique_layers and (cuts_matrices or train.spectral_penalty),
            "it excludes runtime.parallel=fully_sharded and train.spectral_penalty; allowed null",
        ),
        ("train.optimizer", cuts_matrices and not OPTIMIZERS.of(config).elementwise, reason),
        ("train.spectral_penalty", cuts_matrices and train.spectral_penalty, reason),
        ("log.layers_on", cuts_matrices and config.log.layers_on, reason),
    ]
    for spec in specs().values():
        is_cut = cuts_matrices and spec.needs_whole_matrices
        rules.append((spec.key, is_cut and spec.interval(config.log), reason))
    for key, is_broken, text in rules:
        if is_broken:
            raise ConfigError(f"{key}: {text}", key=key)
