"""A run folder, a checkpoint and a model that several processes of one run have in common.

The first process holds the folder and is the only one that reads or writes it: the others need
not even see its disk.  What they must know, it tells them.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, Self

import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from deepstack import config as conf
from deepstack.distributed import Processes, ShardedBanks, sharded_norm, sharded_sum
from deepstack.errors import ResourceError
from deepstack.fast import parallel_of
from deepstack.model import Transformer, build_model
from deepstack.model.build import Built
from deepstack.parameters import Bank, global_norm
from deepstack.records import ENDED, AppendLog, RunFolder
from deepstack.schemes import Stream
from deepstack.tasks import IGNORE, Batch, Task
from deepstack.training.checkpoint import Checkpoint
from deepstack.training.meta import choose_folder

# what a disk says that nothing may be written to
CLOSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)


class SilentLog(AppendLog):
    """A log of which nothing reaches the disk."""

    def open(self, replay_from: int = -1) -> Self:
        return self

    def write(self, row: object) -> None:
        """Nothing."""

    @contextmanager
    def _reading(self) -> Iterator[BinaryIO]:
        yield BytesIO()


class SilentFolder(RunFolder):
    """A run folder that another process holds: it looks empty, and nothing is written to it."""

    @property
    def log_path(self) -> Path:
        return Path(os.devnull)

    def exists(self) -> bool:
        return False

    def write_text(self, path: Path, text: str) -> None:
        """Nothing."""

    def write_layers(self, values: Mapping[str, ArrayLike], steps: ArrayLike) -> None:
        """Nothing."""

    def read_meta(self) -> dict[str, Any]:
        return {}

    def checkpoints(self) -> list[int]:
        return []

    def log(self, name: str, columns: Sequence[str], *, tolerance: float = 0.0) -> AppendLog:
        return SilentLog(self.path / f"{name}.csv", columns)


@contextmanager
def held_folder(
    config: conf.Config, study: Path, task: Task, processes: Processes
) -> Iterator[tuple[RunFolder, str | None]]:
    """The run's folder, held by the first process until the end of the block, and its state."""
    with ExitStack() as stack:

        def hold() -> list[str | None]:
            folder = choose_folder(config, study, task)
            try:
                stack.enter_context(folder.lock())
            except ResourceError as error:
                if isinstance(error.__cause__, OSError) and error.__cause__.errno in CLOSED:
                    with suppress(ResourceError):
                        if (state := folder.read_state()) in ENDED:  # there is nothing to write
                            return [str(folder.path), state]
                    raise ResourceError(f"{error}; give another folder with --out") from error
                raise
            try:
                return [str(folder.path), folder.read_state()]
            except ResourceError as error:
                away = "`deepstack rm` puts the run away, and the same command trains it anew"
                raise ResourceError(f"{error}; {away}") from error

        path, state = processes.led(hold)
        yield (RunFolder(path) if processes.first else SilentFolder(path)), state


def common_checkpoint(
    processes: Processes, find: Callable[[], Checkpoint | None]
) -> Checkpoint | None:
    """What the first process finds when it looks for a checkpoint, on every process."""
    found: list[Checkpoint | None] = []

    def ask() -> dict[str, Any] | None:
        found.append(find())
        return None if found[0] is None else {"step": found[0].step, "state": found[0].state}

    about = processes.led(ask)
    if about is None:
        return None
    parts = processes.spread(found[0].parts if found and found[0] else {})
    return Checkpoint(about["step"], parts, about["state"])


def copy_views(stream: Stream) -> Stream:
    """The stream with a copy of each view in it.

    FSDP2 hooks the tensors that a module returns; an in-place operation would drop a view's hook.
    """
    if isinstance(stream, Tensor):
        return stream.clone() if stream._is_view() else stream
    if isinstance(stream, (tuple, list)):
        return type(stream)(copy_views(part) for part in stream)
    return stream


