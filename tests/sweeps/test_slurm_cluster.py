"""A sweep on a Slurm of two nodes on this host: tasks preempted, requeued, out of time; all done.

python -m pytest -m slurm -n0 tests/sweeps/test_slurm_cluster.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from helpers.cluster_results import results, runs_of
from helpers.cluster_results import until as until_within
from helpers.slurm_cluster import missing, slurm

from deepstack.records import Run, find_runs

pytestmark = pytest.mark.slurm

until = partial(until_within, seconds=900.0)
STEPS = int(os.environ.get("CLUSTER_STEPS", "3000"))  # some seconds a run
SETTINGS = {
    "model.depth": 2, "model.scheme": "deepnorm", "model.d_model": 8, "task.seq_len": 8,
    "train.batch_size": 2, "train.steps": STEPS, "train.eval_batches": 1, "log.probe_sequences": 1,
    "log.layers_every": 100, "runtime.checkpoint_seconds": 600, "seed": "0,1,2,3,4,5,6,7",
}  # fmt: skip


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    if lacking := missing():
        pytest.skip(f"needs {', '.join(lacking)}")
    with slurm(tmp_path_factory.mktemp("slurm")) as environment:
        yield environment


def test_an_array_of_eight_ends_equal_whatever_slurm_does(
    cluster: dict[str, str], tmp_path: Path
) -> None:
    def ask(*words: str) -> str:
        return subprocess.run(
            words, env=cluster, check=True, capture_output=True, text=True
        ).stdout.strip()

    local, out = tmp_path / "local", tmp_path / "slurm"
    ask(*sweep(local))
    job = ask(*sweep(out), "--submit", "--workers", "2", "--sbatch", "--partition=low")
    assert job.isdigit()

    def running(rows: int) -> list[tuple[str, Run]]:
        """Tasks that have a core and whose run has made so many steps."""
        listed = ask("squeue", "--noheader", "--states=RUNNING", "--format=%i").splitlines()
        runs = {f"{job}_{run.get('seed')}": run for run in runs_of(out)}
        return [
            (task, runs[task]) for task in listed
            if task in runs and runs[task].state == "running" and len(runs[task].steps) >= rows
        ]  # fmt: skip

    def strike(*words: str) -> Run:
        """Do something to a task that runs; its run, which has saved and ended before its time."""
        while True:
            until(lambda: running(20), what="task that runs")
            task, run = running(20)[0]
            node = ask("squeue", "--noheader", f"--jobs={task}", "--format=%N")
            said = [word.format(task=task, node=node) for word in words]
            subprocess.run(said, env=cluster, check=False, capture_output=True)
            until(partial(ended, run), what="run that ended")
            if ended(run) == "interrupted":  # else it was just done
                assert run.folder.checkpoints()
                return run

    struck = [
        strike("scontrol", "requeue", "{task}"),
        strike("scancel", "--signal=USR1", "--batch", "{task}"),  # as before the time is up
        strike("sbatch", "--partition=high", "--nodelist={node}", "--mem=3900M",
               "--output=/dev/null", "--wrap=true"),
    ]  # fmt: skip

    def over() -> bool:
        # Slurm lets what was requeued wait for two minutes: so long a test need not take.
        waiting = ask("squeue", "--noheader", "--format=%i %r").splitlines()
        for line in waiting:
            if line.endswith("BeginTime"):
                words = ["scontrol", "update", f"JobId={line.split()[0]}", "StartTime=now"]
                subprocess.run(words, env=cluster, capture_output=True)
        return not waiting

    until(over, what="end of the array")
    assert results(out, 8) == results(local, 8)
    resumed = {run.name for run in find_runs(out) if "resumed" in run.meta}
    assert resumed == {run.name for run in struck}
    assert ask(*sweep(out), "--submit") == ""


def ended(run: Run) -> str | None:
    """The state of a run that does not run any more."""
    state = str(Run(run.path).status["state"])
    return None if state == "running" else state


def sweep(out: Path) -> list[str]:
    words = [sys.executable, "-m", "deepstack", "sweep", "--out", str(out), "--study", "s"]
    return words + [f"{key}={value}" for key, value in SETTINGS.items()]
