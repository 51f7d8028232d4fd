"""Two processes that torchrun starts train the very run that one process trains."""

import os
import signal
import subprocess
import sys
import time
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
from helpers.parallel_runs import BEGUN, CASES, CONFIG, KINDS, config_of
from helpers.small_runs import only_run, weights_of

import deepstack
from deepstack.config import Config, load_config, with_overrides
from deepstack.distributed import RankGroup
from deepstack.errors import ConfigError
from deepstack.records import Run
from deepstack.training.preflight import refuse_cut_settings

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
    # Adam trains what has no gradient (the biases of k) on rounding errors, so that all numbers
    # of a layer or of the weights are close together; one by one they are under SGD. The biases
    # of k move the largest logit, though not attention.
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


@pytest.mark.slow
def test_two_processes_train_like_one_and_go_on_for_each_other(tmp_path: Path) -> None:
    out = tmp_path
    for command in ([sys.executable, SCRIPT, "alone"], [*TORCHRUN, SCRIPT, "together"]):
        ended = launch(*command, str(out))
        assert ended.returncode == 0, ended.stderr
    for case, kind in product(CASES, KINDS):
        alone, run = only_run(out / "alone" / case), only_run(out / kind / case)
        assert run.meta["environment"]["parallel"] == config_of(case, kind).runtime.parallel
        check_case(case, alone, run, f"{case} {kind}")
    # What one process began, two have gone on with; and the other way round.
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


def test_what_all_refuse_is_said_once() -> None:
    for rank, is_told in (("0", True), ("1", False)):
        refused = typed("train", QUICK, "model.depth=0", env={"LOCAL_RANK": rank})
        assert refused.exit_code == 2 and bool(refused.stderr) == is_told


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


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"model.norm.kind": "batch"}, "found batch, which needs one process"),
        ({"train.shards": 2}, "found 2, which needs one process"),
        ({"train.optimizer": "muon"}, r"needs whole matrices.*runtime\.parallel=data"),
        ({"train.spectral_penalty": 0.1}, r"needs whole matrices.*runtime\.parallel=data"),
        ({"log.sharpness_every": 5}, r"needs whole matrices.*runtime\.parallel=data"),
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
