"""Measures the C++ kernels of a replayed step beside torch's, in CPU time of one thread.

python benchmarks/executor.py [--rounds 9] [--only TEXT] [--threads 2 [--busy]]

Two runs of each row, runtime.replay=native and runtime.replay=python, take turns in one process, a
step each, ‖ΔF‖ logged.  ratio: the median over the rounds, with the lowest and highest.  calls: the
calls of torch that a step by kernels still makes.  The rows below measure one evaluation and one
first step, the recording and its translation included.  CPU time does not count waiting, so other
work on the machine disturbs it little.

The rows of records compare a record of all layers by kernels with the eager one, its files
included; `--only records` measures these alone.

--threads N compares one thread of the kernels with N instead, in wall time, which other work does
disturb: read the ratio of the least times on a quiet machine, and with --busy, beside a process
that occupies one core, the ratio of the medians.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.peers import shape_config
from deepstack.config import load_config
from deepstack.fast import Kernels, find_kernels
from deepstack.training import TrainingRun, temporary_run

CONFIGS = Path(__file__).parents[1] / "configs"
# Shapes of the suite, and their names in the table.
SHAPES = {
    "deepnorm_1000.yaml": "",
    "1000 x 64, 8 x 32": "narrow",
    "200 x 32, 16 x 16": "small",
    "24 x 256, 16 x 64": "medium",
    "12 x 512, 8 x 128": "wide",
}
RECORDS = ("deepnorm_1000.yaml", "1000 x 64, 8 x 32")
QUIET = ["train.steps=1000000", "train.eval_every=0", "log.layers_every=0", "runtime.threads=1"]


def seconds(function: Callable[[], Any]) -> float:
    """Call a function and return the CPU time of this process."""
    began = time.process_time()
    function()
    return time.process_time() - began


def line(name: str, native: list[float], python: list[float], more: object = "") -> None:
    """Print one row of the table."""
    ratios = sorted(a / b for a, b in zip(native, python, strict=True))
    ratio = f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
    times = f"{1000 * median(native):12.1f}{1000 * median(python):12.1f}"
    print(f"{name:32}{times}{ratio:>22}{more:>8}", flush=True)


def open_runs(
    name: str, replays: Sequence[str], resources: ExitStack, *more: str
) -> list[TrainingRun]:
    """Open a run of a shape for each setting of runtime.replay.

    more: further settings.
    """
    runs = []
    for replay in replays:
        settings = [*QUIET, *more, f"runtime.replay={replay}"]
        shape = SHAPES[name]
        config = shape_config(shape, settings) if shape else load_config(CONFIGS / name, settings)
        runs.append(resources.enter_context(temporary_run(config)))
    return runs


def measure_records(name: str, rounds: int) -> None:
    """Print the rows of a record of all layers of one shape: by kernels, and eager."""
    with ExitStack() as resources:
        # Due at step 0 and often enough to be replayed, but not within these rounds.
        runs = open_runs(name, ("native", "false"), resources, "log.layers_every=100000")

        def record(run: TrainingRun) -> float:
            run.state.snapshots.prepare(0)
            return seconds(lambda: run.state.snapshots.take(0))

        first, *times = [[record(run) for run in runs] for _ in range(rounds + 1)]
        native, eager = map(list, zip(*times, strict=True))
        line(f"one record, {name}", native, eager)
        line("  first record, recording included", first[:1], first[1:])


def measure(name: str, rounds: int, kernels: Kernels) -> None:
    """Print the rows of one shape."""
    shape = SHAPES[name]
    with ExitStack() as resources:
        runs = open_runs(name, ("native", "python"), resources)

        def step(run: TrainingRun, number: int) -> float:
            batch = run.batch(number)
            return seconds(lambda: run.step(*batch, 1e-4))

        first = [step(run, 1) for run in runs]
        times = [[step(run, number) for run in runs] for number in range(2, 2 + rounds)]
        bound: Any = runs[0].step.update  # type: ignore[attr-defined]
        functions = [f for part in bound.bound for f, _, _ in part.operations]
        calls = sum(function is not kernels.run for function in functions)
        native, python = map(list, zip(*times, strict=True))
        line(f"step, {name}", native, python, calls)
        line("  first step, recording included", first[:1], first[1:])
        if not shape:
            pairs = [[seconds(partial(evaluate, run)) for run in runs] for _ in range(3)][1:]
            native, python = map(list, zip(*pairs, strict=True))
            line("  one evaluation of 32 batches", native, python)


def evaluate(run: TrainingRun) -> None:
    """Measure the validation loss of a run."""
    run.evaluation.measure(run.state.built.model, run.forward)


def measure_threads(name: str, rounds: int, threads: int) -> None:
    """Print the row of one shape: one thread and several take turns, a step each."""
    shape = SHAPES[name]
    with ExitStack() as resources:
        runs: list[TrainingRun] = []
        for count in (1, threads):
            settings = [*QUIET[:-1], "runtime.replay=native", f"runtime.threads={count}"]
            config = (
                shape_config(shape, settings) if shape else load_config(CONFIGS / name, settings)
            )
            runs.append(resources.enter_context(temporary_run(config)))
        times: list[list[float]] = [[], []]
        for number in range(1, 2 + rounds):
            for run, measured in zip(runs, times, strict=True):
                batch = run.batch(number)
                began = time.perf_counter()
                run.step(*batch, 1e-4)
                measured.append(time.perf_counter() - began)
        one, several = (measured[1:] for measured in times)
        values = [1000 * f(measured) for measured in (one, several) for f in (min, median)]
        ratios = f"{min(several) / min(one):10.2f}{median(several) / median(one):10.2f}"
        print(
            f"step, {name:26}" + "".join(f"{value:10.1f}" for value in values) + ratios, flush=True
        )


@contextmanager
def busy_core() -> Iterator[None]:
    """Occupy one core by a process that computes."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default="")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--busy", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    kernels = find_kernels(print)
    if isinstance(kernels, str):
        raise SystemExit(kernels)
    print(kernels.description)
    if arguments.threads > 1:
        heads = ("1: least", "median", f"{arguments.threads}: least", "median", "least", "median")
        print(f"{'ms by threads; ratios':32}" + "".join(f"{head:>10}" for head in heads))
        with busy_core() if arguments.busy else nullcontext():
            for name in SHAPES:
                if arguments.only in name:
                    measure_threads(name, arguments.rounds, arguments.threads)
        return
    print(f"{'':32}{'kernels, ms':>12}{'torch, ms':>12}{'ratio':>22}{'calls':>8}")
    for name in SHAPES:
        if arguments.only in name:
            measure(name, arguments.rounds, kernels)
    for name in RECORDS:
        if arguments.only in f"records {name}":
            measure_records(name, min(arguments.rounds, 5))


if __name__ == "__main__":
    main()
