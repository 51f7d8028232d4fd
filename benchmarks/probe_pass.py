"""Times the probe's pass through a fused stack with and without inference mode.

python benchmarks/probe_pass.py [--depth 300] [--passes 40] [--rounds 5]

Layers as in configs/bench_narrow.yaml, one sequence, one CPU thread. The two take turns; a round
gives the median of each. Both compute the same bits.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch

from deepstack.config import load_config
from deepstack.fast import FastPaths, enable_fast_paths
from deepstack.model import build_model

CONFIG = Path(__file__).parents[1] / "configs" / "bench_narrow.yaml"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--depth", type=int, default=300)
    parser.add_argument("--passes", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    config = load_config(CONFIG, [f"model.depth={arguments.depth}"])
    model = build_model(config, vocab_size=257).model.eval()
    enable_fast_paths(model, FastPaths(fused=True, compiled=False, captured=False), 0, print)
    tokens = torch.randint(257, (1, config.task.seq_len))

    def timed(infers: bool) -> tuple[float, torch.Tensor]:
        model.infers = infers
        with torch.no_grad():
            began = time.perf_counter()
            states = model.hidden(tokens)
            return (time.perf_counter() - began) / arguments.depth * 1e6, states

    print(f"{'no_grad, us a layer':>20}{'inference mode':>16}{'ratio':>8}")
    for _ in range(arguments.rounds):
        times: list[list[float]] = [[], []]
        for _ in range(arguments.passes):
            (plain, one), (spared, other) = timed(False), timed(True)
            assert torch.equal(one, other)
            times[0].append(plain)
            times[1].append(spared)
        before, after = (statistics.median(column) for column in times)
        print(f"{before:20.1f}{after:16.1f}{after / before:8.2f}", flush=True)


if __name__ == "__main__":
    main()
