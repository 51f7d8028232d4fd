"""Sweeps on Ray, tested without Ray: files sent back from a node, and the loss of a node.

test_ray_cluster.py runs them on two nodes.
"""

from __future__ import annotations

import itertools
import shutil
import socket
import threading
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.ended_runs import TINY
from helpers.small_runs import data_of

import deepstack
from deepstack import config as conf
from deepstack import plugins
from deepstack.cli.sweep_command import ray_address
from deepstack.config import Config, with_overrides
from deepstack.errors import PluginError, ResourceError
from deepstack.records import Run, RunFolder
from deepstack.records.files import replace
from deepstack.sweeps import plan, ray_cluster, ray_node
from deepstack.sweeps.folder_sync import FolderChanges, Source, write_changes
from deepstack.sweeps.fork_server import ForkServer
from deepstack.sweeps.plan import requirements_of
from deepstack.sweeps.ray import (
    LOST_AT_MOST,
    Process,
    has_capacity,
    refuse_too_large,
    resources_of,
    share_of_gpu,
)
from deepstack.sweeps.ray_node import Order, is_shared, work

BASE = with_overrides(Config(), TINY | {"train.steps": 4})


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not any(p.startswith(".") for p in path.relative_to(folder).parts)
    }


class Pair:
    """A folder on a node, and the sweep's copy of it."""

    def __init__(self, tmp_path: Path) -> None:
        self.node, self.here = RunFolder(tmp_path / "node"), RunFolder(tmp_path / "here")
        self.source = Source(self.node)

    def send(self) -> FolderChanges:
        changes = self.source.changes()
        write_changes(self.here, changes)
        assert contents(self.node.path) == contents(self.here.path)
        return changes


def write_checkpoint(folder: RunFolder, step: int) -> None:
    path = folder.checkpoint_path(step)
    path.mkdir(parents=True)
    (path / "weights.safetensors").write_bytes(b"w" * step)
    (path / "checksums.json").write_text('{"weights.safetensors": ""}')


