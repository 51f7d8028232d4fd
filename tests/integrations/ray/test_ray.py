"""Sweeps on Ray, tested without Ray: files sent back from a node, and the loss of a node.

test_ray_cluster.py runs them on two nodes.
"""

import shutil
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any
from unittest.mock import Mock

import pytest
from helpers.cluster_results import free_ports
from helpers.ended_runs import TINY
from helpers.record_runs import contents
from helpers.small_runs import data_of

import deepstack
from deepstack import config as conf
from deepstack.base import plugins
from deepstack.base.errors import PluginError, ResourceError
from deepstack.config import Config, with_overrides
from deepstack.integrations.ray import cluster as ray_cluster
from deepstack.integrations.ray import folder_sync
from deepstack.integrations.ray import node as ray_node
from deepstack.integrations.ray.folder_sync import FolderChanges, Source, write_changes
from deepstack.integrations.ray.launcher import (
    LOST_AT_MOST,
    RayProcess,
    has_capacity,
    resources_of,
    share_of_gpu,
)
from deepstack.integrations.ray.launcher_option import ray_address
from deepstack.integrations.ray.node import Order, is_shared, work
from deepstack.records import Run, RunFolder, files
from deepstack.sweeps import plan
from deepstack.sweeps.fork_server import ForkServer
from deepstack.sweeps.plan import requirements_of

BASE = with_overrides(Config(), TINY | {"train.steps": 4})


class Pair:
    """A folder on a node, and the sweep's copy of it."""

    def __init__(self, tmp_path: Path) -> None:
        self.node, self.here = RunFolder(tmp_path / "node"), RunFolder(tmp_path / "here")
        self.source = Source(self.node)

    def send(self) -> FolderChanges:
        changes = self.source.changes()
        write_changes(self.here, changes)
        assert contents(self.node.path, ".draft") == contents(self.here.path)
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


