"""Two processes that torchrun starts train the very run that one process trains."""

from __future__ import annotations

import json
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
from helpers import ROOT, TESTS
from helpers.parallel_runs import BEGUN, CASES, CONFIG, KINDS, config_of
from helpers.small_runs import only_run
from safetensors.numpy import load_file

import deepstack
from deepstack.config import Config, to_yaml, with_overrides
from deepstack.distributed import RankGroup
from deepstack.errors import ConfigError
from deepstack.records import Run
from deepstack.training.preflight import refuse_cut_settings

SCRIPT = str(TESTS / "helpers" / "parallel_runs.py")
PATH = os.pathsep.join([str(TESTS), str(ROOT)])
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
SECONDS = 240  # far more than any of it takes: a hang fails the test


def environment(**more: str) -> dict[str, str]:
    """The environment of a process with the threads of one core."""
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": PATH} | more


def launch(command: list[str], **more: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        command, capture_output=True, text=True, timeout=SECONDS, env=environment(**more)
    )


def difference(a: Run, b: Run) -> float:
    """The largest relative difference of any number in steps.csv and evals.csv."""
    assert list(a.steps.step) == list(b.steps.step)
    largest = 0.0
    for one, other in ((a.steps, b.steps), (a.evals, b.evals)):
        x, y = one.to_numpy(float), other[one.columns].to_numpy(float)
        assert (np.isnan(x) == np.isnan(y)).all()
        apart = np.abs(x - y) / np.maximum(np.abs(x), 1e-6)
        largest = np.nanmax(apart, initial=largest)
    return largest


def check_all(out: Path, scheme_steps: int, scheme: str | None = None) -> None:
    """Train all of parallel_runs.py, with all schemes or one, alone and then together, alike."""
    more = {"SCHEME_STEPS": str(scheme_steps)} | ({"SCHEMES": scheme} if scheme else {})
    for command in ([sys.executable, SCRIPT, "alone"], [*TORCHRUN, SCRIPT, "together"]):
        ended = launch([*command, str(out)], **more)
        assert ended.returncode == 0, ended.stderr
    left_out = {c for c in CASES if scheme and c.startswith("scheme_")} - {f"scheme_{scheme}"}
    assert len(CASES) - len(left_out) == len(list((out / "alone").iterdir()))
    for case, kind in product([c for c in CASES if c not in left_out], KINDS):
        alone, run = only_run(out / "alone" / case), only_run(out / kind / case)
        where = f"{case} {kind}"
        parallel = config_of(case, kind).runtime.parallel
        assert (
            run.meta["environment"] | {"processes": 2, "parallel": parallel}
            == run.meta["environment"]
        )
        assert run.state == alone.state == ("diverged" if case == "bound" else "done"), where
        assert difference(alone, run) < 1e-4, where
        if run.state == "diverged":
            continue
        steps = scheme_steps if case.startswith("scheme_") else CONFIG.train.steps
        assert len(run.steps) == steps and run.steps.grad_norm.max() > CONFIG.train.clip, where
        # Adam trains what has no gradient (the biases of k) on rounding errors, so that all numbers
        # of a layer or of the weights are close together; one by one they are under SGD. The biases
        # of k move the largest logit, though not attention.
        for name in alone.folder.layer_names():
            x, y = alone.folder.read_layers(name)[1], run.folder.read_layers(name)[1]
            if "variance" in name:  # a square would differ by twice as much
                x, y = np.sqrt(x), np.sqrt(y)
            rtol = 5e-3 if "largest_logit" in name else 1e-3
            np.testing.assert_allclose(x, y, rtol=rtol, atol=1e-6, err_msg=f"{where} {name}")
        weights = [
            load_file(r.folder.checkpoint_path(steps) / "weights.safetensors") for r in (alone, run)
        ]
        apart, together = (np.concatenate([w[k].ravel() for k in weights[0]]) for w in weights)
        assert np.linalg.norm(together - apart) < 1e-3 * np.linalg.norm(apart), where
        if CASES[case].get("train.optimizer") == "sgd":
            np.testing.assert_allclose(together, apart, rtol=1e-3, atol=1e-6, err_msg=where)
            for name in ("attribution", "first_order"):
                logs = (pd.read_csv(r.path / f"{name}.csv") for r in (alone, run))
                np.testing.assert_allclose(*logs, rtol=2e-3, atol=1e-6, err_msg=where)


