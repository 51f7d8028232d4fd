"""Measures the cost of the log and of checkpoints as a share of the training time.

python benchmarks/log_cost.py [--depths 48,1000] [--d-model 32,64] [--steps 5]

Columns:

- step: median seconds of a training step without the time in AppendLog.write.
- log: median time in AppendLog.write of a step's rows of steps.csv and timing.csv.
- checkpoint: one `save`, with its verification, over the default interval between two.
The run folder is a temporary folder in --out. CPU, one thread, and the narrowest shapes: wider ones
have longer steps and the same rows.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from deepstack.config import Config, with_overrides
from deepstack.records import AppendLog
from deepstack.training import temporary_run

SHAPE = {
    "task.seq_len": 32, "train.batch_size": 8, "train.eval_every": 0, "train.eval_batches": 1,
    "log.layers_every": 0, "runtime.device": "cpu", "runtime.threads": 1,
}  # fmt: skip
NAMES = ("depth", "d_model", "step ms", "log ms", "log %", "checkpoint s", "MB", "checkpoint %")


class Clock:
    """Adds up the seconds spent in AppendLog.write."""

    def __init__(self) -> None:
        self.seconds = 0.0
        write = AppendLog.write

        def timed(log: AppendLog, row: object) -> None:
            began = time.perf_counter()
            write(log, row)
            self.seconds += time.perf_counter() - began

        AppendLog.write = timed

    def lap(self) -> float:
        """Return the seconds since the last lap, and start a new one."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


def measure(depth: int, d_model: int, steps: int, clock: Clock, out: Path | None) -> list[float]:
    """Return one row of the table."""
    size = {"model.depth": depth, "model.d_model": d_model, "train.steps": steps}
    config = with_overrides(Config(), SHAPE | size)
    every, logs = list[float](), list[float]()
    with temporary_run(config, folder=out) as run:
        run.begin()
        clock.lap()
        for step in range(1, steps + 1):
            began = time.perf_counter()
            measured = run.step(*run.batch(step), run.learning_rate(step))
            run.record(step, measured)
            run.recorder.flush()
            logs.append(clock.lap())
            every.append(time.perf_counter() - began - logs[-1])
        began = time.perf_counter()
        run.save(steps)
        saving = time.perf_counter() - began
        saved = run.prepared.folder.checkpoint_path(steps)
        size_mb = sum(path.stat().st_size for path in saved.iterdir()) / 1e6
    # The first step touches all of its memory for the first time.
    step_s, log_s = statistics.median(every[1:]), statistics.median(logs[1:])
    interval = config.runtime.checkpoint_seconds
    shares = 100 * log_s / step_s, 100 * saving / interval
    return [depth, d_model, 1e3 * step_s, 1e3 * log_s, shares[0], saving, size_mb, shares[1]]


def numbers(text: str) -> list[int]:
    """'6,48' -> [6, 48]."""
    return [int(part) for part in text.split(",")]


def show(row: Sequence[object]) -> None:
    """Print a row of the table."""
    cells = (f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in row)
    print("".join(f"{cell:>14}" for cell in cells), flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--depths", type=numbers, default=[48, 1000])
    parser.add_argument("--d-model", type=numbers, default=[32, 64])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    clock = Clock()
    show(NAMES)
    for depth in arguments.depths:
        for d_model in arguments.d_model:
            show(measure(depth, d_model, arguments.steps, clock, arguments.out))


if __name__ == "__main__":
    main()
