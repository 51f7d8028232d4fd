"""Two numeric code paths of one machine are two environments; their names alone are not."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from helpers.command_line import typed
from helpers.small_runs import interrupted, small

import deepstack
from deepstack.config import to_yaml
from deepstack.errors import ConfigError
from deepstack.records import Run, RunFolder
from deepstack.training import environment
from deepstack.training.environment import VARIABLES, bf16_support, cpu, fingerprint

CONFIG = small(model__depth=1, model__d_model=8, log__layers_every=0)


@pytest.fixture
def stopped(tmp_path: Path) -> RunFolder:
    """An interrupted run of the study `s`."""
    return interrupted(CONFIG, tmp_path, study="s")


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="torch has no MKL here")
def test_another_code_path_is_refused_and_a_sweep_goes_on_with_other_runs(
    stopped: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(CONFIG))
    rows = stopped.steps_path.read_bytes()
    # In the processes of the runs MKL takes the code path of the oldest processors.
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    words = ["--seeds", "0,1", "--workers", 1, "--study", "s"]
    swept = typed("sweep", file, *words, "--out", tmp_path)
    assert swept.exit_code == 3, swept.stderr
    states = {path.name: Run(path).state for path in (tmp_path / "s").iterdir() if path.is_dir()}
    assert states.pop(stopped.name) == "interrupted" and list(states.values()) == ["done"]
    assert stopped.steps_path.read_bytes() == rows
    for words in ("fingerprint was", "'MKL_CBWR': 'COMPATIBLE'", "cpu_model is '"):
        assert words in swept.stderr


def test_cpu_and_variables_alone_are_no_other_environment(
    stopped: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meta = stopped.read_meta()
    meta["environment"] |= {"cpu_model": "another", "instruction_sets": "sse2"}
    stopped.write_meta(meta)
    monkeypatch.setenv("OMP_SCHEDULE", "static")
    monkeypatch.setenv("MKL_SECRET_TOKEN", "hunter2")
    run = deepstack.train(CONFIG, study="s", out=tmp_path)
    assert run.state == "done" and "environment_changed" not in run.meta
    variables = run.meta["environment"]["variables"]
    assert variables["OMP_SCHEDULE"] == "static" and set(variables) <= set(VARIABLES)
    assert "hunter2" not in json.dumps(run.meta)


def test_another_fingerprint_names_the_cpu_and_the_variables_that_differ(
    stopped: RunFolder, tmp_path: Path
) -> None:
    meta = stopped.read_meta()
    meta["environment"] |= {"fingerprint": "0", "cpu_model": "old", "variables": {"KMP_X": "1"}}
    stopped.write_meta(meta)
    with pytest.raises(ConfigError, match="fingerprint was '0'") as caught:
        deepstack.train(CONFIG, study="s", out=tmp_path)
    assert "cpu_model was 'old', is " in str(caught.value)
    assert "variables was {'KMP_X': '1'}, is {" in str(caught.value)
    run = deepstack.train(CONFIG, study="s", out=tmp_path, allow_env_change=True)
    assert run.meta["environment_changed"] is True
    assert run.meta["resumed"][0]["environment"]["fingerprint"] != "0"


def test_a_run_recorded_without_a_fingerprint_resumes_by_its_other_values(
    stopped: RunFolder, tmp_path: Path
) -> None:
    meta = stopped.read_meta()
    for key in ("fingerprint", "cpu_model", "instruction_sets", "variables"):
        del meta["environment"][key]
    stopped.write_meta(meta | {"environment": meta["environment"] | {"torch": "1.0"}})
    with pytest.raises(ConfigError, match=r"torch was '1\.0'") as caught:
        deepstack.train(CONFIG, study="s", out=tmp_path)
    assert "fingerprint" not in str(caught.value)
    stopped.write_meta(meta)
    run = deepstack.train(CONFIG, study="s", out=tmp_path)
    assert run.state == "done" and "environment_changed" not in run.meta


def test_the_fingerprint_is_the_same_again_cheap_and_leaves_random_numbers_alone() -> None:
    before, device = torch.get_rng_state(), torch.device("cpu")
    first = fingerprint(device, bf16=False)
    began = time.process_time()
    assert fingerprint(device, bf16=False) == first
    assert time.process_time() - began < 0.05
    assert torch.equal(torch.get_rng_state(), before)
    assert len({first, fingerprint(device, bf16=True)}) == 2


def test_model_and_instruction_sets_are_read_as_linux_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cpuinfo"
    monkeypatch.setattr(environment, "CPU_INFO", file)
    assert cpu()["cpu_model"]  # of another system, without the file
    file.write_text(
        "processor\t: 0\nmodel name\t: A CPU\nflags\t\t: fpu avx2 sse2 lm avx512_bf16\n"
    )
    assert cpu() == {"cpu_model": "A CPU", "instruction_sets": "avx2 avx512_bf16 sse2"}
    assert "multiplies bf16 (avx512_bf16)" in bf16_support(torch.device("cpu"))
    file.write_text("flags\t\t: fpu avx2 sse2\n", encoding="utf-8")
    assert bf16_support(torch.device("cpu")).startswith("slower than fp32")
