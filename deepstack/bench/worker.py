"""Runs one row of a benchmark, step by step: python -m deepstack.bench.worker

Requests and answers pass through stdin, a connection.  The first request is (row, config, files of
plugins).  'step' runs one step, 'products' times the matrix products; each has one answer.  The end
of the connection ends the process.
"""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deepstack import config as conf
from deepstack import plugins
from deepstack.bench.peers import (
    PEERS,
    PeerModel,
    PeerTrainer,
    Shape,
    ShapeError,
    TrainStep,
    import_library,
    shape_of,
)
from deepstack.bench.products import Products
from deepstack.bench.rows import LOGGED, VARIANTS, Row
from deepstack.errors import DeepstackError
from deepstack.fast import fast_paths_of
from deepstack.fast.products import use_onednn
from deepstack.tasks import Task, task_of
from deepstack.training import choose_device, mean_loss, timed_steps, to_device, torch_settings


class TimedRow:
    """A row of the benchmark, step by step; its first step builds the model."""

    def __init__(self, row: Row, config: conf.Config) -> None:
        self.row = row
        for variant in row.variants:
            config = conf.with_overrides(config, VARIANTS[variant][1])
        self.config = config
        self.task = task_of(config)
        self.device = choose_device(config.runtime)
        self.shape = shape_of(config, self.task.vocab_size)
        self.steps: Iterator[float] | None = None
        self.parameters: int | None = None
        self.products: Products | None = None
        if not row.is_own and PEERS[row.name].torch:
            # so that the library's memory counts for the process, not for the model
            import_library(PEERS[row.name].package)

    def step(self) -> dict[str, Any]:
        """Run one step; return its seconds and the peak memory so far."""
        if self.steps is None:
            self.steps = self._start()
        return {
            "seconds": next(self.steps),
            "peak_memory_mb": peak_memory_mb(self.device),
            "parameters": self.parameters,
        }

    def time_products(self) -> dict[str, Any]:
        """Return the seconds and flops of all matrix products of a step."""
        with torch_settings(self.config, self.device):
            if self.products is None:
                unsharded = conf.with_overrides(self.config, {"train.shards": 1})
                half = self.config.train.precision == "bf16"
                dtype = torch.bfloat16 if half else torch.float32
                self.products = Products(
                    self.shape,
                    self.config.train.batch_size,
                    self.device,
                    dtype,
                    fast_paths_of(unsharded, self.device).products,
                )
                self.products.seconds()  # touches the fresh memory
            return {"seconds": self.products.seconds(), "flops": self.products.flops()}

    def _start(self) -> Iterator[float]:
        if self.row.is_own:
            endless = conf.with_overrides(self.config, {"train.steps": 1_000_000})
            return timed_steps(endless, logged=self.row.name == LOGGED.name)
        built = build_peer(self.row.name, self.shape, self.device)
        self.parameters = built.parameters
        onednn = "onednn" in self.row.variants
        return peer_steps(self.config, built, self.task, self.device, onednn)


def build_peer(name: str, shape: Shape, device: torch.device) -> PeerModel | PeerTrainer:
    """Build a peer on the device, in training mode, with exactly the layers of the shape.

    Raises ShapeError when the weight matrices of its layers hold other than
    depth (4 d_model² + 2 d_model d_ff) numbers.
    """
    with device:
        built = PEERS[name].build(shape)
    if built.in_matrices != shape.in_matrices:
        raise ShapeError(
            f"the matrices of its layers hold {built.in_matrices:,} numbers, and "
            f"{shape.in_matrices:,} make {shape.depth} layers of d_model {shape.d_model} and d_ff "
            f"{shape.d_ff}"
        )
    if isinstance(built, PeerModel):
        built.model.train()
    return built


