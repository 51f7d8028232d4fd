"""Times a snapshot of every layer beside a training step.

python benchmarks/look.py [--config configs/bench_narrow.yaml] [--looks 3] [KEY=VALUE ...]

Prints milliseconds of each step, without replay, and of the snapshot after it: wall clock and CPU
time of the process, which other work on the machine hardly changes. The first of each includes
set-up.
"""

import argparse
import time
from itertools import pairwise
from pathlib import Path

from deepstack.config import load_config
from deepstack.training import temporary_run

CONFIG = Path(__file__).parents[1] / "configs" / "bench_narrow.yaml"
LEFT = ("train.eval_every=0", "log.layers_every=1", "runtime.replay=false")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--looks", type=int, default=3)
    parser.add_argument("settings", nargs="*")
    arguments = parser.parse_args()
    config = load_config(arguments.config, [*LEFT, *arguments.settings])
    names = ("step ms", "snapshot ms", "step CPU ms", "snapshot CPU")
    print("".join(f"{name:>14}" for name in names))
    with temporary_run(config) as run:
        run.begin()
        for step in range(1, arguments.looks + 2):
            clocks = [(time.perf_counter(), time.process_time())]
            measured = run.step(*run.batch(step), run.learning_rate(step))
            measured.loss.item()  # waits for a GPU
            clocks.append((time.perf_counter(), time.process_time()))
            run.record(step, measured)
            run.state.snapshots.take(step)
            clocks.append((time.perf_counter(), time.process_time()))
            times = [1e3 * (b[k] - a[k]) for k in (0, 1) for a, b in pairwise(clocks)]
            print("".join(f"{value:14.0f}" for value in times), flush=True)


if __name__ == "__main__":
    main()
