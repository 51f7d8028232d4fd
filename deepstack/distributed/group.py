"""Several processes that train one model: who takes part, and what they tell each other.

`torchrun` starts them and says in the environment who each one is.  They take equal shares of the
same batch, and what must be decided once (the folder, where to go on, when to stop) the first one
decides.

torch's DistributedDataParallel is not used: it hooks the nodes where autograd accumulates the
gradient of each parameter.  Fused sublayers write gradients in place and have no such node, and a
stack of a thousand layers has twelve thousand parameters but a dozen banks.  So the gradients of
the banks themselves are summed, after the backward pass.
"""

from __future__ import annotations

import atexit
import json
import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from deepstack.errors import ConfigError, DeepstackError, ResourceError
from deepstack.parameters.banks import Bank

# Others wait in silence while the first process looks at every layer or writes a checkpoint.
PATIENCE = timedelta(minutes=30)

# Gradients of fewer numbers travel together: a message costs about as much as so many of them
# (two processes, gloo on one host: 1 ms for each of 15 small banks, 0.6 ms for all in one).
WORTH_A_MESSAGE = 2**16

Tensors = dict[str, dict[str, Tensor]]


class LedError(DeepstackError):
    """The first process met an error and says so; this one ends with the same exit code."""

    def __init__(self, exit_code: int) -> None:
        super().__init__("")
        self.exit_code = exit_code


class Processes:
    """One process that trains alone; what several do together comes for nothing here.

    rank: 0 <= rank < size, 0 the process that writes, prints and decides; local_rank: its number
    on this host, which is the number of its GPU; on_host: how many there are on this host.
    """

    rank, size, local_rank, on_host = 0, 1, 0, 1

    @property
    def first(self) -> bool:
        """Whether this process writes, prints and decides."""
        return self.rank == 0

    def share(self, batch_size: int) -> slice:
        """This process's sequences of a batch, the same number for each process.

        Raises ConfigError when there is no such number.
        """
        each, left = divmod(batch_size, self.size)
        if left:
            near = [n for n in (each * self.size, (each + 1) * self.size) if n]
            raise ConfigError(
                f"train.batch_size: found {batch_size}, of which {self.size} processes cannot "
                f"take equal shares; nearest: {' or '.join(map(str, near))}",
                key="train.batch_size",
            )
        return slice(self.rank * each, (self.rank + 1) * each)

    def led(self, ask: Callable[[], Any]) -> Any:
        """What the first process finds when it asks, on every process; JSON values only.

        What it raises there is a LedError on the others.
        """
        return ask()

    def largest(self, number: int) -> int:
        """The largest of the numbers that the processes give."""
        return number

    def spread(self, parts: Tensors) -> Tensors:
        """Groups of tensors of the first process, on every process (on the CPU)."""
        return parts

    def wait(self) -> None:
        """Return when every process has come here."""

    def summing(self, banks: Sequence[Bank]) -> Callable[[Tensor], Tensor] | None:
        """What makes the gradients of these banks, and a loss, their sum over the processes."""
        return None


