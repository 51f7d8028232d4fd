"""Sweeps over two Ray nodes on this host: one lost in the middle, with and without a shared folder.

python -m pytest -m ray -n0 tests/integrations/ray/test_ray_cluster.py
"""

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from helpers import QUICK
from helpers.cluster_results import end, free_ports, results, runs_of
from helpers.cluster_results import until as until_within
from helpers.command_line import TINY

from deepstack.records import Run, find_runs

pytestmark = pytest.mark.ray

until = partial(until_within, seconds=400)

STEPS = int(os.environ.get("CLUSTER_STEPS", "400"))
SETTINGS = [
    "task.name=slowed", f"train.steps={STEPS}", "log.layers_every=40",
    "runtime.checkpoint_seconds=1",
]  # fmt: skip
# No run ends while the file {slow} exists, so that a lost node interrupts its run.
PLUGIN = '''
import time
from dataclasses import replace
from pathlib import Path
from deepstack.tasks import build_task, task

@task("slowed")
def slowed(*, seq_len, seed):
    """Copying, whose batches take a while as long as a file is there."""
    copy = build_task("copy", {{}}, seq_len=seq_len, seed=seed)

    def draw(random, batch_size, held_out):
        if Path({slow!r}).exists():
            time.sleep(0.3)
        return copy.draw(random, batch_size, held_out)

    return replace(copy, name="slowed", draw=draw)
'''
RAY = Path(sys.executable).with_name("ray")
# A node in a separate mount namespace does not see the sweep's files in this folder.
APART = 'mount -t tmpfs none "$1" && shift && exec "$@"'


class Cluster:
    """A head and a second node, a core each.

    unseen: a folder that they do not see.  slow: a file; while it is there, runs are slow.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.unseen = folder, folder / "unseen"
        self.unseen.mkdir()
        self.slow, self.plugin = folder / "slow", folder / "slowed.py"
        self.plugin.write_text(PLUGIN.format(slow=str(self.slow)))
        (port,) = free_ports(1)
        self.address = f"127.0.0.1:{port}"
        # Ray's sockets need a short path.
        self.session = Path("/tmp", f"ray-{os.getpid()}")
        self.head = self._start(
            "--head", f"--port={port}", "--include-dashboard=false", "--disable-usage-stats",
            f"--temp-dir={self.session}",
        )  # fmt: skip
        self.node: subprocess.Popen[bytes] | None = None

    def _start(self, *words: str) -> subprocess.Popen[bytes]:
        command = ["unshare", "-m", "sh", "-c", APART, "sh", str(self.unseen), str(RAY), "start"]
        command += ["--block", "--num-cpus=1", "--num-gpus=1", *words]
        environment = dict(os.environ, RAY_worker_niceness="0")  # 15 is slow on a busy machine
        environment.pop("CUDA_VISIBLE_DEVICES", None)  # Ray gives none out that is hidden
        with open(self.folder / "ray.out", "ab") as log:
            process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        until(lambda: raylet(process) is not None, process)
        return process

    def second(self) -> None:
        """Start the second node, in the place of one that was killed."""
        if self.node is not None:
            end_session(self.node)
        self.node = self._start(f"--address={self.address}")
        time.sleep(3)  # until the head has heard of it

    def lose(self) -> None:
        """Kill the second node's raylet, and wait until its workers have ended with it."""
        assert self.node is not None
        pid = raylet(self.node)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        self.node.wait(timeout=60)
        session = ["pgrep", "--session", str(self.node.pid)]
        until(lambda: subprocess.run(session, stdout=subprocess.DEVNULL).returncode == 1)

    def close(self) -> None:
        for process in (self.node, self.head):
            if process is not None:
                end_session(process)
        shutil.rmtree(self.session, ignore_errors=True)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if importlib.util.find_spec("ray") is None or not RAY.exists():
        pytest.skip("Ray is not installed")
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("no mount namespaces here")
    started = Cluster(tmp_path_factory.mktemp("ray"))
    try:
        yield started
    finally:
        started.close()