def test_files_that_refer_to_rows_are_written_after_the_rows(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    write_checkpoint(pair.node, 3)
    for name in ("columns.json", "status.json", "steps.csv", "layers/steps.npy", "layers/x.npy"):
        files.replace(pair.node.path / name, b"{}")
    names = [name for name, _, _ in pair.send().files]
    assert names[:3] == ["steps.csv", "layers/x.npy", "columns.json"]
    assert [PurePosixPath(name).name for name in names[3:]] == [
        "steps.npy", "weights.safetensors", "checksums.json", "status.json"
    ]  # fmt: skip
    write_checkpoint(pair.node, 7)
    shutil.rmtree(pair.node.checkpoint_path(3))
    pair.send()
    assert pair.here.checkpoints() == [7]


def test_a_file_that_vanishes_while_it_is_read_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(tmp_path)
    pair.node.write_config("model: {}\n")
    monkeypatch.setattr(folder_sync, "visible_files", lambda folder: ["config.yaml", "gone"])
    assert [name for name, _, _ in pair.send().files] == ["config.yaml"]


def test_no_name_leads_out_of_the_run_folder(tmp_path: Path) -> None:
    target = RunFolder(tmp_path / "run")
    for name in ("/etc/x", "../x", "a/../../x", ""):
        for changes in (FolderChanges([(name, 0, b"x")], []), FolderChanges([], [name])):
            with pytest.raises(ValueError, match="not a file of a run folder"):
                write_changes(target, changes)


def test_a_folder_that_cannot_be_removed_from_the_copy_is_named(tmp_path: Path) -> None:
    target = RunFolder(tmp_path / "run")
    write_checkpoint(target, 3)
    with pytest.raises(ResourceError, match="checkpoint/3: "):
        write_changes(target, FolderChanges([], ["checkpoint/3"]))


def order_of(tmp_path: Path, **changes: Any) -> Order:
    out = tmp_path / "driver"
    token = str(out / "s" / ".ray-token")
    order = Order(conf.to_yaml(BASE), "run", "s", str(out), here=str(tmp_path), token=token)
    return replace(order, **changes)


def test_a_node_knows_the_sweeps_folder_by_what_stands_in_it(tmp_path: Path) -> None:
    order = order_of(tmp_path)
    assert not is_shared(order)  # no such folder
    token = Path(order.token)
    token.parent.mkdir(parents=True)
    assert not is_shared(order)  # a folder of that name, but not this one
    token.touch()
    assert is_shared(order)


@pytest.mark.slow(turn=38)
def test_a_run_on_a_node_without_shared_files_is_sent_back(
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
    file, link = tmp_path / "latest.py", tmp_path / "mine.py"
    file.write_text("x = 1\n")
    link.symlink_to(file)
    plugins.load_plugins([link])
    assert ray_cluster.plugin_files() == [("mine.py", b"x = 1\n")]
    file.write_text("x = 2\n")
    with pytest.raises(PluginError, match="changed"):
        ray_cluster.plugin_files()


class RayError(Exception):
    """The base of Ray's errors in `FakeCluster`."""


class RayTaskError(RayError):
    """An error inside a task."""


def cluster_of(*ends: Any) -> Mock:
    """As much of `OnRay` as a run needs; `ends` are the results of the tasks of the run."""
    cluster = Mock()
    cluster.nodes.return_value = [{"CPU": 4.0}]
    cluster.receive.return_value = []
    cluster.has_ended.return_value = bool(ends)
    cluster.ray.get.side_effect = ends
    cluster.ray.exceptions.RayError = RayError
    cluster.ray.exceptions.RayTaskError = RayTaskError
    return cluster


def process_of(cluster: Mock, tmp_path: Path, **resources: float) -> RayProcess:
    order = order_of(tmp_path, resources={"num_cpus": 1, "num_gpus": 0} | resources)
    return RayProcess(cluster, RunFolder(tmp_path / "driver" / "s" / "run"), order)


def test_a_run_lost_with_its_node_is_repeated_and_then_interrupted(tmp_path: Path) -> None:
    lost = [RayError("node died\nand pages")] * (LOST_AT_MOST + 1)
    cluster = cluster_of(*lost[:2], (0, "stderr"))
    process = process_of(cluster, tmp_path)
    assert [process.poll() for _ in range(3)] == [None, None, 0]
    assert process.stderr_text() == "stderr"
    orders = [call.args[0].key for call in cluster.submit.mock_calls]
    assert orders == ["run.0", "run.1", "run.2"]
    process = process_of(cluster_of(*lost), tmp_path)
    assert [process.poll() for _ in lost] == [None] * LOST_AT_MOST + [143]
    assert process.stderr_text().endswith("last: node died")


def test_a_run_that_was_asked_to_end_is_not_sent_again(tmp_path: Path) -> None:
    cluster = cluster_of(RayError("cancelled, or its node died"))
    process = process_of(cluster, tmp_path)
    process.send_signal(2)
    cluster.ray.cancel.assert_called_once_with(cluster.submit.return_value)
    assert process.poll() == 130
    cluster.send.assert_called_once_with("run.0", {"signal": 2})


def test_an_error_of_a_task_and_too_large_a_run_end_the_run(tmp_path: Path) -> None:
    process = process_of(cluster_of(RayTaskError("no space")), tmp_path)
    assert process.poll() == 1 and process.stderr_text() == "no space"
    for resources, text in [({"num_cpus": 5}, "has 5 cores"), ({"num_gpus": 1}, "has 1 GPU")]:
        process = process_of(cluster_of(), tmp_path, **resources)
        assert process.poll() == 5 and text in process.stderr_text()


def test_the_copy_is_held_while_the_run_is_elsewhere(tmp_path: Path) -> None:
    cluster, folder = cluster_of(), RunFolder(tmp_path / "driver" / "s" / "run")
    changes = {"changes": ([("config.yaml", 0, b"seed: 1\n")], [])}
    cluster.receive.side_effect = [[{"shared": False}], [changes], [{"shared": False}], []]
    process = process_of(cluster, tmp_path)
    assert process.poll() is None
    cluster.send.assert_called_with("run.0", {"begin": ([], [])})
    assert process.poll() is None
    assert folder.exists() and folder.holder() is not None
    other = process_of(cluster, tmp_path)  # leaves alone the folder that the first one holds
    assert other.poll() == 5 and "in use" in other.stderr_text()
    cluster.send.assert_called_with("run.0", {"signal": 15})
    cluster.has_ended.return_value, cluster.ray.get.side_effect = True, [(0, "")]
    assert process.poll() == 0 and folder.holder() is None


def test_runs_share_the_resources_of_the_cluster(tmp_path: Path) -> None:
    (cell,) = plan(BASE, study="s", out=tmp_path)
    memory = requirements_of(cell, has_gpu=False).memory

    def most(*nodes: dict[str, float], limit: int | None = None) -> int:
        """Return how many of three such runs go together."""
        known = [{"CPU": 1.0, "memory": 9.0 * memory} | node for node in nodes]
        has_gpu = any("GPU" in node for node in known)
        run = resources_of(requirements_of(cell, has_gpu=has_gpu), known, gpu_bytes=None)
        return sum(has_capacity(run, [run] * taken, known, limit) for taken in range(3))

    assert most({}, {}) == 2
    assert most({"CPU": 9.0, "memory": 2.5 * memory}) == 2
    assert most({"CPU": 9.0, "GPU": 2.0, "memory": 1e12}) == 2  # auto takes a GPU
    assert most({"CPU": 4.0}, {"CPU": 2.0}) == 3
    assert most({"CPU": 9.0}, limit=1) == 1


def test_small_runs_share_a_gpu() -> None:
    cases = [(10, None), (10, 15), (10, 5), (10, 25), (1, 1000)]
    assert [share_of_gpu(*case) for case in cases] == [1, 1, 1, 1 / 2, 1 / 8]


def test_without_ray_or_without_a_cluster_the_message_has_a_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ResourceError, match="ray start --head"):
        ray_cluster.refuse_silent(f"127.0.0.1:{free_ports(1)[0]}")
    ray_cluster.refuse_silent("auto")
    monkeypatch.setattr(ray_cluster, "import_module", Mock(side_effect=ImportError))
    with pytest.raises(ResourceError, match="pip install"):
        ray_cluster.connect(None)


def test_the_word_behind_ray_may_be_an_address() -> None:
    assert ray_address(["study.yaml", "head:6379"]) == "head:6379"
    assert ray_address(["ray://10.0.0.1:10001", "study.yaml", "seed=0,1"]) == "ray://10.0.0.1:10001"
    assert ray_address(["auto"]) == "auto"
    assert ray_address(["study.yaml", "task.path=a:1", "name=x:2", "./a:3"]) is None
