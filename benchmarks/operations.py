"""Times every operation of a replayed step, and the bytes a second that it reads and writes.

python benchmarks/operations.py [--shape narrow] [--rounds 15] [key=value ...]

The least time of each operation over the rounds, summed by function and shapes, in microseconds a
layer. Above the memory's rate (adding two arrays which no cache holds), its tensors lie in a cache.
Part 0 is the batch (with train.shards, one part each); the last has the sums, the optimizer and the
probe.
"""

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers import shape_config
from benchmarks.peers.rows import WARM_UP
from deepstack.training import temporary_run

NUMBERS = 2**18  # of an array: the caches hold it, and not 200 of them


def memory_rate() -> float:
    """Return the gigabytes per second that additions of arrays in no cache read and write."""
    x, y, out = (torch.ones(200, NUMBERS) for _ in range(3))
    times = [seconds(torch.add, row[:2], {"out": row[2]}) for row in zip(x, y, out, strict=True)]
    return 12e-9 * NUMBERS / statistics.median(times)


def seconds(function: Any, args: Any, kwargs: Any) -> float:
    """Call a function and return its time."""
    began = time.perf_counter()
    function(*args, **kwargs)
    return time.perf_counter() - began


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from tensors_in(inner)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))


def label(function: Any, args: Any) -> str:
    """Return the name of a function and the shapes of its first arguments."""
    name = getattr(function, "__name__", "") or "other"
    shapes = [tuple(tensor.shape) for tensor in tensors_in(args)]
    return f"{name} {' '.join(map(str, shapes[:3]))}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", default="narrow")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    config = shape_config(
        arguments.shape, ["train.steps=1000000", "runtime.replay=python", *arguments.overrides]
    )
    depth = config.model.depth
    sums: dict[tuple[int, str], list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    with temporary_run(config) as run, torch.inference_mode():
        run.begin()
        with torch.inference_mode(False), torch.enable_grad():
            for step in range(1, WARM_UP + 1):
                run.step(*run.batch(step), 1e-4)
        rate = memory_rate()
        parts = run.step.update.bound
        least = [[float("inf")] * len(part.operations) for part in parts]
        for _ in range(arguments.rounds):
            for part, times in zip(parts, least, strict=True):
                for index, operation in enumerate(part.operations):
                    times[index] = min(times[index], seconds(*operation))
        for number, (part, times) in enumerate(zip(parts, least, strict=True)):
            for (function, args, kwargs), elapsed in zip(part.operations, times, strict=True):
                row = sums[number, label(function, args)]
                row[0] += 1
                row[1] += elapsed
                row[2] += sum(t.nbytes for t in tensors_in([args, kwargs]))
    print(f"parts, ms: {[round(1e3 * sum(t), 1) for t in least]}; memory {rate:.1f} GB/s")
    print(f"{'part':>4}{'count':>8}{'us a layer':>12}{'GB/s':>8}  operation")
    for (number, name), (count, elapsed, size) in sorted(sums.items(), key=lambda row: -row[1][1]):
        if elapsed > 1e-6 * depth:
            figures = f"{count:8}{1e6 * elapsed / depth:12.1f}{1e-9 * size / elapsed:8.1f}"
            print(f"{number:4}{figures}  {name}")


if __name__ == "__main__":
    main()
