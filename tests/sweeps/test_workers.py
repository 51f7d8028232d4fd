"""Workers that train one run after the other: equal bytes, and ends that reach no other run."""

import json
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.cluster_results import steps_made, until
from helpers.sampling import some
from helpers.small_runs import data_of, small

import deepstack
from deepstack.base import plugins
from deepstack.config import Config, to_yaml
from deepstack.records import Run, find_runs
from deepstack.sweeps import Local, Pool, fork_server, local, plan
from deepstack.sweeps.fork_server import ForkedProcess, ForkServer
from deepstack.sweeps.worker import Worker

LONG = small(train__steps=100_000)


@pytest.fixture
def workers(server: ForkServer) -> Iterator[ForkServer]:
    """A server without idle workers; its own take one run after the other."""
    server.end_idle_workers(1000)
    yield server
    server.end_idle_workers(1000)


def start(server: ForkServer, config: Config, out: Path, **how: Any) -> ForkedProcess:
    """Start a run whose worker is kept."""
    words = ["--quiet", "--out", str(out), "--study", "s"]
    return server.start(to_yaml(config), words, keep=True, **how)


def ended(process: ForkedProcess) -> int:
    """Wait for the exit code of a run."""
    until(lambda: process.poll() is not None)
    code = process.poll()
    assert code is not None
    return code


def pid_of(run: Run) -> int:
    """The process that trained a run."""
    return int(json.loads(run.folder.lock_path.read_text())["pid"])


def run_of(out: Path, config: Config) -> Run:
    """The run of a configuration."""
    (run,) = (run for run in find_runs(out) if run.get("seed") == config.seed)
    return run


EARLIER: dict[str, Config] = {
    "another seed": small(seed=1),
    "dropout": small(model__dropout=0.1, seed=1, train__steps=60),
    "bf16": small(train__precision="bf16", seed=1, task__name="copy"),
    "replayed, wider, decoder": small(
        seed=1, train__steps=60, model__d_model=64, model__family="decoder", model__depth=2
    ),
    "muon, streams": small(seed=1, train__optimizer="muon", model__scheme="hyper_connections"),
    "diverges": small(seed=1, train__lr=1e6, train__optimizer="sgd", train__clip=None),
    "nothing allowed or fixed": small(
        seed=1, runtime__deterministic=False, runtime__threads=2, model__norm__kind="batch"
    ),
}
LATER: dict[str, Config] = {
    "plain": small(),
    "replayed": small(train__steps=60, model__scheme="pre_ln"),
    "dropout": small(model__dropout=0.1, train__precision="bf16"),
}
PAIRS = [(before, after) for before in EARLIER for after in LATER]


@pytest.mark.parametrize(("before", "after"), some(PAIRS, 14))
def test_a_used_worker_writes_the_bytes_of_a_fresh_process(
    before: str, after: str, server: ForkServer, tmp_path: Path
) -> None:
    first, second = EARLIER[before], LATER[after]
    assert ended(start(server, first, tmp_path)) == ended(start(server, second, tmp_path)) == 0
    alone = server.start(to_yaml(second), ["--quiet", "--out", str(tmp_path / "alone")])
    assert ended(alone) == 0
    used, (fresh,) = run_of(tmp_path, second), find_runs(tmp_path / "alone")
    assert pid_of(used) == pid_of(run_of(tmp_path, first)) != pid_of(fresh)
    assert data_of(used) == data_of(fresh) and len(data_of(used)) > 10
    assert used.meta["environment"] == fresh.meta["environment"]


def test_a_worker_that_dies_ends_its_run_alone(workers: ForkServer, tmp_path: Path) -> None:
    whole, other = small(train__steps=400), small(train__steps=400, seed=1)
    hit, beside = (start(workers, config, tmp_path) for config in (whole, other))
    until(lambda: steps_made(tmp_path) and min(steps_made(tmp_path)) > 0)
    hit.send_signal(signal.SIGKILL)
    assert (ended(hit), ended(beside)) == (-signal.SIGKILL, 0)
    first = run_of(tmp_path, other)
    assert first.state == "done" and pid_of(first) != pid_of(run_of(tmp_path, whole))
    assert ended(start(workers, whole, tmp_path)) == 0  # in the worker that is left
    again = run_of(tmp_path, whole)
    assert pid_of(again) == pid_of(first)
    assert data_of(again) == data_of(deepstack.train(whole, out=tmp_path / "alone"))


@pytest.mark.parametrize("number", some([signal.SIGINT, signal.SIGTERM], 2))
def test_an_interrupted_run_saves_and_ends_its_worker(
    number: signal.Signals, workers: ForkServer, tmp_path: Path
) -> None:
    assert ended(start(workers, small(seed=1), tmp_path)) == 0
    process = start(workers, LONG, tmp_path)
    until(lambda: max(steps_made(tmp_path)) > 12)
    process.send_signal(number)
    assert ended(process) == 128 + number
    cut = run_of(tmp_path, LONG)
    assert cut.state == "interrupted" and pid_of(cut) == pid_of(run_of(tmp_path, small(seed=1)))
    assert ended(start(workers, small(seed=2), tmp_path)) == 0
    assert pid_of(run_of(tmp_path, small(seed=2))) != pid_of(cut)


@pytest.mark.slow(turn=55)
def test_a_run_takes_a_worker_of_its_own_variables_alone(
    workers: ForkServer, tmp_path: Path
) -> None:
    pids = []
    for seed, gpu in enumerate(("0", "1", "0")):
        given = {"CUDA_VISIBLE_DEVICES": gpu}
        assert ended(start(workers, small(seed=seed), tmp_path, environment=given)) == 0
        pids.append(pid_of(run_of(tmp_path, small(seed=seed))))
    assert pids[0] == pids[2] != pids[1]


