"""A sweep on a Slurm of two nodes on this host: tasks preempted, requeued, out of time; all done.

python -m pytest -m slurm -n0 tests/sweeps/test_slurm_cluster.py
"""

from __future__ import annotations

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
from helpers.cluster_results import end, results, runs_of
from helpers.cluster_results import until as until_within
from helpers.command_line import TINY

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
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={munge}
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
GresTypes=gpu
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
JobRequeue=1
KillWait=20
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=sched_interval=5,bf_interval=5
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1 RealMemory=4000 Gres=gpu:1
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1 RealMemory=4000 Gres=gpu:1
PartitionName=low Nodes=n1,n2 Default=YES MaxTime=INFINITE PriorityTier=1
PartitionName=high Nodes=n1,n2 MaxTime=INFINITE PriorityTier=10
"""

GRES = """\
NodeName=n1 Name=gpu File=/dev/tty1
NodeName=n2 Name=gpu File=/dev/tty2
"""


def missing() -> list[str]:
    """Names of the programs and rights that this host lacks for Slurm."""
    path = os.pathsep.join((os.environ.get("PATH", ""), SBIN))
    lacking = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    return lacking + ([] if os.geteuid() == 0 else ["root"])


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A cluster of two nodes with a core each; the environment in which sbatch speaks to it.

    munged, slurmctld and two slurmd of Debian's packages run in one folder.  Only these are ended.
    """
    if lacking := missing():
        pytest.skip(f"needs {', '.join(lacking)}")
    folder = tmp_path_factory.mktemp("slurm")
    host, ports = socket.gethostname(), free_ports(3)
    key, munge = folder / "munge.key", folder / "munge.socket"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o400)
    (folder / "state").mkdir(exist_ok=True)
    conf = folder / "slurm.conf"
    conf.write_text(CONF.format(host=host, ports=ports, folder=folder, munge=munge))
    (folder / "gres.conf").write_text(GRES)
    path = os.pathsep.join((os.environ["PATH"], SBIN))
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
        until(lambda: idle_nodes(environment) == 2, what="two idle nodes", seconds=60)
        yield environment
    finally:
        if len(started) == 4:  # a job's processes outlive the daemons
            with contextlib.suppress(AssertionError):
                subprocess.run(["scancel", "--full", "--user=root"], env=environment)
                until(lambda: not listed(environment), what="empty queue", seconds=60)
        for process in reversed(started):
            end(process)


def idle_nodes(environment: dict[str, str]) -> int:
    """How many nodes have answered and wait for work."""
    words = ["scontrol", "show", "nodes", "--oneliner"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    return done.stdout.count("State=IDLE ")


def listed(environment: dict[str, str]) -> str:
    """The jobs that are left."""
    words = ["squeue", "--noheader"]
    return subprocess.run(words, env=environment, capture_output=True, text=True).stdout


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens at now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


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
            command = [word.format(task=task, node=node) for word in words]
            subprocess.run(command, env=cluster, check=False, capture_output=True)
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
        # A requeued task would wait for two minutes.
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
    return [*words, *TINY, *SETTINGS]
