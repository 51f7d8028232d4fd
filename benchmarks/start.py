"""Times the parts of a run before its first step, and that step, in seconds.

python benchmarks/start.py [CONFIG]

imports: deepstack and torch. building: model, optimizer, F_0, task and folder. begin: the work
before step 1, here a validation on one batch. The first step accesses all of its memory for the
first time.

Use the second run in a folder: the first one compiles deepstack's files. If Python may not write
compiled files (PYTHONDONTWRITEBYTECODE), each run compiles them and takes 0.2 s more.
"""

import gc
import sys
import time
from pathlib import Path

BEGAN = time.perf_counter()

from deepstack.base import gc_paused  # noqa: E402, the script times the imports

with gc_paused():  # as `deepstack train` imports them
    from deepstack.config import load_config
    from deepstack.training import temporary_run

    gc.freeze()

CONFIG = Path(__file__).parents[1] / "configs" / "bench_narrow.yaml"
LEFT_OUT = ["train.eval_every=0", "train.eval_batches=1", "log.layers_every=0"]


def main() -> None:
    """Print each part and the time at which the first step begins and ends."""
    times = [BEGAN, time.perf_counter()]
    config = load_config(Path(sys.argv[1]) if len(sys.argv) > 1 else CONFIG, LEFT_OUT)
    with temporary_run(config) as run:
        times.append(time.perf_counter())
        run.begin()
        times.append(time.perf_counter())
        measured = run.step(*run.batch(1), run.learning_rate(1))
        run.record(1, measured)
        times.append(time.perf_counter())
    names = ("imports", "building", "begin", "first step")
    for name, start, end in zip(names, times, times[1:], strict=False):
        print(f"{name:<12} {end - start:.2f}")
    print(
        f"the first step begins after {times[3] - BEGAN:.2f} and ends after {times[4] - BEGAN:.2f}"
    )


if __name__ == "__main__":
    main()