def test_the_longest_idle_worker_ends_first(workers: ForkServer, tmp_path: Path) -> None:
    long, short = small(train__steps=300), small(seed=1, train__steps=1)
    both = [start(workers, config, tmp_path) for config in (long, short)]
    assert [ended(process) for process in both] == [0, 0]
    there = [Path(f"/proc/{pid_of(run_of(tmp_path, config))}") for config in (long, short)]
    assert all(path.exists() for path in there)
    workers.end_idle_workers(1)
    until(lambda: not all(path.exists() for path in there))
    assert there[0].exists()


def test_a_refused_run_and_lack_of_memory_end_their_worker(
    workers: ForkServer, tmp_path: Path
) -> None:
    large = small(seed=1, model__d_model=512, model__depth=24)
    assert ended(start(workers, large, tmp_path, memory=2**29)) == 5
    assert run_of(tmp_path, large).state == "out_of_memory"
    words = ["--out", str(tmp_path)]
    refused = workers.start("depth: 1", words, keep=True)
    assert ended(refused) == 2 and "unknown key" in refused.stderr_text()
    assert ended(start(workers, small(), tmp_path)) == 0


@pytest.mark.slow(turn=25)
def test_idle_workers_end_on_request_and_with_their_server(tmp_path: Path) -> None:
    def is_gone(run: Run) -> bool:
        return not Path(f"/proc/{pid_of(run)}").exists()

    with closing(ForkServer()) as workers:
        assert ended(start(workers, small(), tmp_path)) == 0
        first = run_of(tmp_path, small())
        assert not is_gone(first)
        workers.end_idle_workers(1)
        until(lambda: is_gone(first))
        assert ended(start(workers, small(seed=1), tmp_path)) == 0
        second = run_of(tmp_path, small(seed=1))
        assert not is_gone(second)
    assert is_gone(second)


def pretend_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the launcher see a GPU; torch in the workers sees none, so they train on the CPU."""
    monkeypatch.setattr(local, "choose_device", lambda runtime: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(plugins, "LOADED", {})
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(local, "query_gpus", lambda: "0, GPU-x, 80000\n")
    monkeypatch.setattr(local.conf, "cores", lambda: 4)


def swept(config: Config, out: Path, **limits: Any) -> list[Run]:
    """The runs of twelve seeds, as a sweep trains them."""
    cells = plan(config, {"seed": list(range(12))}, study="s", out=out)
    launcher = Local(cells, "s", out, local.default_workers(cells), budget=40 * 10**9)
    Pool(cells, launcher, **limits).run()
    return [Run(cell.folder.path) for cell in cells]


@pytest.mark.slow(turn=7)
def test_twelve_runs_on_a_gpu_start_two_processes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pretend_gpu(monkeypatch)
    runs = swept(small(train__steps=6), tmp_path)
    assert {run.state for run in runs} == {"done"}
    assert len({pid_of(run) for run in runs}) == 2
    monkeypatch.undo()
    alone = deepstack.train(small(train__steps=6, seed=7), out=tmp_path / "alone")
    assert data_of(run_of(tmp_path / "s", small(seed=7))) == data_of(alone)


@pytest.mark.slow(turn=33)
def test_idle_workers_leave_their_memory_to_a_run_that_waits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pretend_gpu(monkeypatch)
    short, large, long = plan(LONG, {"train.steps": [1, 2, 10**5]}, study="s", out=tmp_path)
    with closing(Local([short, large, long], "s", tmp_path, 2, budget=40 * 10**9)) as launcher:
        first, second = launcher.start(short), launcher.start(long)
        assert first is not None and second is not None
        until(lambda: first.poll() == 0)
        worker = Path(f"/proc/{pid_of(Run(short.folder.path))}")
        assert worker.exists()
        assert launcher.start(replace(large, memory=79 * 10**9)) is None  # beside the other run
        until(lambda: not worker.exists(), seconds=20)
        assert second.poll() is None


@pytest.mark.slow
def test_a_run_over_its_time_and_plugins_leave_no_worker_to_the_next_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pretend_gpu(monkeypatch)
    cells = plan(LONG, {"train.steps": [100_000, 8]}, study="s", out=tmp_path)
    launcher = Local(cells, "s", tmp_path, 1, budget=40 * 10**9)
    pool = Pool(cells, launcher, run_timeout=40.0)
    states = {e.cell.config.train.steps: e.state for e in pool.run()}
    assert states == {8: "done", 100_000: "failed"}
    plugin = tmp_path / "own.py"
    plugin.write_text("")
    deepstack.load_plugins([plugin])
    runs = swept(small(train__steps=2), tmp_path / "with")
    assert len({pid_of(run) for run in runs}) == len(runs) == 12


def test_a_run_that_hangs_is_killed_when_its_sweep_has_died(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def hang() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as a run whose step never ends
        (tmp_path / "began").touch()
        time.sleep(60)

    monkeypatch.setattr(fork_server, "GRACE_SECONDS", 0.1)
    hanging = Worker(hang, [])
    errors = str(tmp_path / "errors")
    hanging.assign(
        {"arguments": [], "errors": errors, "environment": {}, "memory": None, "keep": False}
    )
    until((tmp_path / "began").exists)
    fork_server.end([hanging])
    assert hanging.exit_code() == -signal.SIGKILL
