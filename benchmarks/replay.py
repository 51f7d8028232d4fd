"""Measures the ratio of times of a replayed and a normal step, for several shapes.

python benchmarks/replay.py [--rounds 15]

One CPU thread, ‖ΔF‖ logged; the two take turns, a step each. ratio: median over the rounds, with
the lowest and highest after a tenth is cut at either end. Both compute the same
bits (tests/fast/test_replay.py).
"""

import argparse
import statistics
from contextlib import closing
from pathlib import Path

from benchmarks.peers.rows import WARM_UP
from deepstack.config import load_config
from deepstack.training import timed_steps

CONFIG = Path(__file__).parents[1] / "configs" / "bench_narrow.yaml"
TINY = "model.d_model=32 model.d_ff=128 task.seq_len=16"
SHAPES = (
    f"model.depth=6 {TINY} train.batch_size=4",
    f"model.depth=200 {TINY} train.batch_size=4",
    f"model.depth=200 {TINY} train.batch_size=32",
    "model.depth=200",
    "model.depth=200 model.scheme=pre_ln model.norm.kind=rms",
    "model.depth=200 model.scheme=hyper_connections",
    "model.depth=48 model.d_model=128 model.d_ff=512 task.seq_len=64 train.batch_size=16",
    "model.depth=12 model.d_model=256 model.d_ff=1024 task.seq_len=128 train.batch_size=16",
    "model.depth=1000",
)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    print(f"{'without, ms':>12}{'replayed, ms':>14}{'ratio':>22}  shape")
    for shape in SHAPES:
        configs = [
            load_config(CONFIG, ["train.steps=1000000", f"runtime.replay={replay}", *shape.split()])
            for replay in ("false", "python")
        ]
        with closing(timed_steps(configs[0])) as plain, closing(timed_steps(configs[1])) as fast:
            rounds = [(next(plain), next(fast)) for _ in range(WARM_UP + arguments.rounds)][
                WARM_UP:
            ]
        before, after = (statistics.median(times) * 1000 for times in zip(*rounds, strict=True))
        ratios = sorted(b / a for a, b in rounds)
        cut = len(ratios) // 10
        low, high = ratios[cut], ratios[-1 - cut]
        ratio = f"{statistics.median(ratios):.2f} ({low:.2f} to {high:.2f})"
        print(f"{before:12.1f}{after:14.1f}{ratio:>22}  {shape}", flush=True)


if __name__ == "__main__":
    main()
