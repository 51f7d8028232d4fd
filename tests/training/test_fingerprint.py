"""Two numeric code paths of one machine are two environments; their names alone are not."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.command_line import typed
from helpers.small_runs import interrupted, small
from torch.utils.flop_counter import FlopCounterMode

import deepstack
from deepstack.base.errors import ConfigError
from deepstack.config import to_yaml
from deepstack.records import Run
from deepstack.training import environment
from deepstack.training.environment import VARIABLES, bf16_support, cpu, fingerprint

CONFIG = small(model__depth=1, model__d_model=8, log__layers_every=0)


@pytest.mark.slow(turn=10)
@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="torch has no MKL here")
def test_another_code_path_is_refused_and_a_sweep_goes_on_with_other_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = interrupted(CONFIG, tmp_path, study="s")
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


EARLIER = dict.fromkeys(("fingerprint", "cpu_model", "instruction_sets", "variables"))  # missing


@pytest.mark.parametrize(
    ("recorded", "message"),
    [
        ({"cpu_model": "another", "instruction_sets": "sse2"}, None),
        (
            {"fingerprint": "0", "cpu_model": "old", "variables": {"KMP_X": "1"}},
            r"cpu_model was 'old', is .*fingerprint was '0'.*variables was {'KMP_X': '1'}, is {",
        ),
        (EARLIER, None),
        (EARLIER | {"torch": "1.0"}, r"another environment: torch was '1\.0', is '[^']*'\n"),
    ],
)
def test_the_fingerprint_decides_or_without_one_the_other_values(
    recorded: dict[str, Any], message: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = interrupted(CONFIG, tmp_path, study="s")
    meta = stopped.read_meta()
    environment = meta["environment"] | recorded
    meta["environment"] = {key: value for key, value in environment.items() if value is not None}
    stopped.write_meta(meta)
    monkeypatch.setenv("OMP_SCHEDULE", "static")
    monkeypatch.setenv("MKL_SECRET_TOKEN", "hunter2")
    if message:
        with pytest.raises(ConfigError, match=message):
            deepstack.train(CONFIG, study="s", out=tmp_path)
    run = deepstack.train(CONFIG, study="s", out=tmp_path, allow_env_change=bool(message))
    assert run.state == "done" and run.meta.get("environment_changed", False) == bool(message)
    variables = run.meta["resumed"][0]["environment"]["variables"]
    assert variables["OMP_SCHEDULE"] == "static" and set(variables) <= set(VARIABLES)
    assert "hunter2" not in json.dumps(run.meta)


def test_the_fingerprint_is_stable_and_draws_no_random_numbers() -> None:
    before, device = torch.get_rng_state(), torch.device("cpu")
    first = fingerprint(device, bf16=False)
    with FlopCounterMode(display=False) as flops:
        assert fingerprint(device, bf16=False) == first
    assert 0 < flops.get_total_flops() < 1e9
    assert torch.equal(torch.get_rng_state(), before)
    assert fingerprint(device, bf16=True) != first


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