def peer_optimizers(train: conf.Train, built: PeerModel) -> list[torch.optim.Optimizer]:
    """Build torch's optimizer as users of another library do, with torch's default settings.

    One group holds all parameters.  Muon takes the matrices of the layers, AdamW all others.
    """
    rate: dict[str, Any] = {"lr": train.lr, "weight_decay": train.weight_decay}
    parameters = list(built.model.parameters())
    if train.optimizer == "sgd":
        return [torch.optim.SGD(parameters, lr=train.lr, momentum=train.momentum)]
    if train.optimizer != "muon":
        kind = torch.optim.Adam if train.optimizer == "adam" else torch.optim.AdamW
        return [kind(parameters, betas=train.betas, eps=train.eps, **rate)]
    muon, matrices = train.muon, {p: None for p in built.stack.parameters() if p.ndim == 2}
    others = [p for p in parameters if p not in matrices]
    return [
        torch.optim.Muon(
            [*matrices],
            momentum=muon.momentum,
            ns_steps=muon.ns_steps,
            adjust_lr_fn=muon.adjust_lr,
            **rate,
        ),
        torch.optim.AdamW(others, betas=train.betas, eps=train.eps, **rate),
    ]


def torch_step(train: conf.Train, built: PeerModel, device: torch.device) -> TrainStep:
    """Return the training step of a model: zero_grad, forward, backward, clip, optimizer."""
    model, optimizers = built.model, peer_optimizers(train, built)

    def train_step(inputs: Tensor, targets: Tensor) -> float:
        model.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=train.precision == "bf16"):
            logits = model(inputs)
        loss = mean_loss(logits, targets)
        loss.backward()
        if train.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), train.clip)
        for optimizer in optimizers:
            optimizer.step()
        return loss.item()  # waits for the device

    return train_step


def peer_steps(
    config: conf.Config,
    built: PeerModel | PeerTrainer,
    task: Task,
    device: torch.device,
    onednn: bool = False,
) -> Iterator[float]:
    """Yield the seconds of successive steps, each with its batch.

    The batches are those of deepstack's steps; nothing is logged.  onednn: whether torch multiplies
    fp32 matrices of any size by oneDNN.
    """
    if isinstance(built, PeerTrainer):  # it moves its batches itself
        device, train_step = torch.device("cpu"), built.start(config)
    else:
        train_step = torch_step(config.train, built, device)
    with torch_settings(conf.with_overrides(config, {"runtime.deterministic": False}), device):
        for step in count(1):
            if onednn:
                use_onednn()
            began = time.perf_counter()
            batch = task.train_batch(step, config.train.batch_size)
            train_step(*to_device(batch, device))
            yield time.perf_counter() - began


def memory_line(name: str) -> float:
    """Return a line of /proc/self/status in MB: VmRSS is the present memory, VmHWM its peak.

    The peak of getrusage also counts the parent's memory at the fork.
    """
    status = Path("/proc/self/status")
    if not status.exists():
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / (1e6 if sys.platform == "darwin" else 1e3)
    lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
    return int(lines[name].split()[0]) * 1024 / 1e6


def peak_memory_mb(device: torch.device) -> float:
    """Return the peak memory so far: allocated on the GPU, or of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    return memory_line("VmHWM")


def main() -> None:
    """Answer requests until the connection ends; an error is the last answer."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    parent = Connection(0)
    try:
        row, config, files = parent.recv()
        plugins.load_plugins(files)
        timed = TimedRow(row, config)
        on_gpu = timed.device.type == "cuda"
        parent.send({"start_memory_mb": 0.0 if on_gpu else memory_line("VmRSS")})
        commands = {"step": timed.step, "products": timed.time_products}
        with suppress(EOFError, ConnectionError):
            while True:
                parent.send(commands[parent.recv()]())
    except DeepstackError as error:
        parent.send({"error": str(error), "exit_code": error.exit_code})
    except Exception as error:
        memory = isinstance(error, (torch.OutOfMemoryError, MemoryError))
        memory = memory or "DefaultCPUAllocator" in str(error)
        reason = f"{type(error).__name__}: {error}".split("\n")[0]
        parent.send({"error": reason, "exit_code": 5 if memory else 1})
        raise
    os._exit(0)  # nothing needs saving, and freeing a deep model takes time


if __name__ == "__main__":
    main()