@pytest.mark.slow
def test_two_processes_train_like_one_and_go_on_for_each_other(tmp_path: Path) -> None:
    out = tmp_path
    check_all(out, 4, "hyper_connections")
    # What one process began, two have gone on with; and the other way round.
    whole = only_run(out / "alone" / "deepnorm")
    for kind in KINDS:
        continued = only_run(out / f"alone_{kind}" / "begun")
        assert continued.meta["environment_changed"] and len(continued.meta["resumed"]) == 1
        assert difference(whole, continued) < 1e-4

        study = out / f"{kind}_alone"
        begun = only_run(study / "begun")
        assert begun.state == "interrupted" and len(begun.steps) == BEGUN
        config = config_of("deepnorm", kind)
        with pytest.raises(ConfigError, match="processes was 2, is 1"):
            deepstack.train(config, out=study, study="begun")
        continued = deepstack.train(config, out=study, study="begun", allow_env_change=True)
        assert difference(whole, continued) < 1e-4
        assert continued.meta["environment"]["processes"] == 1


@pytest.mark.slow
def test_every_scheme_for_longer(tmp_path: Path) -> None:
    check_all(tmp_path, 20)


def test_a_signal_stops_all_processes_and_one_goes_on(tmp_path: Path) -> None:
    config = with_overrides(CONFIG, {"train.steps": 100_000, "train.eval_every": 0})
    file = tmp_path / "tiny.yaml"
    file.write_text(to_yaml(config))
    out = tmp_path / "out"
    command = [*TORCHRUN, "-m", "deepstack", "train", str(file), "--out", str(out)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment())
    try:
        until = time.monotonic() + SECONDS
        while not [p for p in out.glob("tiny/*/steps.csv") if p.read_text().count("\n") > 3]:
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    run = only_run(out / "tiny")  # one folder, though two processes trained
    assert run.state == "interrupted", stderr
    assert stderr.count("interrupted at step") == 2  # the log's line and the error's, once each
    done = len(run.steps)
    assert list(run.steps.step) == list(range(1, done + 1))
    with pytest.raises(ConfigError, match="processes was 2, is 1"):
        deepstack.train(config, out=out, study="tiny")


@pytest.mark.slow
def test_what_all_refuse_is_said_once(tmp_path: Path) -> None:
    file = tmp_path / "tiny.yaml"
    file.write_text(to_yaml(CONFIG))
    out = tmp_path / "out"
    ended = launch(
        [*TORCHRUN, "-m", "deepstack", "train", str(file), "train.batch_size=5", "--out", str(out)]
    )
    assert ended.returncode != 0
    assert ended.stderr.count("train.batch_size: found 5") == 1
    assert ended.stdout == "" and not out.exists()


def test_an_error_in_one_process_ends_all(tmp_path: Path) -> None:
    began = time.monotonic()
    ended = launch([*TORCHRUN, SCRIPT, "fail", str(tmp_path)])
    assert ended.returncode != 0 and "made for the test" in ended.stderr
    assert time.monotonic() - began < SECONDS / 2
    run = only_run(tmp_path / "failing")
    assert run.state == "interrupted" and len(run.steps) >= 1 and run.folder.holder() is None
    done = deepstack.train(
        config_of("deepnorm"), out=tmp_path, study="failing", allow_env_change=True
    )
    assert done.state == "done" and len(done.steps) == 20


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


def test_without_torchrun_there_is_no_group(tmp_path: Path) -> None:
    config = with_overrides(config_of("deepnorm", "fully_sharded"), {"train.steps": 2})
    run = deepstack.train(config, out=tmp_path, study="alone")
    assert not torch.distributed.is_initialized()
    where = json.loads((run.path / "meta.json").read_text())["environment"]
    assert where["processes"] == 1 and where["parallel"] is None


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
