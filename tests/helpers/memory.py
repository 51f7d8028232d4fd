"""The memory that a task takes, measured in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
from deepstack.tasks import build_task
def peak():
    lines = open("/proc/self/status").read().splitlines()
    return int(next(l for l in lines if l.startswith("VmHWM")).split()[1]) * 1024
before = peak()
task = build_task(sys.argv[1], {"path": sys.argv[2]}, seq_len=64, seed=0)
task.train_batch(0, 64), task.validation_batch(0, 64)
print(peak() - before, task.memory)
"""


def memory_of(task: str, path: Path) -> tuple[int, int]:
    """The bytes that building a task of a file and drawing two batches take, and its estimate."""
    words = [sys.executable, "-c", PROGRAM, task, str(path)]
    out = subprocess.run(words, capture_output=True, text=True, check=True)
    used, estimate = map(int, out.stdout.split())
    return used, estimate
