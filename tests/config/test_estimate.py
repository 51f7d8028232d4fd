"""Estimates of parameters and memory, and the lengths of runs in steps, tokens and FLOPs."""

import subprocess
import sys
from pathlib import Path

import pytest
from helpers import QUICK
from helpers.command_line import TINY, typed
from helpers.small_runs import SMALL, data_of, interrupted, small

import deepstack
from deepstack import config as conf
from deepstack.base.errors import ConfigError, ResourceError
from deepstack.config import estimate, with_overrides
from deepstack.config.instruments import specs
from deepstack.config.load import example
from deepstack.model import with_steps
from deepstack.schemes import scheme_flops, scheme_memory
from deepstack.sweeps import plan
from deepstack.training import parent_of


def test_memory_estimate_follows_the_config() -> None:
    def memory(*overrides: str) -> int:
        return conf.memory_estimate(conf.parse_config("", overrides=overrides), 257)

    for more in (
        "model.depth=12",
        "task.seq_len=128",
        "model.dropout=0.1",
        *(f"{one.key}=1" for one in specs().values() if not one.is_part_of_snapshots),
    ):
        assert memory(more) > memory(), more
    for less in ("train.optimizer=sgd", "train.trainable=[q]", "train.precision=bf16"):
        assert memory(less) < memory(), less
    assert memory("log.layers_every=0") < memory()
    assert sum(conf.memory_terms(conf.Config(), 257).values()) == memory()


MEASURED = """
model.scheme=real_former model.depth=12 task.seq_len=256 model.n_heads=4 : 1023 976
model.scheme=real_former task.seq_len=1024 model.n_heads=4 model.depth=4 train.batch_size=4 : 1521 955
model.scheme=dlcl model.depth=200 task.seq_len=32 train.batch_size=4 : 2919 1398
model.scheme=dense_former model.depth=200 task.seq_len=32 train.batch_size=4 : 2897 1357
model.scheme=dense_former model.depth=200 task.seq_len=32 train.batch_size=4 model.scheme_options.dilation=4 model.scheme_options.period=5 : 967 763
model.scheme=attn_res model.depth=48 : 1108 872
model.scheme=attn_res model.depth=24 model.scheme_options.blocks=0 : 2481 1461
model.scheme=mudd model.depth=48 train.batch_size=8 : 1498 796
model.scheme=hyper_connections model.depth=48 : 1216 999
model.scheme=frac_connections model.depth=24 train.batch_size=96 : 1386 1384
model.scheme=mv_split model.depth=24 train.batch_size=96 : 1129 1128
model.scheme=ngpt model.depth=24 train.batch_size=96 : 1115 1125
model.scheme=siamese_norm model.depth=24 train.batch_size=96 : 1182 1025
model.depth=48 train.batch_size=2 log.probe_sequences=64 : 1992 1967
model.depth=200 train.batch_size=8 log.layers_every=0 model.positions=rotary : 845 944
model.depth=200 train.batch_size=8 log.layers_every=0 model.positions=rotary model.qk_norm=true model.norm.kind=rms : 925 1191
model.depth=200 train.batch_size=8 log.layers_every=0 model.d_model=128 train.optimizer=muon : 1621 1473
model.depth=12 train.batch_size=4 log.probe_sequences=256 log.skipped_layers=4 : 2128 2157
model.depth=1000 train.batch_size=8 log.layers_every=0 task.seq_len=32 log.probe_sequences=1 runtime.recompute_every=32 : 1374 1272
"""  # noqa: E501
"""Settings, and the peaks in MB of a run of these: replayed and not."""


@pytest.mark.parametrize("row", MEASURED.strip().splitlines())
def test_memory_estimate_of_measured_runs(row: str) -> None:
    settings, _, peaks = row.partition(" : ")
    usual = ["runtime.device=cpu", "train.eval_batches=1", *settings.split()]
    for replay, peak in zip(("true", "false"), map(int, peaks.split()), strict=True):
        config = conf.parse_config("", overrides=[*usual, f"runtime.replay={replay}"])
        assert 0.7 < conf.memory_estimate(config, 257, scheme_memory(config)) / 1e6 / peak < 1.5


@pytest.mark.parametrize(
    ("memory", "settings", "every"),
    [
        (15e9, [], 100),
        (15e9, ["runtime.recompute_every=0"], 0),
        (15e9, ["runtime.device=cuda"], 0),
        (25e9, [], 0),
    ],
)
def test_layers_are_recomputed_by_default_only_where_memory_is_short(
    memory: float, settings: list[str], every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimate, "machine_memory", lambda: memory)
    config = conf.load_config(example("bench_narrow"), ["model.depth=10000", *settings])
    assert conf.recompute_every(config) == every
    needed = conf.memory_estimate(config, scheme_memory=scheme_memory(config))
    assert every == 0 or needed < memory


@pytest.mark.parametrize(
    ("device", "there", "visible", "expected"),
    [
        ("auto", True, None, True),
        ("auto", True, "-1", False),
        ("auto", False, None, False),
        ("cuda", False, "", True),
        ("cpu", True, None, False),
    ],
)
def test_a_hidden_gpu_is_none(
    device: str, there: bool, visible: str | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimate.Path, "exists", lambda path: there)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert estimate.on_gpu(conf.parse_config(f"runtime: {{device: {device}}}")) is expected


