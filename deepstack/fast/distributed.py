"""The ranks that train one run together: their communication, and parameters sharded over them.

`torchrun` starts the processes and tells each one its rank in the environment.  They take equal
shares of every batch.  Rank 0 makes the decisions that must be made once: the folder, the
checkpoint to resume from, when to stop.

torch's DistributedDataParallel is not used: it hooks the autograd nodes that accumulate the
gradient of each parameter.  Fused sublayers write gradients in place and have no such node, and a
stack of a thousand layers has twelve thousand parameters but a dozen banks.  The gradients of the
banks are summed after the backward pass instead.

Sharded parameters (FSDP2) have the interface of the banks.  torch's `fully_shard` cuts each
parameter along its first axis, gathers a layer when it is needed and scatters its gradient.  The
optimizer receives the parts as ordinary tensors: its update is elementwise, so a part may be
updated alone, and the step stays the one that `make_step` defines.
"""

from __future__ import annotations

import atexit
import json
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from deepstack import config as conf
from deepstack.base import torchrun
from deepstack.base.ending import Stop
from deepstack.base.errors import ConfigError, DeepstackError, ResourceError
from deepstack.model.banks import Bank, Banks, padded_size

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# Other ranks wait while rank 0 takes a snapshot of every layer or writes a checkpoint.
TIMEOUT = timedelta(minutes=30)

# Smaller gradients share one message: a message costs about as much as so many numbers
# (two ranks, gloo on one host: 1 ms for each of 15 small banks, 0.6 ms for all in one).
SMALLEST_MESSAGE = 2**16

Tensors = dict[str, dict[str, Tensor]]


class Rank0Error(DeepstackError):
    """Rank 0 has raised and reports an error; this rank ends with the same exit code."""

    def __init__(self, exit_code: int) -> None:
        super().__init__("")
        self.exit_code = exit_code


class RankGroup:
    """The group of a process that trains alone, without communication.

    rank: 0 <= rank < size; rank 0 writes, prints and decides.  on_host: number of ranks on this
    host.
    """

    rank, size, on_host = 0, 1, 1

    @property
    def is_rank0(self) -> bool:
        """Return whether this rank writes, prints and decides."""
        return self.rank == 0

    def share(self, batch_size: int) -> slice:
        """Return this rank's sequences of a batch, the same number for each rank.

        Raises ConfigError if the batch cannot be divided equally.
        """
        each, left = divmod(batch_size, self.size)
        if left:
            raise ConfigError(
                f"train.batch_size: found {batch_size}; allowed a multiple of {self.size}, the "
                "number of processes",
                key="train.batch_size",
            )
        return slice(self.rank * each, (self.rank + 1) * each)

    def from_rank0(self, function: Callable[[], Any]) -> Any:
        """Call the function on rank 0 and return its result, a JSON value, on every rank.

        If it raises an error on rank 0, the other ranks raise Rank0Error.
        """
        return function()

    def max_over_ranks(self, number: int) -> int:
        """Return the largest of the ranks' numbers."""
        return number

    def broadcast(self, parts: Tensors) -> Tensors:
        """Return rank 0's groups of tensors on every rank (on the CPU)."""
        return parts

    def barrier(self) -> None:
        """Return when every rank has called this."""

    def gradient_sum(self, banks: Sequence[Bank]) -> Callable[[Tensor], Tensor] | None:
        """Return a function that sums the gradients of these banks, and a loss, over the ranks.

        None for a single rank.
        """
        return None


ALONE = RankGroup()