class Together(Processes):
    """One of several processes that torchrun started: gloo between CPUs, NCCL between GPUs."""

    def __init__(self, device: torch.device) -> None:
        import torch.distributed as dist

        self.dist = dist
        if not dist.is_initialized():
            # Imported later (optimizers do), its functions would keep the group as a default
            # argument, and its threads would outlive `leave`.
            import_module("torch.distributed.nn.functional")
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            which = device if device.type == "cuda" else None
            dist.init_process_group(backend, timeout=PATIENCE, device_id=which)
            atexit.register(leave)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.local_rank, self.on_host = local_rank(), int(os.environ.get("LOCAL_WORLD_SIZE", 1))

    def led(self, ask: Callable[[], Any]) -> Any:
        if not self.first:
            answer = json.loads(self._broadcast(b""))
            if "exit_code" in answer:
                raise LedError(answer["exit_code"])
            return answer["value"]
        try:
            value = ask()
            message = json.dumps({"value": value}).encode()
        except BaseException as error:
            code = error.exit_code if isinstance(error, DeepstackError) else 1
            self._broadcast(json.dumps({"exit_code": code}).encode())
            raise
        self._broadcast(message)
        return value

    def _broadcast(self, message: bytes) -> bytes:
        # JSON as bytes: torch's own broadcast of objects would unpickle what it receives.
        length = torch.tensor([len(message)])
        self.dist.broadcast(length, 0)
        data = torch.frombuffer(bytearray(message), dtype=torch.uint8) if message else None
        data = torch.empty(int(length), dtype=torch.uint8) if data is None else data
        self.dist.broadcast(data, 0)
        return data.numpy().tobytes()

    def largest(self, number: int) -> int:
        tensor = torch.tensor([number])  # on the CPU: a GPU is not waited for
        self.dist.all_reduce(tensor, self.dist.ReduceOp.MAX)
        return int(tensor)

    def spread(self, parts: Tensors) -> Tensors:
        names = self.led(
            lambda: [
                [part, key, list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]
                for part, tensors in parts.items()
                for key, tensor in tensors.items()
            ]
        )
        if not self.first:
            parts = {}
            for part, key, shape, dtype in names:
                parts.setdefault(part, {})[key] = torch.empty(shape, dtype=getattr(torch, dtype))
        for part, key, _, _ in names:
            parts[part][key] = tensor = parts[part][key].contiguous()
            if tensor.numel():
                self.dist.broadcast(tensor, 0)
        return parts

    def wait(self) -> None:
        self.largest(0)

    def summing(self, banks: Sequence[Bank]) -> Callable[[Tensor], Tensor] | None:
        if self.size == 1:
            return None
        gradients = [p.grad for bank in banks for p in bank.parameters if p.grad is not None]

        large = [g for g in gradients if g.numel() >= WORTH_A_MESSAGE]
        small = [g for g in gradients if g.numel() < WORTH_A_MESSAGE]

        def share(loss: Tensor) -> Tensor:
            loss = loss.clone()
            under_way = [self.dist.all_reduce(g, async_op=True) for g in large]
            several = [loss, *small]
            message = torch.cat([t.flatten() for t in several])
            self.dist.all_reduce(message)
            pieces = message.split([t.numel() for t in several])
            summed = [piece.view_as(t) for piece, t in zip(pieces, several, strict=True)]
            torch._foreach_copy_(several, summed)
            for work in under_way:
                work.wait()
            return loss

        return share


def join(device: torch.device) -> Processes:
    """This process among those that torchrun started, or alone where it did not start it."""
    return Together(device) if started_by_torchrun() else Processes()


def started_by_torchrun() -> bool:
    """Whether the environment says who this process is, as torchrun does."""
    return {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"} <= os.environ.keys()


def local_rank() -> int:
    """The number of this process on its host; 0 without torchrun."""
    return int(os.environ["LOCAL_RANK"]) if started_by_torchrun() else 0


def leave() -> None:
    """Part from the other processes, all of which have come to their end."""
    import torch.distributed as dist

    if dist.is_initialized():
        # gloo's threads may still be releasing the tensors of the last message, for which they need
        # the interpreter: torch joins them while it holds that, and they wait for each other.
        time.sleep(0.1)
        dist.destroy_process_group()


def lost(error: Exception) -> ResourceError | None:
    """What to say when an error means that another process is gone; None for any other error.

    Nothing is said goodbye to any more: that could wait for a process that never answers.
    """
    import torch.distributed as dist

    if not isinstance(error, dist.DistError) and "gloo/transport" not in str(error):
        return None
    atexit.unregister(leave)
    return ResourceError(
        "another process of this run has ended, and says why\n"
        "the same command goes on from the last checkpoint"
    )
