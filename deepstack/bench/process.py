"""A row's own process, seen from the one that takes its times."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from typing import Any

from deepstack import config as conf
from deepstack import plugins
from deepstack.errors import DeepstackError

# Steps that are made and not counted.  On a CPU deepstack records the second and the third, the
# fourth touches fresh memory, and the fifth decides which calls do for batch and probe at once; on
# a GPU it makes three steps one by one and captures the fourth.
WARM_UP = {"cpu": 5, "cuda": 5}


class WorkerError(DeepstackError):
    """A row's process could not do what it was asked; exit_code says of what kind it was."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Worker:
    """One row in a process of its own, and what has been measured of it so far.

    steps, products: seconds, one number a round.  start: seconds from the start of the process to
    the end of its first step.  Memory in MB.
    """

    def __init__(self, row: str, config: conf.Config) -> None:
        self.row, self.config = row, config
        self.steps: list[float] = []
        self.products: list[float] = []
        self.start = 0.0
        self.start_memory = self.peak_memory = 0.0
        self.parameters: int | None = None
        self.flops = 0
        self._process: subprocess.Popen[str] | None = None

    def begin(self, warm_up: int) -> None:
        """Start the process and make the steps that are not counted.  WorkerError when it fails."""
        began = time.perf_counter()
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "deepstack.bench.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            encoding="utf-8",
        )
        order = {
            "row": self.row,
            "config": conf.to_yaml(self.config),
            "plugins": [str(path) for path in plugins.PATHS],
        }
        self.start_memory = self._ask(json.dumps(order))["start_memory_mb"]
        self._step()
        self.start = time.perf_counter() - began
        for _ in range(warm_up - 1):
            self._step()

    def step(self) -> None:
        """One step that counts.

        The first one's peak of memory is the row's: what is held afterwards, for the products, is
        not the step's.
        """
        answer = self._step()
        if not self.products:
            self.peak_memory = answer["peak_memory_mb"]
        self.parameters = answer["parameters"]
        self.steps.append(answer["seconds"])

    def release(self) -> None:
        """Free the model and what it needed."""
        self._ask("release")

    def time_products(self) -> None:
        """The time of a step's matrix products."""
        answer = self._ask("products")
        self.flops = answer["flops"]
        self.products.append(answer["seconds"])

    def end(self) -> None:
        """End the process, whatever it is doing."""
        if self._process is None:
            return
        self._process.kill()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        self._process.wait()
        self._errors.close()
        self._process = None

    def _step(self) -> dict[str, Any]:
        return self._ask("step")

    def _ask(self, line: str) -> dict[str, Any]:
        assert self._process is not None and self._process.stdin and self._process.stdout
        with contextlib.suppress(OSError):  # it has gone: its answer, or none, says why
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        said = self._process.stdout.readline()
        if not said:
            code = self._process.wait()
            self._errors.seek(0)
            lines = self._errors.read().strip().splitlines()
            # The kernel ends what takes too much memory with signal 9.
            why = lines[-1] if lines else "out of memory?" if code == -9 else "no word of it"
            raise WorkerError(f"its process ended with exit code {code}: {why}", 5)
        answer: dict[str, Any] = json.loads(said)
        if "error" in answer:
            raise WorkerError(answer["error"], answer["exit_code"])
        return answer