class TorchRankGroup(RankGroup):
    """The group of a rank that torchrun started: gloo between CPUs, NCCL between GPUs."""

    def __init__(self, device: torch.device, launch: torchrun.Launch, stop: Stop) -> None:
        if not dist.is_initialized():
            store = torchrun.meet(launch, stop, TIMEOUT)
            # Imported later (optimizers do), its functions would keep the group as a default
            # argument, and its threads would outlive the group.
            import_module("torch.distributed.nn.functional")
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            which = device if device.type == "cuda" else None
            dist.init_process_group(
                backend,
                timeout=TIMEOUT,
                device_id=which,
                store=store,
                rank=launch.rank,
                world_size=launch.size,
            )
            atexit.register(destroy_group)
        torchrun.has_joined = True
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.on_host = launch.on_host

    def from_rank0(self, function: Callable[[], Any]) -> Any:
        message = b""
        if self.is_rank0:
            try:
                message = json.dumps({"value": function()}).encode()
            except BaseException as error:
                code = error.exit_code if isinstance(error, DeepstackError) else 1
                self._broadcast(json.dumps({"exit_code": code}).encode())
                raise
        answer = json.loads(self._broadcast(message))
        if "exit_code" in answer:
            raise Rank0Error(answer["exit_code"])
        return answer["value"]

    def _broadcast(self, message: bytes) -> bytes:
        # JSON as bytes: torch's own broadcast of objects would unpickle the received bytes.
        length = torch.tensor([len(message)])
        dist.broadcast(length, 0)
        data = torch.frombuffer(bytearray(message), dtype=torch.uint8) if message else None
        data = torch.empty(int(length), dtype=torch.uint8) if data is None else data
        dist.broadcast(data, 0)
        return data.numpy().tobytes()

    def max_over_ranks(self, number: int) -> int:
        tensor = torch.tensor([number])  # on the CPU: no wait for a GPU
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return int(tensor)

    def broadcast(self, parts: Tensors) -> Tensors:
        names = self.from_rank0(
            lambda: [
                [part, key, list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]
                for part, tensors in parts.items()
                for key, tensor in tensors.items()
            ]
        )
        if not self.is_rank0:
            parts = {}
            for part, key, shape, dtype in names:
                parts.setdefault(part, {})[key] = torch.empty(shape, dtype=getattr(torch, dtype))
        for part, key, _, _ in names:
            parts[part][key] = tensor = parts[part][key].contiguous()
            if tensor.numel():
                dist.broadcast(tensor, 0)
        return parts

    def barrier(self) -> None:
        self.max_over_ranks(0)

    def gradient_sum(self, banks: Sequence[Bank]) -> Callable[[Tensor], Tensor] | None:
        if self.size == 1:
            return None
        gradients = [p.grad for bank in banks for p in bank.parameters if p.grad is not None]
        large = [g for g in gradients if g.numel() >= SMALLEST_MESSAGE]
        small = [g for g in gradients if g.numel() < SMALLEST_MESSAGE]

        def share(loss: Tensor) -> Tensor:
            loss = loss.clone()
            under_way = [dist.all_reduce(g, async_op=True) for g in large]
            several = [loss, *small]
            message = torch.cat([t.flatten() for t in several])
            dist.all_reduce(message)
            pieces = message.split([t.numel() for t in several])
            summed = [piece.view_as(t) for piece, t in zip(pieces, several, strict=True)]
            torch._foreach_copy_(several, summed)
            for work in under_way:
                work.wait()
            return loss

        return share


def join_ranks(device: torch.device, stop: Stop = lambda: None) -> RankGroup:
    """Join the group of ranks that torchrun started; return a group of one without torchrun.

    stop: ends the wait for other ranks with Interrupted once it returns a signal's number.
    """
    launch = torchrun.launch()
    return ALONE if launch is None else TorchRankGroup(device, launch, stop)


def parallelism(config: conf.Config, ranks: RankGroup) -> str | None:
    """Return the parallelism of the ranks ('data' or 'fully_sharded'); None for one rank."""
    return config.runtime.parallel if ranks.size > 1 else None


def started_by_torchrun() -> bool:
    """Return whether torchrun started this process as one of several ranks."""
    return torchrun.launch() is not None


def local_rank() -> int:
    """Return the rank of this process on its host, the number of its GPU; 0 without torchrun."""
    launch = torchrun.launch()
    return 0 if launch is None else launch.local_rank


def destroy_group() -> None:
    """Leave the group at the end of the process, after the last message."""
    if dist.is_initialized():
        # torch joins gloo's threads while it holds the interpreter lock.  Without a pause they may
        # still need that lock to release the tensors of the last message: a deadlock.
        time.sleep(0.1)
        dist.destroy_process_group()


def lost_rank(error: Exception) -> ResourceError | None:
    """Return the error to report if `error` means that another rank has ended, else None.

    Skips the group's shutdown: it could block on a dead process.
    """
    if not isinstance(error, dist.DistError) and "gloo/transport" not in str(error):
        return None
    atexit.unregister(destroy_group)
    return ResourceError(
        "another process of this run has ended, and says why\n"
        "the same command goes on from the last checkpoint"
    )


