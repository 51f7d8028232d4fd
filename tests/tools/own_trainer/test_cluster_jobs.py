"""A study of commands on clusters: what a task of Slurm's array and a node of Ray do with a run."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.cluster_results import GOES_ON, until
from helpers.command_line import refusal, typed
from helpers.extensions import needs

from deepstack.records import Run, find_runs, problems
from deepstack.tools.own_trainer.cells import plan_cells
from deepstack.tools.own_trainer.study_file import load_commands

TRAINER = Path(__file__).with_name("trainer.py")


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


@needs("slurm")
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


@needs("slurm")
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
    assert run.state == "done" and run.evals["step"].tolist() == [0, 1, 2, 3]
    idle = start(script, 0, tmp_path)
    assert idle.communicate(timeout=60) == ("", "") and idle.returncode == 0
    assert len(Run(run.path).meta["resumed"]) == 1


def order_of(folder: Path, mode: str) -> Any:
    """Return the order to a node of Ray to run a command."""
    from deepstack.integrations.ray.node import Order

    path = folder / "study.yaml"
    path.write_text(
        f"command: {sys.executable} -S {TRAINER} {mode} 1e-3 1\n"
        "metric: 'step (?P<step>[0-9]+): .*val loss ([0-9.]+)'\n"
    )
    file = load_commands(path, [])
    (cell,) = plan_cells(file, file.study, folder / "s")
    job = cell.job("s", folder, '"$0"', cores=1)
    assert not job.trains and cell.requirements(has_gpu=False).memory == 0
    assert cell.requirements(has_gpu=True).gpu_memory
    token = folder / "s" / ".ray-token"
    return Order(
        job.text, cell.folder.name, "s", str(folder), here=str(folder), token=str(token),
        command=job.command,
    )  # fmt: skip


@needs("ray")
@pytest.mark.parametrize(
    ("mode", "sent", "code", "state"), [("good", 0, 0, "done"), ("late", 15, 143, "interrupted")]
)
def test_a_node_of_ray_runs_a_command(
    mode: str, sent: int, code: int, state: str, tmp_path: Path
) -> None:
    from deepstack.integrations.ray.node import work

    order = order_of(tmp_path, mode)
    folder, once = tmp_path / "s" / order.folder, [sent] * bool(sent)

    def exchange(message: dict[str, Any]) -> list[dict[str, Any]]:
        if "shared" in message:
            assert message["shared"]
            return [{"begin": ([], [])}]
        output = folder / "output.txt"
        waits = output.exists() and "two children wait" in output.read_text()
        return [{"signal": once.pop()}] if once and waits else []

    Path(order.token).parent.mkdir()
    Path(order.token).touch()
    assert work(order, exchange) == (code, "")
    run = Run(folder)
    assert run.state == state
    assert len(run.evals) == (3 if state == "done" else 0)


@needs("ray")
def test_a_node_without_the_folder_of_a_command_says_so(tmp_path: Path) -> None:
    from deepstack.integrations.ray.node import work

    code, text = work(order_of(tmp_path, "good"), lambda _: [{"begin": ([], [])}])
    assert code == 5 and f"{tmp_path} is not on this node, and a command needs its folder" in text


def test_other_options_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "study.yaml"
    path.write_text("command: python t.py {seed}\nmetric: 'l (.*)'\nsweep: {grid: {seed: [0]}}\n")
    assert "--memory: found a study of commands" in refusal(2, "sweep", path, "--memory", "2GB")
