"""A task whose runs misbehave by their seed, and sweeps of it: for the tests of the contract."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from deepstack.records import Run, find_runs
from helpers import ROOT

MEMORY, KILLED, CRASHED, HUNG = 90, 91, 92, 93
ENDS = {MEMORY: "out_of_memory", KILLED: "failed", CRASHED: "failed", HUNG: "failed"}

# Each of them has trained a step or two before.  A file beside the plugin heals them all.
PLUGIN = '''
import ctypes, os, pathlib, signal, time
from dataclasses import replace
from deepstack.tasks import TASKS, task, build_task

HEALED = pathlib.Path(__file__).with_name("healed")

@task("unruly")
def unruly(*, seq_len, seed):
    """Copying, but that the runs of some seeds end badly in their third batch."""
    copy = build_task("copy", {}, seq_len=seq_len, seed=seed)
    drawn = 0

    def draw(random, batch_size, held_out):
        nonlocal drawn
        drawn += not held_out
        if drawn == 3 and not HEALED.exists():
            end_badly(seed)
        return copy.draw(random, batch_size, held_out)

    return replace(copy, name="unruly", draw=draw)

def end_badly(seed):
    if seed == 90:
        held = []
        while len(held) < 100:  # 6.4 GB: without a limit it ends well
            held.append(bytearray(64_000_000))
    if seed == 91:
        os.kill(os.getpid(), signal.SIGKILL)
    if seed == 92:
        ctypes.string_at(0)
    while seed == 93:
        time.sleep(1)
'''

SETTINGS = [
    "task.name=unruly", "model.depth=2", "model.d_model=8", "task.seq_len=8",
    "train.batch_size=2", "train.eval_batches=1", "log.probe_sequences=1",
]  # fmt: skip


def bring_plugin(folder: Path) -> Path:
    """The plugin's file."""
    file = folder / "unruly.py"
    file.write_text(PLUGIN)
    return file


def words(plugin: Path, out: Path, seeds: list[int], *more: str, steps: int = 4) -> list[str]:
    """The arguments of a sweep over seeds."""
    given = [*SETTINGS, f"train.steps={steps}", "--seeds", ",".join(map(str, seeds))]
    given += ["--depths", "2", "--schemes", "post_ln", "--study", "s", "--workers", "2", "-q"]
    where = ["--plugin", str(plugin), "--out", str(out)]
    return ["sweep", str(ROOT / "configs" / "quick.yaml"), *given, *where, *more]


def sweep(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end, in a process of its own."""
    command = [sys.executable, "-m", "deepstack", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def start(*arguments: str) -> subprocess.Popen[bytes]:
    """Start the command."""
    command = [sys.executable, "-m", "deepstack", *arguments]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def by_seed(out: Path) -> dict[int, Run]:
    """The runs by their seed."""
    return {int(run.get("seed")): run for run in find_runs(out)}


def results_of(run: Run) -> dict[str, bytes]:
    """Everything deterministic in a run's folder."""
    names = ["steps.csv", "evals.csv", "config.yaml", "columns.json"]
    files = [run.path / name for name in names]
    files += sorted(run.path.glob("layers/*.npy")) + sorted(run.path.glob("checkpoint/*/weights*"))
    return {str(file.relative_to(run.path)): file.read_bytes() for file in files}


def processes_with(text: str) -> list[int]:
    """Ids of the processes whose command line or open files speak of a folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                said = (entry / "cmdline").read_bytes().decode(errors="replace")
                said += "".join(os.readlink(link) for link in (entry / "fd").iterdir())
            except OSError:
                continue
            if text in said:
                found.append(int(entry.name))
    return found