class ShardedBank(Bank):
    """One parameter of every layer; this rank holds some rows of each.

    parameters: these rows, one tensor (rows, …) a layer, the storage that FSDP2 gathers from.
    held: the distributed tensors that the model has in their place.
    """

    def __init__(self, plain: Bank, held: Sequence[nn.Parameter], ranks: RankGroup) -> None:
        self.held, self.ranks = held, ranks
        self.key, self.roles, self.start = plain.key, plain.roles, plain.start
        self.starts, self.stack, self.shape = plain.starts, plain.stack, plain.shape
        self.parameters = [
            nn.Parameter(local_part(p.detach()), requires_grad=p.requires_grad) for p in held
        ]

    def whole(self, parts: Sequence[Tensor]) -> Tensor:
        """Return tensors like `parameters` joined over the ranks, (depth, padded size).

        On rank 0 the result is on the CPU; on the others it has a shape and no storage.  All ranks
        must call this.
        """
        flat = self.gathered(parts).flatten(1)
        flat = F.pad(flat, (0, padded_size(self.shape) - flat.shape[1]))
        return flat.to("cpu" if self.ranks.is_rank0 else "meta")

    def gathered(self, parts: Sequence[Tensor]) -> Tensor:
        """Return tensors like `parameters`, joined over the ranks, on each of them: (depth, …)."""
        from torch.distributed.tensor import DTensor, Shard

        mesh = cast(DTensor, self.held[0]).device_mesh
        whole = torch.empty(len(parts), *self.shape, device="meta")
        # without its shape torch would assume that all ranks hold as many rows
        rows = DTensor.from_local(
            torch.stack(list(parts)), mesh, [Shard(1)], shape=whole.shape, stride=whole.stride()
        )
        return rows.full_tensor()

    @torch.no_grad()
    def change(self, by: Callable[[str, Tensor], None]) -> None:
        """Change whole matrices on every rank, one bank at a time, and keep this rank's rows."""
        whole = self.gathered([p.detach() for p in self.parameters])
        for role, values in zip(self.roles, whole.chunk(len(self.roles), dim=1), strict=True):
            by(role, values)
        self.copy_(whole)

    def parts(self, whole: Tensor) -> list[Tensor]:
        """Return this rank's parts of a result of `whole`, (depth, padded size or less)."""
        # As torch.chunk cuts: all parts equal but the last ones, which may be smaller or empty.
        rows = -(-self.shape[0] // self.ranks.size)
        start = self.ranks.rank * rows
        return list(self.shaped(whole.flatten(1))[:, start : start + rows])

    @torch.no_grad()
    def copy_(self, values: Tensor) -> None:
        for part, new in zip(self.parameters, self.parts(values), strict=True):
            part.copy_(new)

    def collect(self) -> None:
        """Move the gradients that the backward pass left with FSDP2 to `parameters`."""
        for part, held in zip(self.parameters, self.held, strict=True):
            gradient = held.grad
            held.grad = None
            # A scheme may own a parameter that its wiring does not use: its gradient is zero.
            part.grad = torch.zeros_like(part) if gradient is None else local_part(gradient)


class ShardedBanks(Banks):
    """The banks of a model whose parameters `fully_shard` has sharded.

    named: key of a bank -> its sharded parameter in every layer.
    """

    def __init__(
        self, plain: Banks, named: dict[str, list[nn.Parameter]], ranks: RankGroup
    ) -> None:
        self._count = plain.count()
        self.all = [ShardedBank(bank, named[bank.key], ranks) for bank in plain]

    def zero_gradients(self) -> None:
        """Do nothing: the backward pass creates new gradients."""

    def count(self) -> dict[str, int]:
        return self._count


def sharded_sum(banks: Sequence[Bank], ranks: RankGroup) -> Callable[[Tensor], Tensor]:
    """Return a function that collects the gradients after the backward pass and averages a loss.

    FSDP2 takes the mean of gradients over the ranks.  The loss is therefore a mean over ranks too:
    the sum over this rank's positions, divided by the mean number of positions per rank.
    """

    def share(loss: Tensor) -> Tensor:
        loss = loss / ranks.size
        dist.all_reduce(loss)
        for bank in banks:
            assert isinstance(bank, ShardedBank)
            bank.collect()
        return loss

    return share


def sharded_norm(banks: Sequence[Bank]) -> Tensor:
    """Return the norm of all gradients of these banks, by layer and then over the layers."""
    gradients = [p.grad for bank in banks for p in bank.parameters if p.grad is not None]
    squares = torch.stack(torch._foreach_norm(gradients)).square()
    dist.all_reduce(squares)
    return torch.linalg.vector_norm(squares.sqrt())


def local_part(tensor: Tensor) -> Tensor:
    """Return the rows of a distributed tensor that this rank holds, as a view."""
    return cast("DTensor", tensor).to_local()
