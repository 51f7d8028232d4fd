"""What the storage harness runs: a trainer of twenty lines, and `deepstack train`.

Each is a function of the folder and returns the exit code; it runs in a process of its own, which
it may change as it likes.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from deepstack.errors import DeepstackError
from deepstack.records import RunFolder
from deepstack.training import checkpoint as ckpt
from helpers.storage_calls import mark

STEPS, INTERVAL = 6, 2
SETTINGS = {
    "model.depth": 2, "model.d_model": 8, "task.seq_len": 8, "train.batch_size": 2,
    "train.steps": STEPS, "train.eval_every": 3, "train.eval_batches": 1, "log.probe_sequences": 1,
    "log.layers_every": 3, "log.attribution_every": 3, "runtime.device": "cpu",
}  # fmt: skip
# Every diagnostic is written by the same call: three files of them are enough, and soon written.
KEPT_DIAGNOSTICS = ("param_norm", "grad_norm", "stream_norm")


def tell(**what: Any) -> None:
    """A line for the harness, which a kill does not take back."""
    if path := os.environ.get("STORAGE_REPORT"):
        with open(path, "a") as file:
            file.write(json.dumps(what) + "\n")


# --- the dummy ------------------------------------------------------------------------------


def dummy(out: Path, steps: int = STEPS) -> int:
    """A random walk, trained on the same protocol as a real run; exit codes as of the command."""
    try:
        folder = RunFolder(out / "study" / "run")
        with folder.lock():
            if folder.read_status().get("state") != "done":
                walk(folder, steps)
    except DeepstackError as error:
        print(f"deepstack: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def walk(folder: RunFolder, steps: int) -> None:
    """x_t = 0.9 x_{t-1} + noise, from the newest checkpoint on."""
    random, x, first = torch.Generator().manual_seed(0), torch.zeros(4), 1
    owner = ckpt.Owner("walk", {"x": x}, largest=2**20)
    found = ckpt.fitting(folder, lambda line: print(line, file=sys.stderr), owner)
    if found is not None:
        x, first = found.parts["weights"]["x"], found.step + 1
        restore(random, found)
    tell(first=first)
    folder.write_status("running", first - 1)
    with folder.log("steps", ("step", "norm"), first - 1 if found else -1) as log:
        for step in range(first, steps + 1):
            x = 0.9 * x + torch.randn(4, generator=random)
            log.write({"step": step, "norm": x.norm().item()})
            if step % INTERVAL == 0 or step == steps:
                log.flush()
                parts = {"weights": {"x": x}, "probe": {"random": random.get_state()}}
                log.check(ended=step == steps)
                logs = {"steps": log.sha256}
                ckpt.save(folder, ckpt.Checkpoint(step, parts, {"run": "walk", "logs": logs}))
                folder.write_status("running", step)
                mark(step)
    finish(folder, steps)


def restore(random: torch.Generator, found: ckpt.Checkpoint) -> None:
    """The random state as the checkpoint left it."""
    random.set_state(found.parts["probe"]["random"])


def finish(folder: RunFolder, steps: int) -> None:
    """The last checkpoint stays; the run is done."""
    ckpt.keep_only(folder, steps)
    folder.write_status("done", steps)


# --- the real one ---------------------------------------------------------------------------


def command(out: Path, *settings: str, quiet: bool = True) -> int:
    """`deepstack train` of a small configuration, a checkpoint every other step."""
    from deepstack.cli import main

    config = Path(os.environ["STORAGE_CONFIG"])
    sys.argv = ["deepstack", "train", str(config), *settings, "--out", str(out)]
    sys.argv += ["-q"] * quiet
    try:
        main()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return 0


def prepare_training() -> None:
    """Fewer files, checkpoints by the step and not by the clock, and news for the harness."""
    from deepstack.diagnostics.layers import DIAGNOSTICS
    from deepstack.training import meta
    from deepstack.training.run import TrainingRun

    kept = {name: DIAGNOSTICS._objects[name] for name in KEPT_DIAGNOSTICS}
    DIAGNOSTICS._objects = kept
    # Git's own processes would not survive the watcher of system calls.
    vars(meta)["git_state"] = dict
    begin, record = TrainingRun.begin, TrainingRun.record
    save, finish = TrainingRun.save, TrainingRun.finish

    def due(self: TrainingRun, step: int) -> bool:
        return step % INTERVAL == 0 and step < self.config.train.steps

    def begun(self: TrainingRun) -> None:
        tell(first=self.first_step)
        begin(self)

    def recorded(self: TrainingRun, step: int, measured: Any) -> None:
        record(self, step, measured)
        time.sleep(float(os.environ.get("STORAGE_PAUSE", "0")))
        # The signals that the process sends to itself after a step: STORAGE_SIGNALS=4:2,4:2.
        for pair in filter(None, os.environ.get("STORAGE_SIGNALS", "").split(",")):
            at, number = map(int, pair.split(":"))
            if at == step:
                os.kill(os.getpid(), number)

    def saved(self: TrainingRun, step: int) -> None:
        save(self, step)
        mark(step)

    def finished(self: TrainingRun) -> Any:
        run = finish(self)
        mark(self.config.train.steps)
        return run

    changed: dict[str, Callable[..., Any]] = {
        "checkpoint_is_due": due, "begin": begun, "record": recorded, "save": saved,
        "finish": finished,
    }  # fmt: skip
    for name, method in changed.items():
        setattr(TrainingRun, name, method)


def write_config(path: Path) -> None:
    """The small configuration as a file."""
    from deepstack.config import Config, to_yaml, with_overrides

    path.write_text(to_yaml(with_overrides(Config(), SETTINGS)))
