"""A study of commands as a job array of Slurm: what a task of the array does with a run."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.cluster_results import until
from helpers.command_line import refusal, typed
from helpers.extensions import needs

from deepstack.records import Run, find_runs, problems

pytestmark = needs("slurm")

TRAINER = Path(__file__).with_name("trainer.py")
GOES_ON = """\
import signal, sys, time
from pathlib import Path
kept = Path(sys.argv[1]) / "kept"
began = int(kept.read_text()) if kept.exists() else 0
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
for step in range(began, 4):
    print(f"step {step}: val loss {3 - step / 10}", flush=True)
    kept.write_text(str(step + 1))
    if step == 1:
        time.sleep(600 if began == 0 else 0)
"""


def array_of(folder: Path, text: str, *more: str) -> Path:
    """Write a study and its array; return the script."""
    path = folder / "study.yaml"
    path.write_text(text)
    shown = typed("sweep", path, "--slurm", "--study", "s", "--out", folder / "results", *more)
    assert shown.exit_code == 0, shown.output
    return Path(shown.stdout.strip())


def start(script: Path, task: int, scontrol: Path) -> subprocess.Popen[str]:
    """Start a task of an array as Slurm does."""
    program = scontrol / "scontrol"
    program.write_text(f'#!/bin/bash\necho "$@" >> {scontrol}/log\n')
    program.chmod(0o755)
    environment = dict(os.environ, SLURM_ARRAY_JOB_ID="7", SLURM_ARRAY_TASK_ID=str(task))
    environment["PATH"] = f"{scontrol}:{environment['PATH']}"
    return subprocess.Popen(
        ["bash", script], env=environment, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def test_tasks_run_their_commands_and_a_repeated_sweep_skips_them(tmp_path: Path) -> None:
    study = f"""\
command: {sys.executable} -S {TRAINER} {{mode}} 1e-3 {{seed}}
metric: 'step (?P<step>\\d+): .*val loss ([0-9.]+)'
environment: {{EXTRA: a b}}
sweep: {{grid: {{mode: [good, fail], seed: [1]}}}}
"""
    script = array_of(tmp_path, study, "--sbatch", "--mem=3G")
    text = script.read_text()
    assert "--array=0-1\n" in text and "--cpus-per-task=1\n" in text and "--gres" not in text
    assert text.count("--mem") == 1, "the memory of a command is unknown"
    tasks = [start(script, task, tmp_path) for task in (0, 1)]
    ends = [(*task.communicate(timeout=60), task.returncode) for task in tasks]
    assert sorted(code for *_, code in ends) == [0, 1], ends
    runs = {run.get("mode"): run for run in find_runs(tmp_path / "results")}
    assert [runs["good"].state, runs["fail"].state] == ["done", "failed"]
    done = runs["good"]
    assert problems(done.folder) == [] and done.evals["loss"].tolist() == [3.11, 2.61, 2.11]
    assert done.meta["environment"]["host"] == socket.gethostname()
    assert "--array=0-0\n" in array_of(tmp_path, study).read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sent", "requeued"), [(signal.SIGUSR1, "requeue 7_0\n"), (signal.SIGTERM, "")]
)
def test_a_command_that_is_asked_to_end_goes_on_in_the_next_start(
    sent: int, requeued: str, tmp_path: Path
) -> None:
    """Slurm sends SIGUSR1 before the time is up; a task that is cancelled gets SIGTERM."""
    (tmp_path / "goes_on.py").write_text(GOES_ON)
    study = f"""\
command: {sys.executable} -S {tmp_path}/goes_on.py {{run}}
metric: 'step (?P<step>\\d+): val loss ([0-9.]+)'
resume: true
"""
    script = array_of(tmp_path, study)
    (tmp_path / "log").touch()
    task = start(script, 0, tmp_path)
    until(lambda: bool(list((tmp_path / "results").rglob("kept"))), seconds=60)
    until(lambda: next((tmp_path / "results").rglob("kept")).read_text() == "2", seconds=60)
    (os.kill if sent == signal.SIGUSR1 else os.killpg)(task.pid, sent)
    errors = task.communicate(timeout=60)[1]
    assert task.returncode == 143, errors
    (run,) = find_runs(tmp_path / "results")
    assert run.state == "interrupted" and (tmp_path / "log").read_text() == requeued
    again = start(script, 0, tmp_path)
    assert again.communicate(timeout=60) and again.returncode == 0
    (run,) = find_runs(tmp_path / "results")
    assert run.state == "done" and run.evals["step"].tolist() == [2, 3]
    idle = start(script, 0, tmp_path)
    assert idle.communicate(timeout=60) == ("", "") and idle.returncode == 0
    assert len(Run(run.path).meta["resumed"]) == 1


def test_ray_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "study.yaml"
    path.write_text(
        "command: python t.py {seed}\nmetric: 'loss (.*)'\nsweep: {grid: {seed: [0]}}\n"
    )
    assert "--ray: found a study of commands" in refusal(2, "sweep", path, "--ray", "auto")