def shard(built: Built, processes: Processes, device: torch.device) -> Built:
    """The model with its parameters cut over the processes, layer by layer and the rest together.

    Each process has built the whole model from the seed, so that the numbers are those of one
    process; from here on it keeps its part of them.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    model = built.model
    for parameter in model.parameters():
        parameter.grad = None
    mesh = init_device_mesh(device.type, (processes.size,))
    for module in (*model.layers, *model.stacks.values(), model):
        module.register_forward_hook(lambda _module, _inputs, output: copy_views(output))
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
    register_fsdp_forward_method(model, "hidden")
    banks = ShardedBanks(built.banks, {b.key: held(model, b) for b in built.banks}, processes)
    trained = {bank.key for bank in built.trained}
    return replace(built, banks=banks, trained=[b for b in banks if b.key in trained])


def held(model: Transformer, bank: Bank) -> list[nn.Parameter]:
    """The parameters that a bank is named after: one a layer, or the one outside of them."""
    if bank.stack is None:
        return [model.get_parameter(bank.key)]
    name = bank.key.removeprefix(f"{bank.stack}.layers.")
    return [layer.get_parameter(name) for layer in model.stacks[bank.stack].layers]


def build_together(
    config: conf.Config, task: Task, device: torch.device, processes: Processes
) -> Built:
    """The model of a run: on each process the whole of it, or a part where that is configured."""
    sharded = parallel_of(config, processes) == "fully_sharded"
    if sharded:
        config = conf.with_overrides(config, {"runtime.banks": False})  # FSDP2 has its own storage
    built = build_model(config, vocab_size=task.vocab_size, device=device)
    if built.model.schemes[0].reads_data:
        first = task.train_batch(1, config.train.batch_size)
        if config.model.dropout:  # on every process the same masks
            torch.manual_seed(dropout_seed(config.seed, 0))
        built.calibrate(torch.from_numpy(first.inputs).to(device))
    return shard(built, processes, device) if sharded else built


def dropout_seed(seed: int, step: int, rank: int = 0) -> int:
    """torch's seed before a step: each step and process (whose sequences are others) its own."""
    words = f"dropout/{seed}/{step}" + (f"/{rank}" if rank else "")
    return int.from_bytes(hashlib.sha256(words.encode()).digest()[:4], "little")


def share_of(batch: Batch, built: Built, processes: Processes) -> tuple[Batch, float | None]:
    """This process's sequences of a batch, and what the sum of their losses is divided by.

    The loss is the mean over the predicted positions of the whole batch, however many of them each
    process has.  Gradients of whole parameters are summed, so that is their number; FSDP2 takes the
    mean of gradients, so it is their number by process.  None where nothing is shared.
    """
    if processes.size == 1:
        return batch, None
    rows = processes.share(len(batch.targets))
    part = Batch(batch.inputs[rows], batch.targets[rows], batch.masked[rows])
    count = float((batch.targets != IGNORE).sum())
    return part, count / processes.size if isinstance(built.banks, ShardedBanks) else count


def reductions(
    built: Built, processes: Processes
) -> tuple[Callable[[Tensor], Tensor] | None, Callable[[Sequence[Bank]], Tensor]]:
    """What makes gradients and loss those of the whole batch, and what takes their norm."""
    if isinstance(built.banks, ShardedBanks):
        return sharded_sum(built.trained, processes), sharded_norm
    return processes.summing(built.trained), global_norm


def whole_copy(
    config: conf.Config, built: Built, device: torch.device, processes: Processes
) -> Built | None:
    """The model in one piece on the first process, None on the others; all must ask for it.

    Of a model that is cut this is a copy, which needs the memory of all parameters and of their
    gradients; log.layers_every=0 does without.
    """
    if not isinstance(built.banks, ShardedBanks):
        return built if processes.first else None
    values = built.banks.state()
    if not processes.first:
        return None
    vocab_size = len(built.model.embedding)
    whole = build_model(config, vocab_size=vocab_size, device=device, draw=False)
    whole.banks.load(values)
    buffers = dict(built.model.named_buffers())  # what schemes keep besides their parameters
    for name, buffer in whole.model.named_buffers():
        buffer.copy_(buffers[name])
    return whole
