"""Runs one row of a benchmark, step by step: python -m deepstack.bench.worker

Requests and answers are messages in JSON over stdin, a connection.  The first is the order: row,
config, plugins.  'step' runs one step, 'products' times the matrix products; each has one answer.
The end of the connection ends the process.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from deepstack import config as conf
from deepstack import plugins
from deepstack.bench.peers import PEERS, PeerTrainer, import_library, shape_of
from deepstack.bench.products import Products
from deepstack.bench.rows import (
    LOGGED,
    OWN,
    build_peer,
    config_of_row,
    deepstack_steps,
    parse_row,
    peer_steps,
    trainer_steps,
)
from deepstack.errors import DeepstackError
from deepstack.fast import fast_paths_of
from deepstack.tasks import task_of
from deepstack.training import choose_device, torch_settings


class Row:
    """One row of the benchmark; its first step builds the model."""

    def __init__(self, row: str, config: conf.Config) -> None:
        self.name, self.variants = parse_row(row)
        self.config = config = config_of_row(row, config)
        self.task = task_of(config)
        self.device = choose_device(config.runtime)
        self.shape = shape_of(config, self.task.vocab_size)
        self.steps: Iterator[float] | None = None
        self.parameters: int | None = None
        self.products: Products | None = None
        if self.name not in OWN and PEERS[self.name].torch:
            # so that the library's memory counts for the process, not for the model
            import_library(PEERS[self.name].package)

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
        if self.name in OWN:
            return deepstack_steps(self.config, logged=self.name == LOGGED)
        built = build_peer(self.name, self.shape, self.device)
        if isinstance(built, PeerTrainer):
            self.parameters = built.parameters
            return trainer_steps(self.config, built, self.task)
        self.parameters = sum(p.numel() for p in built.model.parameters())
        onednn = "onednn" in self.variants
        return peer_steps(self.config, built, self.task, self.device, onednn)


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

    def answer(content: dict[str, Any]) -> None:
        parent.send_bytes(json.dumps(content).encode())

    try:
        order = json.loads(parent.recv_bytes())
        plugins.load_plugins([Path(path) for path in order["plugins"]])
        row = Row(order["row"], conf.parse_config(order["config"]))
        on_gpu = row.device.type == "cuda"
        answer({"start_memory_mb": 0.0 if on_gpu else memory_line("VmRSS")})
        commands = {"step": row.step, "products": row.time_products}
        with suppress(EOFError, ConnectionError):
            while True:
                answer(commands[json.loads(parent.recv_bytes())]())
    except DeepstackError as error:
        answer({"error": str(error), "exit_code": error.exit_code})
    except Exception as error:
        memory = isinstance(error, (torch.OutOfMemoryError, MemoryError))
        memory = memory or "DefaultCPUAllocator" in str(error)
        reason = f"{type(error).__name__}: {error}".split("\n")[0]
        answer({"error": reason, "exit_code": 5 if memory else 1})
        raise
    os._exit(0)  # nothing needs saving, and freeing a deep model takes time


if __name__ == "__main__":
    main()
