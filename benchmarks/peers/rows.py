"""The rows of a benchmark, and the process of each."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Pipe
from typing import Any

from benchmarks.peers.peers import PEERS
from deepstack import config as conf
from deepstack.base import ConfigError, DeepstackError, plugins, unknown

OWN = {"deepstack": "deepstack", "deepstack_unlogged": "deepstack, nothing logged"}
"""deepstack's own rows: with ‖ΔF‖ logged at every step, and the training step alone."""

PRODUCTS_LABEL = "matrix products alone"

VARIANTS: dict[str, tuple[str, dict[str, object]]] = {
    "fp32": ("fp32", {"train.precision": "fp32"}),
    "bf16": ("bf16", {"train.precision": "bf16"}),
    "onednn": ("products by oneDNN", {}),
    "shards": ("two shards on two threads", {"train.shards": 2, "runtime.threads": 2}),
}
"""The variants of a row with label and settings: another precision, torch's products by oneDNN, or
deepstack's step on two threads."""


@dataclass(frozen=True)
class Row:
    """A row of a benchmark: deepstack's step (a name in OWN) or a peer's, and its variants."""

    name: str
    variants: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Row:
        """Return the row written as in torch+onednn.  Raises ConfigError for an unknown name."""
        name, *variants = text.split("+")
        row = cls(name, tuple(variants))
        uses_torch = not row.is_own and PEERS[name].torch
        for variant in variants:
            if variant not in VARIANTS:
                raise ConfigError(f"bench: {unknown('variant', variant, list(VARIANTS))}")
        if "onednn" in variants and not uses_torch:
            raise ConfigError(f"bench: found {text}; allowed with onednn: peers that use torch")
        if "shards" in variants and not row.is_own:
            raise ConfigError(f"bench: found {text}; allowed with shards: {', '.join(OWN)}")
        return row

    @property
    def is_own(self) -> bool:
        """Whether the row is deepstack's."""
        return self.name in OWN

    @property
    def label(self) -> str:
        """The label in tables and charts."""
        label = OWN[self.name] if self.is_own else PEERS[self.name].label
        return ", ".join([label, *(VARIANTS[variant][0] for variant in self.variants)])


LOGGED, UNLOGGED = map(Row, OWN)

# Steps that do not count.  On a CPU deepstack records the second, and the third touches fresh
# memory; on a GPU it runs the first step eagerly and captures the second.
WARM_UP = 5

# glibc's settings under which a peer keeps the memory that it frees.  By default large buffers go
# back to the system at every step, and JAX then spends a sixth of a step on fresh pages.
KEEP_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
    "MALLOC_ARENA_MAX": "1",
}


class RowError(DeepstackError):
    """The process of a row failed; exit_code tells the kind of the error."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class RowProcess:
    """A row in a separate process, `bench.worker`, with its measurements.

    steps, products: seconds, one number a round.  start: seconds from the start of the process to
    the end of its first step.  Memory in MB.
    """

    def __init__(self, row: Row, config: conf.Config) -> None:
        self.row, self.config = row, config
        self.steps: list[float] = []
        self.products: list[float] = []
        self.start = 0.0
        self.start_memory = self.peak_memory = 0.0
        self.parameters: int | None = None
        self.flops = 0
        self._process: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        """Start the process and run the steps that do not count; RowError if that fails."""
        began = time.perf_counter()
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
        self._connection, other_end = Pipe()
        with other_end:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.peers.worker"],
                stdin=other_end.fileno(),
                stdout=self._errors,
                stderr=self._errors,
                env=os.environ if self.row.is_own else os.environ | KEEP_MEMORY,
            )
        loaded = [plugin.path for plugin in plugins.LOADED.values()]
        self.start_memory = self._ask((self.row, self.config, loaded))["start_memory_mb"]
        self._ask("step")
        self.start = time.perf_counter() - began
        for _ in range(WARM_UP - 1):
            self._ask("step")

    def step(self) -> None:
        """Run one step that counts.

        The row's peak memory is taken at steps before the products, which need memory too.
        """
        answer = self._ask("step")
        if not self.products:
            self.peak_memory = answer["peak_memory_mb"]
        self.parameters = answer["parameters"]
        self.steps.append(answer["seconds"])

    def time_products(self) -> None:
        """Time a step's matrix products."""
        answer = self._ask("products")
        self.flops = answer["flops"]
        self.products.append(answer["seconds"])

    def end(self) -> None:
        """Kill the process."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        self._connection.close()
        self._errors.close()
        self._process = None

    def _ask(self, message: object) -> dict[str, Any]:
        assert self._process is not None
        try:
            self._connection.send(message)
            answer: dict[str, Any] = self._connection.recv()
        except (EOFError, ConnectionError):
            code = self._process.wait()
            self._errors.seek(0)
            lines = self._errors.read().strip().splitlines()
            # The kernel kills a process that uses too much memory with signal 9.
            why = lines[-1] if lines else "out of memory?" if code == -9 else "no word of it"
            raise RowError(f"its process ended with exit code {code}: {why}", 5) from None
        if "error" in answer:
            raise RowError(answer["error"], answer["exit_code"])
        return answer