def test_short_memory_is_reported_and_a_size_beyond_the_machine_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 2**28 < conf.machine_memory() < 2**50
    words = ["train", QUICK, *TINY, "--out", tmp_path]
    assert "of memory" not in typed(*words).stderr
    monkeypatch.setattr("deepstack.training.resources.memory_limit", lambda _: 10**8)
    trained = typed(*words, "seed=1")
    assert trained.stderr.count("of memory are needed and 100 MB are here") == 1
    monkeypatch.setattr("deepstack.config.machine_memory", lambda: 10**8)
    with pytest.raises(ResourceError, match=r"MB of memory are needed.*model\.depth"):
        deepstack.train(small(seed=1), out=tmp_path / "refused")
    assert not list((tmp_path / "refused").rglob("config.yaml"))


# --- the length of a run: exactly one of steps, tokens and FLOPs ----------------------------------


FLOPS = conf.step_flops(small(), 257, scheme_flops(small())).step
TOKENS = SMALL["train.batch_size"] * SMALL["task.seq_len"]


@pytest.mark.parametrize(
    ("key", "value"), [("train.tokens", 12 * TOKENS + 31), ("train.flops", 11.6 * FLOPS)]
)
def test_a_budget_is_the_run_of_its_steps(tmp_path: Path, key: str, value: float) -> None:
    config = small(train__eval_every=5, runtime__keep_optimizer=True, train__schedule="constant")
    run = deepstack.train(config, out=tmp_path / "steps")
    budget = conf.with_overrides(config, {key: value})
    interrupted(budget, tmp_path / "budget")
    same = deepstack.train(budget, out=tmp_path / "budget")
    assert (same.name, data_of(same)) == (run.name, data_of(run))
    assert same.get("train.steps") == 12 and same.get(key) is None
    assert parent_of(same.path, 3).config.train.steps == 15


def test_a_later_length_replaces_those_of_the_file() -> None:
    text = "train: {steps: 9, warmup_steps: 2}"
    config = conf.parse_config(text, overrides=["train.tokens=4000", "train.flops=1e9"])
    assert (config.train.tokens, config.train.flops, config.train.warmup_steps) == (None, 1e9, 2)
    assert conf.parse_config(conf.to_yaml(config)) == config
    assert conf.with_overrides(config, {"seed": 1}).train.flops == 1e9
    assert "(steps=" not in repr(config.train) and "(steps=9," in repr(
        conf.parse_config(text).train
    )
    again = conf.with_overrides(config, {"train.steps": 7}).train
    assert (again.steps, again.flops) == (7, None)
    sweep = f"{text}\nsweep: {{grid: {{train.steps: [2, 4], model.depth: [1, 2]}}}}"
    study = conf.parse_study(sweep, overrides=["train.flops=1e9,2e9"])
    assert study.keys == ["model.depth", "train.flops"] and study.size == 4
    assert conf.parse_study(sweep, overrides=["train.tokens=9"]).keys == ["model.depth"]


def test_overrides_of_a_sweep_set_no_other_length() -> None:
    rule = "overrides: [{where: {seed: 1}, set: {train.steps: 9}}]"
    study = conf.parse_study(f"sweep: {{grid: {{seed: [0, 1]}}, {rule}}}", "f", ["train.tokens=9"])
    assert [cell.overridden for cell in study.combinations()] == [{}, {}]
    with pytest.raises(ConfigError, match=r"'train\.steps', which the sweep varies"):
        conf.parse_study(f"sweep: {{grid: {{seed: [0, 1], train.tokens: [1, 2]}}, {rule}}}")


def test_each_cell_of_a_sweep_has_its_own_steps(tmp_path: Path) -> None:
    grid = {"train.flops": [1e8, 4e8], "model.depth": (1, 2, 4)}
    cells = plan(small(), grid, study="s", out=tmp_path)
    assert len(cells) == 6
    for cell in cells:
        a_step = cell.flops / cell.config.train.steps
        assert abs(cell.flops - cell.values["train.flops"]) <= a_step / 2
        assert not cell.config.train.has_budget


def test_a_budget_below_a_step_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"train.flops: found 1, \S+ steps of") as caught:
        with_steps(small(train__flops=1.0))
    assert caught.value.key == "train.flops"


IMPORTS = """
import sys
from pathlib import Path
sys.modules["triton"] = None  # comes with torch for a GPU, and would take further 70 MB
import torch, deepstack.training
from torch.utils.checkpoint import checkpoint
bytes_now = lambda: 4096 * int(Path("/proc/self/statm").read_text().split()[1])
x, before = torch.ones(2, requires_grad=True), bytes_now()
checkpoint(torch.sin, x, use_reentrant=False).sum().backward()
print(bytes_now() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_recomputation_counts_the_modules_that_it_imports() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True)
    measured = int(done.stdout)
    usual = ["model.depth=4", "runtime.device=cpu"]
    every = [
        conf.parse_config("", overrides=[*usual, f"runtime.recompute_every={n}"]) for n in (0, 2)
    ]
    terms = [conf.memory_terms(config)["Python and torch"] for config in every]
    assert 0.7 < (terms[1] - terms[0]) / measured < 1.4


def test_the_largest_size_that_fits_has_two_digits() -> None:
    config = with_overrides(conf.Config(), {"model.depth": 1000})
    for most, stated in ((437, 430), (43, 43), (4, 4), (999, 990)):
        fits = estimate.largest_size(
            config, "model.depth", lambda one, n=most: one.model.depth <= n
        )
        assert fits == stated
