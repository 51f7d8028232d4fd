"""Slurm on this host for a test: munged, slurmctld and two slurmd from Debian's packages.

All of it lies in one folder; only what was started is ended.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

from helpers.cluster_results import until

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
    """What a test on Slurm needs and this host has not."""
    path = os.pathsep.join((os.environ.get("PATH", ""), SBIN))
    lacking = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    return lacking + ([] if os.geteuid() == 0 else ["root"])


@contextlib.contextmanager
def slurm(folder: Path) -> Iterator[dict[str, str]]:
    """A cluster of two nodes with a core each; the environment in which sbatch speaks to it."""
    folder.mkdir(parents=True, exist_ok=True)
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
        with open(folder / f"{words[0]}-{len(started)}.out", "wb") as said:
            started.append(
                subprocess.Popen(
                    words, env=environment, stdout=said, stderr=said, start_new_session=True
                )
            )

    try:
        start(*munged)
        until(munge.exists, what="munged")
        start("slurmctld", "-D", "-i", "-f", str(conf))
        for node in ("n1", "n2"):
            start("slurmd", "-D", "-N", node, "-f", str(conf))
        until(lambda: idle_nodes(environment) == 2, what="two idle nodes")
        yield environment
    finally:
        if len(started) == 4:  # what a job has started outlives the daemons
            with contextlib.suppress(AssertionError):
                subprocess.run(["scancel", "--full", "--user=root"], env=environment)
                until(lambda: not listed(environment), what="empty queue")
        for process in reversed(started):
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


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
