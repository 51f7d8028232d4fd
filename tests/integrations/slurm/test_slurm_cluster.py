"""A sweep on a Slurm of two nodes on this host: tasks preempted, requeued, out of time; all done.

python -m pytest -m slurm -n0 tests/integrations/slurm/test_slurm_cluster.py
"""

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from helpers.cluster_results import GOES_ON, end, free_ports, results, runs_of
from helpers.cluster_results import until as until_within
from helpers.command_line import TINY
from helpers.extensions import needs

from deepstack.records import Run, find_runs

pytestmark = pytest.mark.slurm

until = partial(until_within, seconds=900.0)
STEPS = int(os.environ.get("CLUSTER_STEPS", "3000"))  # some seconds a run
SETTINGS = [
    "model.scheme=deepnorm", f"train.steps={STEPS}", "log.layers_every=100",
    "runtime.checkpoint_seconds=600", "seed=0,1,2,3,4,5,6,7",
]  # fmt: skip


PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue")
SBIN = os.pathsep.join(("/usr/sbin", "/sbin"))

CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthInfo=socket={munge}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
GresTypes=gpu
ReturnToService=2
KillWait=20
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=sched_interval=5,bf_interval=5
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1 RealMemory=4000 Gres=gpu:1
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1 RealMemory=4000 Gres=gpu:1
PartitionName=low Nodes=n1,n2 Default=YES MaxTime=INFINITE PriorityTier=1
PartitionName=high Nodes=n1,n2 MaxTime=INFINITE PriorityTier=10
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A cluster of two nodes with a core each; the environment in which sbatch speaks to it.

    munged, slurmctld and two slurmd of Debian's packages run in one folder.  Only these are ended.
    """
    path = os.pathsep.join((os.environ["PATH"], SBIN))
    if os.geteuid() or not all(shutil.which(name, path=path) for name in PROGRAMS):
        pytest.skip(f"needs root and {', '.join(PROGRAMS)}")
    folder = tmp_path_factory.mktemp("slurm")
    host, ports = socket.gethostname(), free_ports(3)
    key, munge = folder / "munge.key", folder / "munge.socket"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o400)
    (folder / "state").mkdir(exist_ok=True)
    conf = folder / "slurm.conf"
    conf.write_text(CONF.format(host=host, ports=ports, folder=folder, munge=munge))
    devices = [f"NodeName=n{i} Name=gpu File=/dev/tty{i}\n" for i in (1, 2)]
    (folder / "gres.conf").write_text("".join(devices))
    environment = dict(os.environ, SLURM_CONF=str(conf), PATH=path)
    munged = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={munge}"]
    munged += [f"--{name}-file={folder}/munge.{name}" for name in ("pid", "seed", "log")]
    started: list[subprocess.Popen[bytes]] = []

    def start(*words: str) -> None:
        with open(folder / f"{words[0]}-{len(started)}.out", "wb") as output:
            started.append(
                subprocess.Popen(
                    words, env=environment, stdout=output, stderr=output, start_new_session=True
                )
            )

    try:
        start(*munged)
        until(munge.exists, what="munged", seconds=60)
        start("slurmctld", "-D", "-i", "-f", str(conf))
        for node in ("n1", "n2"):
            start("slurmd", "-D", "-N", node, "-f", str(conf))
        nodes = ["scontrol", "show", "nodes", "--oneliner"]
        idle = "State=IDLE "  # of nodes that have answered and wait for work
        until(lambda: ask(environment, *nodes).count(idle) == 2, what="idle nodes", seconds=60)
        yield environment
    finally:
        if len(started) == 4:  # a job's processes outlive the daemons
            with contextlib.suppress(AssertionError):
                ask(environment, "scancel", "--full", "--user=root")
                until(lambda: not ask(environment, "squeue", "--noheader"), seconds=60)
        for process in reversed(started):
            end(process)


def ask(environment: dict[str, str], *words: str, check: bool = False) -> str:
    """The output of a command."""
    done = subprocess.run(words, env=environment, check=check, capture_output=True, text=True)
    return done.stdout.strip()


def is_over(environment: dict[str, str], hurried: set[str]) -> bool:
    """Return whether the queue is empty; let requeued jobs, which would wait, begin in 3 seconds.

    hurried: the jobs that were told so.  A job that begins in the second of its end is not launched
        ("already killed"), and Slurm counts it as failed.
    """
    try:
        waiting = ask(environment, "squeue", "--noheader", "--format=%i %r", check=True)
    except subprocess.CalledProcessError:  # a busy controller does not answer: nothing is known
        return False
    for line in waiting.splitlines():
        job, _, reason = line.partition(" ")
        if reason == "BeginTime" and job not in hurried:
            ask(environment, "scontrol", "update", f"JobId={job}", "StartTime=now+3")
            hurried.add(job)
    return not waiting


def test_an_array_of_eight_ends_equal_whatever_slurm_does(
    cluster: dict[str, str], tmp_path: Path
) -> None:
    slurm, local, out = partial(ask, cluster), tmp_path / "local", tmp_path / "slurm"
    slurm(*sweep(local), check=True)
    submit = [*sweep(out), "--submit", "--workers", "2", "--sbatch", "--partition=low"]
    job = slurm(*submit, check=True)
    assert job.isdigit()

    def running() -> list[tuple[str, Run]]:
        """Tasks that have a core and whose run has made twenty steps."""
        runs = {f"{job}_{run.get('seed')}": run for run in runs_of(out) if len(run.steps) >= 20}
        tasks = slurm("squeue", "--noheader", "--states=RUNNING", "--format=%i").splitlines()
        return [(task, runs[task]) for task in tasks if task in runs and not ended(runs[task])]

    def strike(*words: str) -> str:
        """Do something to a task that runs; the name of its run, which must save and end."""
        while True:
            until(running, what="task that runs")
            task, run = running()[0]
            node = slurm("squeue", "--noheader", f"--jobs={task}", "--format=%N")
            slurm(*[word.format(task=task, node=node) for word in words])
            until(partial(ended, run), what="run that ended")
            if ended(run) == "interrupted":  # else it was just done
                assert run.folder.checkpoints()
                return run.name

    struck = {
        strike("scontrol", "requeue", "{task}"),
        strike("scancel", "--signal=USR1", "--batch", "{task}"),  # as before the time is up
        strike("sbatch", "--partition=high", "--nodelist={node}", "--mem=3900M",
               "--output=/dev/null", "--wrap=true"),
    }  # fmt: skip

    until(partial(is_over, cluster, set()), what="end of the array")
    assert results(out, 8) == results(local, 8)
    assert {run.name for run in find_runs(out) if "resumed" in run.meta} == struck
    assert slurm(*sweep(out), "--submit", check=True) == ""


def ended(run: Run) -> str | None:
    """The state of a run that does not run any more; a new folder has none yet."""
    state = Run(run.path).status.get("state", "running")
    return None if state == "running" else str(state)


def sweep(out: Path) -> list[str]:
    words = [sys.executable, "-m", "deepstack", "sweep", "--out", str(out), "--study", "s"]
    return [*words, *TINY, *SETTINGS]


def test_jobs_of_several_runs_end_equal_through_a_requeue(
    cluster: dict[str, str], tmp_path: Path
) -> None:
    """Eight runs in two jobs of four: a job that is asked to save goes on where it was."""
    slurm, local, out = partial(ask, cluster), tmp_path / "local", tmp_path / "slurm"
    slurm(*sweep(local), check=True)
    job = slurm(*sweep(out), "--submit", "--runs-per-job", "4", check=True)

    def second_of_a_job() -> Run | None:
        """A run that trains after another one of its job."""
        runs = {run.get("seed"): run for run in runs_of(out) if len(run.steps) >= 20}
        for seed, run in runs.items():
            first = runs.get(seed - 1)
            if seed % 4 and first and ended(first) == "done" and not ended(run):
                return run
        return None

    while True:
        until(second_of_a_job, what="second run of a job")
        run = second_of_a_job()
        if run is not None:
            task = f"{job}_{run.get('seed') // 4}"
            slurm("scancel", "--signal=USR1", "--batch", task)  # as before the time is up
            until(partial(ended, run), what="run that ended")
            if ended(run) == "interrupted":
                break

    finished = {
        run.name: (run.path / "status.json").stat().st_mtime_ns
        for run in runs_of(out)
        if ended(run) == "done"
    }

    until(partial(is_over, cluster, set()), what="end of the jobs")
    assert results(out, 8) == results(local, 8)
    runs = {one.name: one for one in find_runs(out)}
    assert {name for name, one in runs.items() if "resumed" in one.meta} == {run.name}
    for name, time in finished.items():
        assert (runs[name].path / "status.json").stat().st_mtime_ns == time
    assert len(list((out / "s" / "slurm").glob("*.log"))) == 2
    assert not list((out / "s" / "slurm").glob("*.starts"))


@needs("own_trainer")
def test_commands_of_the_user_go_on_through_a_requeue(
    cluster: dict[str, str], tmp_path: Path
) -> None:
    slurm, out = partial(ask, cluster), tmp_path / "out"
    (tmp_path / "goes_on.py").write_text(GOES_ON)
    study = tmp_path / "study.yaml"
    study.write_text(
        f"command: {sys.executable} -S {tmp_path}/goes_on.py {{run}} {{seed}}\n"
        "metric: 'step (?P<step>[0-9]+): val loss ([0-9.]+)'\n"
        "resume: true\nsweep: {grid: {seed: [0, 1]}}\n"
    )
    words = [sys.executable, "-m", "deepstack", "sweep", str(study), "--out", str(out)]
    job = slurm(*words, "--submit", check=True)
    assert job.isdigit()

    def waits(number: int) -> bool:
        return [path.read_text() for path in out.rglob("kept")].count("2") == number

    until(partial(waits, 2), what="two commands that wait")
    slurm("scancel", "--signal=USR1", "--batch", job)  # as before the time is up
    until(partial(is_over, cluster, set()), what="end of the array")
    runs = find_runs(out)
    assert [run.state for run in runs] == ["done", "done"], list((out).rglob("*.log"))
    assert all("resumed" in run.meta and run.evals["step"].tolist() == [0, 1, 2, 3] for run in runs)
    assert slurm(*words, "--submit", check=True) == ""