def test_of_a_log_only_what_has_grown_is_sent(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    pair.node.write_config("model: {}\n")
    pair.node.steps_path.write_bytes(b"step\n1\n2")
    (pair.node.path / ".draft").write_bytes(b"half")
    assert [name for name, _, _ in pair.send().files] == ["steps.csv", "config.yaml"]
    with open(pair.node.steps_path, "ab") as log:
        log.write(b"\n3\n")
    assert pair.send().files == [("steps.csv", 8, b"\n3\n")]
    assert pair.send() == FolderChanges([], [])
    cut = b"step\n1\n2,cut and made again\n"
    pair.node.steps_path.write_bytes(cut)
    assert pair.send().files == [("steps.csv", 0, cut)]


def test_what_refers_to_rows_is_written_after_them(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    write_checkpoint(pair.node, 3)
    for name in ("columns.json", "status.json", "steps.csv", "layers/steps.npy", "layers/x.npy"):
        replace(pair.node.path / name, b"{}")
    names = [name for name, _, _ in pair.send().files]
    assert names[:3] == ["steps.csv", "layers/x.npy", "columns.json"]
    assert [PurePosixPath(name).name for name in names[3:]] == [
        "steps.npy", "weights.safetensors", "checksums.json", "status.json"
    ]  # fmt: skip


def test_a_checkpoint_that_was_removed_is_removed_from_the_copy(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    write_checkpoint(pair.node, 3)
    pair.send()
    write_checkpoint(pair.node, 7)
    shutil.rmtree(pair.node.checkpoint_path(3))
    pair.send()
    assert pair.here.checkpoints() == [7]


def test_what_vanishes_while_it_is_looked_at_is_passed_over(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    pair.node.write_config("model: {}\n")
    over = threading.Event()

    def save_and_remove() -> None:
        for step in itertools.cycle(range(1, 50)):
            write_checkpoint(pair.node, step)
            shutil.rmtree(pair.node.checkpoint_path(step))
            if over.is_set():
                return

    saver = threading.Thread(target=save_and_remove)
    saver.start()
    try:
        for _ in range(100):
            write_changes(pair.here, pair.source.changes())
    finally:
        over.set()
        saver.join()
    pair.send()


def test_no_name_leads_out_of_the_run_folder(tmp_path: Path) -> None:
    target = RunFolder(tmp_path / "run")
    for name in ("/etc/x", "../x", "a/../../x", ""):
        for changes in (FolderChanges([(name, 0, b"x")], []), FolderChanges([], [name])):
            with pytest.raises(ValueError, match="no file of a run folder"):
                write_changes(target, changes)


def order_of(tmp_path: Path, **changes: Any) -> Order:
    values: dict[str, Any] = {
        "config": conf.to_yaml(BASE), "folder": "run", "study": "s",
        "out": str(tmp_path / "driver"), "here": str(tmp_path),
        "token": str(tmp_path / "driver" / "s" / ".ray-token"),
    }  # fmt: skip
    return Order(**(values | changes))


def test_a_node_knows_the_sweeps_folder_by_what_stands_in_it(tmp_path: Path) -> None:
    order = order_of(tmp_path)
    assert not is_shared(order)  # no such folder
    token = Path(order.token)
    token.parent.mkdir(parents=True)
    assert not is_shared(order)  # a folder of that name, but not this one
    token.touch()
    assert is_shared(order)


def test_a_run_on_a_node_that_shares_nothing_is_sent_back_whole(
    tmp_path: Path, server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_node, "ForkServer", lambda here: server)
    monkeypatch.setattr(ray_node, "_server", None)
    whole = deepstack.train(BASE, study="s", out=tmp_path / "whole")
    order = order_of(tmp_path, folder=whole.name)
    here = RunFolder(tmp_path / "driver" / "s" / whole.name)
    heard = []

    def exchange(message: dict[str, Any]) -> list[dict[str, Any]]:
        heard.append(set(message))
        if "changes" in message:
            write_changes(here, FolderChanges(*message["changes"]))
        return [{"begin": ([], [])}] if "shared" in message else []

    assert work(order, exchange) == (0, "")
    assert heard[0] == {"shared"} and heard[-1] == {"changes"}
    assert Run(here.path).state == "done"
    assert data_of(Run(here.path)) == data_of(whole)


def test_a_run_that_is_stopped_before_it_began_never_begins(tmp_path: Path) -> None:
    assert work(order_of(tmp_path), lambda message: [{"signal": 15}]) == (143, "")


def test_plugins_travel_as_they_were_loaded(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("x = 1\n")
    plugins.load_plugins([file])
    assert ray_cluster.plugin_files() == [("mine.py", b"x = 1\n")]
    file.write_text("x = 2\n")
    with pytest.raises(PluginError, match="changed"):
        ray_cluster.plugin_files()


class RayError(Exception):
    """The base of Ray's errors in `FakeCluster`."""


class RayTaskError(RayError):
    """An error inside a task."""


class FakeCluster:
    """As much of `OnRay` as a run needs; `ends` says what each task of the run comes to."""

    def __init__(self, *ends: Any) -> None:
        self.ends, self.sent, self.orders = list(ends), [], []
        self.messages: list[dict[str, Any]] = []
        self.cancelled: list[Any] = []
        self.ray = SimpleNamespace(
            exceptions=SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError),
            get=self._get,
            cancel=self.cancelled.append,
        )

    @staticmethod
    def _get(end: Any) -> Any:
        if isinstance(end, Exception):
            raise end
        return end

    def nodes(self) -> list[dict[str, float]]:
        return [{"CPU": 4.0}]

    def submit(self, order: Order) -> Any:
        self.orders.append(order.key)
        return self.ends.pop(0)

    def has_ended(self, task: Any) -> bool:
        return task is not None

    def send(self, key: str, message: dict[str, Any]) -> None:
        self.sent.append((key, message))

    def receive(self, key: str) -> list[dict[str, Any]]:
        messages, self.messages = self.messages, []
        return messages


def process_of(cluster: FakeCluster, tmp_path: Path, **resources: float) -> Process:
    order = order_of(tmp_path, resources={"num_cpus": 1, "num_gpus": 0} | resources)
    return Process(cluster, RunFolder(tmp_path / "driver" / "s" / "run"), order)  # type: ignore[arg-type]


def test_a_run_lost_with_its_node_is_sent_again_and_in_the_end_interrupted(tmp_path: Path) -> None:
    lost = [RayError("node died\nand pages")] * (LOST_AT_MOST + 1)
    cluster = FakeCluster(*lost[:2], (0, "stderr"))
    process = process_of(cluster, tmp_path)
    assert [process.poll() for _ in range(3)] == [None, None, 0]
    assert process.stderr_text() == "stderr"
    assert cluster.orders == ["run.0", "run.1", "run.2"]
    process = process_of(FakeCluster(*lost), tmp_path)
    assert [process.poll() for _ in lost] == [None] * LOST_AT_MOST + [143]
    assert process.stderr_text().endswith("last: node died")


def test_a_run_that_was_asked_to_end_is_not_sent_again(tmp_path: Path) -> None:
    cluster = FakeCluster(RayError("cancelled, or its node died"))
    process = process_of(cluster, tmp_path)
    process.send_signal(2)
    assert cluster.cancelled and cluster.sent == [("run.0", {"signal": 2})]
    assert process.poll() == 130


def test_errors_of_a_task_and_what_no_node_can_hold_end_the_run(tmp_path: Path) -> None:
    process = process_of(FakeCluster(RayTaskError("no space")), tmp_path)
    assert process.poll() == 1 and process.stderr_text() == "no space"
    process = process_of(FakeCluster(), tmp_path, num_cpus=5)
    assert process.poll() == 5 and "has 5 cores" in process.stderr_text()


def test_the_copy_is_held_while_the_run_is_elsewhere(tmp_path: Path) -> None:
    cluster, folder = FakeCluster(None, None), RunFolder(tmp_path / "driver" / "s" / "run")
    process = process_of(cluster, tmp_path)
    cluster.messages = [{"shared": False}]
    assert process.poll() is None
    assert cluster.sent == [("run.0", {"begin": ([], [])})]
    cluster.messages = [{"changes": ([("config.yaml", 0, b"seed: 1\n")], [])}]
    assert process.poll() is None
    assert folder.exists() and folder.holder() is not None
    other = process_of(cluster, tmp_path)  # leaves alone the folder that the first one holds
    cluster.messages = [{"shared": False}]
    assert other.poll() == 5 and "in use" in other.stderr_text()
    assert cluster.sent[-1] == ("run.0", {"signal": 15})
    process._task = (0, "")
    assert process.poll() == 0 and folder.holder() is None


def test_runs_share_the_resources_of_the_cluster(tmp_path: Path) -> None:
    (cell,) = plan(BASE, study="s", out=tmp_path)
    memory = requirements_of(cell, has_gpu=False).memory

    def most(*nodes: dict[str, float], limit: int | None = None) -> int:
        """Return how many of three such runs go together."""
        known = [{"CPU": 1.0, "memory": 9.0 * memory} | node for node in nodes]
        run = resources_of(cell, known, gpu_bytes=None)
        return sum(has_capacity(run, [run] * taken, known, limit) for taken in range(3))

    assert most({}, {}) == 2
    assert most({"CPU": 9.0, "memory": 2.5 * memory}) == 2
    assert most({"CPU": 9.0, "GPU": 2.0, "memory": 1e12}) == 2  # auto takes a GPU
    assert most({"CPU": 4.0}, {"CPU": 2.0}) == 3
    assert most({"CPU": 9.0}, limit=1) == 1


def test_a_run_that_no_node_can_hold_is_refused() -> None:
    nodes = [{"CPU": 4.0}, {"CPU": 2.0}]
    refuse_too_large({"num_cpus": 4, "num_gpus": 0}, nodes)
    for cpus, gpus, text in ((5, 0, "cores"), (1, 1, "GPU")):
        with pytest.raises(ResourceError, match=text):
            refuse_too_large({"num_cpus": cpus, "num_gpus": gpus}, nodes)


@pytest.mark.parametrize(
    ("needed", "there", "share"),
    [(10, None, 1.0), (10, 15, 1.0), (10, 5, 1.0), (10, 25, 1 / 2), (1, 1000, 1 / 8)],
)
def test_small_runs_share_a_gpu(needed: int, there: int | None, share: float) -> None:
    assert share_of_gpu(needed, there) == share


def test_without_ray_or_without_a_cluster_the_message_has_a_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        where = f"127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(ResourceError, match="ray start --head"):
        ray_cluster.refuse_silent(where)
    ray_cluster.refuse_silent("auto")

    def refuse(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(ray_cluster, "import_module", refuse)
    with pytest.raises(ResourceError, match="pip install"):
        ray_cluster.connect(None)


@pytest.mark.parametrize(
    ("words", "address"),
    [
        (["study.yaml", "head:6379"], "head:6379"),
        (["ray://10.0.0.1:10001", "study.yaml", "seed=0,1"], "ray://10.0.0.1:10001"),
        (["auto"], "auto"),
        (["study.yaml", "task.path=a:1", "name=x:2", "./a:3"], None),
    ],
)
def test_the_word_behind_ray_may_be_an_address(words: list[str], address: str | None) -> None:
    assert ray_address(words) == address