@pytest.fixture(scope="module")
def local(
    cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, bytes]]:
    """Return the results of a sweep on this machine alone."""
    out = tmp_path_factory.mktemp("local")
    subprocess.run(sweep(cluster, out), check=True, capture_output=True)
    return results(out, 4)


def test_a_lost_node_costs_no_run(
    cluster: Cluster, local: dict[str, dict[str, bytes]], tmp_path: Path
) -> None:
    driver = begin(cluster, tmp_path)
    cluster.lose()
    until(lambda: len(underway(tmp_path)) == 1, driver)  # the lost one has saved and ended
    cluster.slow.unlink()
    shown, errors = driver.communicate(timeout=600)
    assert driver.returncode == 0, errors
    assert "raylet" not in shown + errors
    assert results(tmp_path, 4) == local
    assert any("resumed" in run.meta for run in find_runs(tmp_path))
    assert not list(tmp_path.glob("*/.ray-*"))


def test_without_a_shared_folder_runs_are_sent_back(
    cluster: Cluster, local: dict[str, dict[str, bytes]]
) -> None:
    out = cluster.unseen / "results"
    first = begin(cluster, out)
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=120)
    assert first.returncode == 130
    saved = {run.name: run.folder.checkpoints() for run in find_runs(out)}
    assert [run.status["state"] for run in find_runs(out)] == ["interrupted"] * 2
    driver = start(cluster, out)
    until(lambda: saves_beyond(saved, out) == 2, driver)
    cluster.lose()
    cluster.slow.unlink()
    _, errors = driver.communicate(timeout=600)
    assert driver.returncode == 0, errors
    assert results(out, 4) == local
    assert all("/deepstack-" in run.meta["command"] for run in find_runs(out))
    resumed = sorted(len(run.meta.get("resumed", [])) for run in find_runs(out))
    assert resumed == [0, 0, 1, 2]  # both after the interruption, one as its node was lost


def test_runs_save_and_end_with_the_sweep_that_was_killed(cluster: Cluster, tmp_path: Path) -> None:
    driver = begin(cluster, tmp_path)
    driver.kill()
    driver.communicate()
    until(lambda: {run.status["state"] for run in find_runs(tmp_path)} == {"interrupted"})


def sweep(cluster: Cluster, out: Path) -> list[str]:
    """The command of a sweep of four runs on this machine."""
    words = [sys.executable, "-m", "deepstack", "sweep", QUICK, "--out", str(out), "--study", "s"]
    words += ["--depths", "1,2", "--schemes", "deepnorm", "--seeds", "0,1"]
    return [*words, *TINY, *SETTINGS, "--plugin", str(cluster.plugin)]


def start(cluster: Cluster, out: Path) -> subprocess.Popen[str]:
    """Start the sweep on the cluster, where its runs are slow."""
    cluster.slow.touch()
    words = [*sweep(cluster, out), "--ray", cluster.address]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def begin(cluster: Cluster, out: Path) -> subprocess.Popen[str]:
    """Start the second node and the sweep, and wait until a run works on each node."""
    cluster.second()
    driver = start(cluster, out)
    until(lambda: len(underway(out)) == 2, driver)
    return driver


def saves_beyond(saved: dict[str, list[int]], out: Path) -> int:
    """The number of runs that have other checkpoints than these."""
    return sum(run.folder.checkpoints() != saved[run.name] for run in underway(out))


def underway(out: Path) -> list[Run]:
    """The runs that run and have a checkpoint to go on from."""
    runs = [run for run in runs_of(out) if run.folder.checkpoints()]
    return [run for run in runs if run.status["state"] == "running"]


def raylet(process: subprocess.Popen[bytes]) -> int | None:
    """Return the process id of the raylet of `ray start --block`, whose session it shares."""
    words = ["pgrep", "--session", str(process.pid), "--exact", "raylet"]
    found = subprocess.run(words, capture_output=True, text=True).stdout
    return int(found) if found else None


def end_session(process: subprocess.Popen[bytes]) -> None:
    """End `ray start --block` and the processes of its session: nothing else of Ray here."""
    end(process)
    subprocess.run(["pkill", "--signal", "KILL", "--session", str(process.pid)])
