"""Measures what a user waits for: the phases of one run, and the seconds of each run of a sweep."""

import json
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import torch

from deepstack.config import Config
from deepstack.records import Run, find_runs
from deepstack.training import TrainingRun, train

PHASES = {
    "__init__": "building the model",
    "snapshot": "a record of all layers",
    "evaluate": "an evaluation",
    "step": "a step",
    "finish": "the end",
}
"""Methods of a training run, and their names in the table."""


@contextmanager
def timed(kind: type, names: Mapping[str, str], wait: Callable[[], None]) -> Iterator[Any]:
    """Yield name -> seconds of every call of these methods of a class inside the block.

    wait: waits for the device; called after each call.
    """
    seconds: dict[str, list[float]] = defaultdict(list)

    def with_time(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            result = method(*args, **kwargs)
            wait()
            seconds[name].append(time.perf_counter() - began)
            return result

        return call

    def init(run: TrainingRun, *args: Any, **kwargs: Any) -> None:
        with_time(names["__init__"], originals["__init__"])(run, *args, **kwargs)
        run.step = with_time(names["step"], run.step)  # an attribute of each run

    originals = {name: getattr(kind, name) for name in names if name != "step"}
    try:
        for name, method in originals.items():
            setattr(kind, name, init if name == "__init__" else with_time(names[name], method))
        yield seconds
    finally:
        for name, method in originals.items():
            setattr(kind, name, method)


def phases(config: Config, out: Path) -> list[dict[str, Any]]:
    """Train a configuration and return the seconds of each phase: first, second, later, all."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    began = time.perf_counter()
    with timed(TrainingRun, PHASES, wait) as seconds:
        train(config, out=out)
    whole = time.perf_counter() - began
    rows = [row(name, seconds[name]) for name in PHASES.values() if seconds[name]]
    rest = whole - sum(one["s in all"] for one in rows)
    return [*rows, row("the rest", [rest]), row("all but imports", [whole])]


def row(name: str, seconds: Sequence[float]) -> dict[str, Any]:
    """Return the row of a phase."""
    later = statistics.median(seconds[2:]) if len(seconds) > 2 else None
    return {
        "phase": name,
        "calls": len(seconds),
        "first, s": seconds[0],
        "second, s": seconds[1] if len(seconds) > 1 else None,
        "later, median s": later,
        "s in all": sum(seconds),
    }


def command_seconds(*words: object) -> float:
    """Return the seconds of a `deepstack` command, which must succeed."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "deepstack", *map(str, words)], check=True)
    return time.perf_counter() - began


def sweep_rows(study: Path) -> list[dict[str, Any]]:
    """Return a row for each run of a study: its worker, its seconds and those beside its steps.

    A worker's runs follow each other, so a run takes the time between the ends of two.  Of the
    first run of a worker the beginning is not known.
    """
    by_worker: dict[int, list[Run]] = defaultdict(list)
    for run in sorted(find_runs(study), key=ended):
        by_worker[worker_of(run)].append(run)
    rows = []
    for number, runs in enumerate(by_worker.values(), 1):
        for before, run in zip([None, *runs], runs, strict=False):
            steps = float(run.timing["step_ms"].sum()) / 1000
            whole = None if before is None else ended(run) - ended(before)
            beside = None if whole is None else whole - steps
            rows.append(
                {
                    "run": run.name,
                    "worker": number,
                    "s": whole,
                    "steps, s": steps,
                    "beside, s": beside,
                }
            )
    return rows


def ended(run: Run) -> float:
    """Return when a run ended, in seconds."""
    return run.folder.status_path.stat().st_mtime


def worker_of(run: Run) -> int:
    """Return the id of the process that trained a run."""
    return int(json.loads(run.folder.lock_path.read_text())["pid"])
