"""Two processes that torchrun starts train the very run that one process trains."""

import os
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from helpers import QUICK, ROOT, TESTS
from helpers.cluster_results import steps_made, until
from helpers.command_line import TINY, typed
from helpers.parallel_runs import BEGUN, CASES, CONFIG, KINDS, PARTS, cases_of, config_of
from helpers.sampling import rotating
from helpers.small_runs import only_run, weights_of

import deepstack
from deepstack.base.errors import ConfigError, Interrupted
from deepstack.config import Config, load_config, with_overrides
from deepstack.config.instruments import specs
from deepstack.fast.distributed import RankGroup, local_rank
from deepstack.records import Run
from deepstack.training.parts.ranks import refuse_cut_settings

SCRIPT = str(TESTS / "helpers" / "parallel_runs.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
SECONDS = 240  # far more than any of it takes: a hang fails the test


ENVIRONMENT = os.environ | {
    "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(TESTS), str(ROOT)])
}  # fmt: skip


def launch(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=ENVIRONMENT)


def assert_close(a: Run, b: Run, where: str) -> None:
    """All numbers in steps.csv and evals.csv agree."""
    for one, other in ((a.steps, b.steps), (a.evals, b.evals)):
        pd.testing.assert_frame_equal(one, other, check_like=True, rtol=1e-4, atol=1e-10, obj=where)


def check_case(case: str, alone: Run, run: Run, where: str) -> None:
    """Two processes must have trained a case as one did."""
    assert run.meta["environment"]["processes"] == 2, where
    assert run.state == alone.state == ("diverged" if case == "bound" else "done"), where
    assert_close(alone, run, where)
    if run.state == "diverged":
        return
    assert len(run.steps) == CONFIG.train.steps and run.steps.grad_norm.max() > CONFIG.train.clip
    # Adam trains parameters without a gradient (the biases of k) on rounding errors, so that all
    # numbers of a layer or of the weights are close together; one by one they are under SGD. The
    # biases of k move the largest logit, though not attention.
    for name in alone.folder.layer_names():
        x, y = alone.folder.read_layers(name)[1], run.folder.read_layers(name)[1]
        if "variance" in name:  # a square would differ by twice as much
            x, y = np.sqrt(x), np.sqrt(y)
        rtol = 5e-3 if "largest_logit" in name else 1e-3
        np.testing.assert_allclose(x, y, rtol=rtol, atol=1e-6, err_msg=f"{where} {name}")
    weights = weights_of(alone), weights_of(run)
    apart, together = (torch.cat([w[k].ravel() for k in weights[0]]).numpy() for w in weights)
    assert np.linalg.norm(together - apart) < 1e-3 * np.linalg.norm(apart), where
    if CASES[case].get("train.optimizer") == "sgd":
        np.testing.assert_allclose(together, apart, rtol=1e-3, atol=1e-6, err_msg=where)
        for name in ("attribution", "first_order"):
            logs = (pd.read_csv(r.path / f"{name}.csv") for r in (alone, run))
            np.testing.assert_allclose(*logs, rtol=2e-3, atol=1e-6, err_msg=where)


@pytest.mark.parametrize("part", rotating(range(PARTS), PARTS))
def test_two_processes_train_like_one_and_go_on_for_each_other(part: int, tmp_path: Path) -> None:
    out = tmp_path
    for command in ([sys.executable, SCRIPT, "alone"], [*TORCHRUN, SCRIPT, "together"]):
        ended = launch(*command, str(out), str(part))
        assert ended.returncode == 0, ended.stderr
    for case, kind in product(cases_of(part), KINDS):
        alone, run = only_run(out / "alone" / case), only_run(out / kind / case)
        assert run.meta["environment"]["parallel"] == config_of(case, kind).runtime.parallel
        check_case(case, alone, run, f"{case} {kind}")
    # Two processes have resumed the run of one, and one has resumed the run of two.
    whole = only_run(out / "alone" / "deepnorm")
    for kind in KINDS:
        continued = only_run(out / f"alone_{kind}" / "begun")
        assert continued.meta["environment_changed"] and len(continued.meta["resumed"]) == 1
        assert_close(whole, continued, kind)

        study = out / f"{kind}_alone"
        begun = only_run(study / "begun")
        assert begun.state == "interrupted" and len(begun.steps) == BEGUN
        config = config_of("deepnorm", kind)
        with pytest.raises(ConfigError, match="processes was 2, is 1"):
            deepstack.train(config, out=study, study="begun")
        continued = deepstack.train(config, out=study, study="begun", allow_env_change=True)
        assert_close(whole, continued, kind)
        assert continued.meta["environment"]["processes"] == 1


@pytest.mark.slow
def test_a_signal_stops_all_processes_and_one_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "out"
    overrides = [*TINY, "train.steps=100000"]
    command = [*TORCHRUN, "-m", "deepstack", "train", QUICK, *overrides, "--out", str(out)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    try:
        until(lambda: any(rows > 2 for rows in steps_made(out)), process, seconds=SECONDS)
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    run = only_run(out / "quick")  # one folder, though two processes trained
    assert run.state == "interrupted", stderr
    assert stderr.count("interrupted at step") == 2  # the log's line and the error's, once each
    assert list(run.steps.step) == list(range(1, len(run.steps) + 1))
    with pytest.raises(ConfigError, match="processes was 2, is 1"):
        deepstack.train(load_config(Path(QUICK), overrides=overrides), out=out, study="quick")


def rank_environment(rank: int, size: int = 2) -> dict[str, str]:
    """Return the variables that torchrun would set for this rank, with a free port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    names = "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"
    return dict(zip(names, map(str, (rank, rank, size, "127.0.0.1", port)), strict=True))


def test_ranks_that_have_met_report_a_common_error_once_and_others_always(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wrong = "train", QUICK, "model.depth=0"
    for environment in ({"LOCAL_RANK": "1"}, rank_environment(1, size=1), {"RANK": "1"}):
        refused = typed(*wrong, env=environment)
        assert refused.exit_code == 2 and refused.stderr.startswith("deepstack: model.depth=0")
    refused = typed(*wrong, env=rank_environment(1))
    assert refused.exit_code == 2 and refused.stderr.startswith("deepstack: rank 1 of 2: model.dep")
    refused = typed(*wrong, env=rank_environment(1) | {"RANK": "one"})
    assert refused.exit_code == 2 and "RANK: found 'one'" in refused.stderr
    monkeypatch.setattr("deepstack.base.torchrun.has_joined", True)
    for rank, is_told in ((0, True), (1, False)):
        refused = typed(*wrong, env=rank_environment(rank))
        assert refused.exit_code == 2 and bool(refused.stderr) == is_told


@pytest.mark.parametrize(("rank", "absent"), [(0, "the other ranks"), (1, "rank 0")])
def test_a_waiting_rank_names_absent_ranks_and_stops_on_a_signal(
    rank: int,
    absent: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("deepstack.base.torchrun.PATIENCE_SECONDS", 0.2)
    monkeypatch.setattr("deepstack.fast.distributed.TIMEOUT", timedelta(seconds=10))
    for name, value in rank_environment(rank).items():
        monkeypatch.setenv(name, value)
    printed: list[str] = []

    def stop() -> int | None:
        printed.append(capfd.readouterr().err)
        return signal.SIGTERM if "unset RANK" in "".join(printed) else None

    with pytest.raises(Interrupted, match=f"waiting for {absent}") as error:
        deepstack.train(CONFIG, out=tmp_path, stop=stop)
    assert error.value.exit_code == 128 + signal.SIGTERM
    assert f"rank {rank} of 2 waits for {absent} at 127.0.0.1:" in "".join(printed)
    assert not any(tmp_path.iterdir())


def test_a_group_of_one_rank_needs_no_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = rank_environment(0, size=1)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with socket.socket() as used:
        used.bind(("127.0.0.1", int(environment["MASTER_PORT"])))
        used.listen()
        config = with_overrides(CONFIG, {"train.steps": 1, "log.layers_every": 0})
        assert deepstack.train(config, out=tmp_path).state == "done"


@pytest.mark.slow
def test_an_error_in_one_process_ends_all(tmp_path: Path) -> None:
    began = time.monotonic()
    ended = launch(*TORCHRUN, SCRIPT, "fail", str(tmp_path))
    assert ended.returncode != 0 and "made for the test" in ended.stderr
    assert time.monotonic() - began < SECONDS / 2
    run = only_run(tmp_path / "failing")
    assert run.state == "interrupted" and len(run.steps) >= 1 and run.folder.holder() is None
    # Without torchrun there is one process, which shares nothing.
    config = config_of("deepnorm", "fully_sharded")
    done = deepstack.train(config, out=tmp_path, study="failing", allow_env_change=True)
    assert done.state == "done" and len(done.steps) == 20
    environment = Run(done.path).meta["environment"]
    assert environment["processes"] == 1 and environment["parallel"] is None


def test_shares_are_equal_and_cover_the_batch() -> None:
    ranks = RankGroup()
    assert ranks.is_rank0 and ranks.share(5) == slice(0, 5)
    taken: list[int] = []
    for rank in range(3):
        ranks.rank, ranks.size = rank, 3
        taken += range(12)[ranks.share(12)]
    assert taken == list(range(12))
    with pytest.raises(ConfigError, match="found 2; allowed a multiple of 3") as error:
        ranks.share(2)
    assert error.value.key == "train.batch_size"


def test_the_gpu_of_a_rank_has_its_number_on_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    address = {"MASTER_ADDR": "a.host", "MASTER_PORT": "29500"}
    numbers = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for name, value in (address | numbers).items():
        monkeypatch.setenv(name, value)
    assert local_rank() == 1
    monkeypatch.delenv("MASTER_PORT")
    assert local_rank() == 0, "without torchrun there is one process"


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"model.norm.kind": "batch"}, "found batch, which needs one process"),
        (
            {"train.shards": 2},
            "found 2, which needs one process; allowed 1, or train.micro_batches=2",
        ),
        ({"train.optimizer": "muon"}, r"needs whole matrices.*runtime\.parallel=data"),
        ({"train.spectral_penalty": 0.1}, r"needs whole matrices.*runtime\.parallel=data"),
        *(
            ({one.key: 5}, r"needs whole matrices.*runtime\.parallel=data")
            for one in specs().values()
            if one.needs_whole_matrices
        ),
    ],
)
def test_settings_that_need_one_process_or_whole_matrices(
    setting: dict[str, Any], message: str
) -> None:
    ranks = RankGroup()
    ranks.size = 2
    with pytest.raises(ConfigError, match=message):
        refuse_cut_settings(
            with_overrides(Config(), {"runtime.parallel": "fully_sharded", **setting}), ranks
        )
