"""Every faster way of training gives the losses of the plain one, for every scheme."""

import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import ROOT
from helpers.configs import config_with, runs_with
from helpers.listeners import Listens
from helpers.papers import PAPERS
from helpers.sampling import some

import deepstack
from deepstack.base.errors import ConfigError
from deepstack.config import Config, load_config, with_overrides
from deepstack.fast import FastPaths, choose_fast_paths, compiled, enable_fast_paths, rule
from deepstack.fast.accelerate import in_parts
from deepstack.fast.gpu import heads
from deepstack.fast.rule import fast_paths_of, is_fully_fused, two_layers
from deepstack.model import build_model
from deepstack.records import Run
from deepstack.schemes import SCHEMES, Scheme

config = partial(config_with, {
    "model.depth": 5, "model.d_model": 24, "model.n_heads": 3, "task.name": "markov",
    "task.seq_len": 12, "train.batch_size": 4, "train.steps": 6, "train.eval_every": 0,
    "train.eval_batches": 1, "train.clip": 0.1, "runtime.device": "cpu", "runtime.threads": 1,
})  # fmt: skip


def assert_same_losses(one: Run, two: Run, tolerance: float) -> None:
    assert one.state == two.state == "done"
    assert (one.steps["grad_norm"] > 0.1).any(), "clipping never acted"
    columns = ["loss", "grad_norm", "model_update", "model_update_step"]
    np.testing.assert_allclose(
        one.steps[columns], two.steps[columns], rtol=tolerance, atol=0, equal_nan=False
    )


@pytest.mark.parametrize("name", some(SCHEMES.names(), 6, SCHEMES.names().index("mhc") % 6))
@pytest.mark.parametrize("fused", [True, False])
def test_layers_in_parts_or_recomputed_are_the_same_layers(name: str, fused: bool) -> None:
    model = build_model(config(model__scheme=name), vocab_size=11).model
    paths = FastPaths(fused=fused, compiled=False, captured=False)
    enable_fast_paths(model, paths, print)
    runner = model.last.runner
    tokens = torch.randint(0, 11, (2, 12), generator=torch.Generator().manual_seed(1))
    marks: list[str] = []

    def results() -> list[torch.Tensor]:
        """Loss and gradients."""
        model.zero_grad(set_to_none=False)
        loss = model(tokens).float().square().sum()
        marks.append("turn")
        loss.backward()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        return [loss.detach(), *gradients]

    found = []
    for every in (5, 2):
        with in_parts(model, every, lambda: marks.append("part")):
            found.append(results())
    assert marks == ["part", "turn", "part", *["part"] * 3, "turn", *["part"] * 3]
    assert model.last.runner is runner
    for every in (1, 3):
        enable_fast_paths(model, replace(paths, recompute_every=every), print)
        found.append(results())
    torch.testing.assert_close(found[1:], [found[0]] * 3, rtol=0, atol=0)
    enable_fast_paths(model, paths, print)
    modes: list[bool] = []
    enabled = torch.is_inference_mode_enabled
    with torch.no_grad(), in_parts(model, 1, lambda: modes.append(enabled())):
        model.hidden(tokens)
    assert modes == [fused] * 5


SCHEMES_FUSED = [
    ({"model__scheme": name, "model__activation": activation}, {"runtime.fused": False})
    for activation, name in product(("relu", "gelu"), SCHEMES.names())
]
SETTINGS: list[dict[str, Any]] = [
    {"runtime.banks": False},
    {"runtime.fused": False},
    {"runtime.recompute_every": 2},
    {"train.lr_factors": {"v": 0.999999, "cross_v": 0.999999}},  # matrices apart
]
DECODERS = [
    ({"model__family": family}, setting)
    for setting, family in product(SETTINGS, ("decoder", "encoder_decoder"))
]


@pytest.mark.parametrize(
    ("changes", "setting"), [*some(SCHEMES_FUSED, 40), *some(DECODERS, 8)], ids=str
)
def test_fused_sublayers_and_banks_train_as_plain_ones(
    changes: dict[str, Any], setting: dict[str, Any], tmp_path: Path
) -> None:
    runs = runs_with(config(**changes), tmp_path, {}, setting)
    fused = [run.meta["environment"]["fused"] for run in runs]
    assert fused == [True, setting.get("runtime.fused", True)]
    assert_same_losses(*runs, tolerance=1e-12 if "runtime.banks" in setting else 1e-4)


@pytest.mark.parametrize("every", some([2, 1, 5, 9], 4))
def test_recomputation_draws_the_same_random_numbers(every: int, tmp_path: Path) -> None:
    changes = {}, {"runtime.recompute_every": every}
    whole, again = runs_with(config(model__dropout=0.1), tmp_path, *changes)
    assert (whole.path / "steps.csv").read_bytes() == (again.path / "steps.csv").read_bytes()


def test_layers_are_computed_twice_where_memory_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = config(runtime__replay=True)
    whole = deepstack.train(given, out=tmp_path / "a")
    monkeypatch.setattr("deepstack.config.estimate.machine_memory", lambda: 0)
    again = deepstack.train(given, out=tmp_path / "b")
    assert (whole.path / "steps.csv").read_bytes() == (again.path / "steps.csv").read_bytes()
    assert whole.meta["flops"]["step"] == again.meta["flops"]["step"]
    assert whole.meta["flops"]["with_probe"] < again.meta["flops"]["with_probe"]


@pytest.mark.slow(turn=5)
def test_a_run_that_compiles_nothing_imports_no_compiler(tmp_path: Path) -> None:
    """They take seconds to import, a third of the start of a run of 1000 layers."""
    script = (
        "import sys, deepstack\n"
        "from deepstack.config import parse_config\n"
        "config = parse_config('{task: {name: copy, seq_len: 8}, model: {depth: 2, d_model: 8}, '\n"
        "    'train: {steps: 2, eval_batches: 1}}')\n"
        f"assert deepstack.train(config, out={str(tmp_path)!r}).state == 'done'\n"
        "assert not {'torch._dynamo', 'torch._inductor', 'triton'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


NOT_SLOW = [("deepnorm", "decoder")]
COMPILED = [
    (name, family)
    for name, scheme in SCHEMES.items()
    for family in scheme.families
    if scheme.uniform  # others' inputs grow
    and (family == "encoder" or name in ("deepnorm", "pre_ln", "fixup", "residual"))
]


@pytest.mark.parametrize(
    ("name", "family"),
    [w if w in NOT_SLOW else pytest.param(*w, marks=pytest.mark.slow) for w in COMPILED],
)
def test_one_graph_for_all_layers_of_a_kind_in_each_mode(
    name: str, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = []

    def count(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(graph)
        return graph.forward

    given = config(model__scheme=name, model__family=family, model__depth=12)
    model = build_model(given, vocab_size=11).model
    tokens = torch.arange(2 * (12 + model.source_len)).view(2, -1) % 11
    expected = model(tokens).detach()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=count))
    runner = compiled(print)
    for stack in model.stacks.values():
        stack.runner = runner
    for _ in range(2):
        with torch.no_grad():
            torch.testing.assert_close(model(tokens), expected, rtol=1e-5, atol=1e-5)
        model(tokens).mean().backward()
    kinds = PAPERS[name].kinds if family == "encoder" else len(model.stacks)
    assert len(graphs) == 2 * kinds, "with gradients and without"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:::torch")  # it warns of its own functions
@pytest.mark.parametrize("name", ["deepnorm", "hyper_connections"])
def test_equal_runs_of_a_process_compile_once(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    graphs: list[torch.fx.GraphModule] = []
    heard = Listens()

    def count(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=count))
    given = config(model__scheme=name, train__steps=3, runtime__compile=True, model__d_model=24)
    counts = []
    for seed in range(12):
        one = with_overrides(given, {"seed": seed})
        deepstack.train(one, out=tmp_path, observer=heard)
        counts.append(len(graphs))
    assert counts == [counts[0]] * 12 and counts[0] > 0
    assert sum("compiling" in line for line in heard.lines) == 1
    deepstack.train(with_overrides(given, {"model.d_ff": 40}), out=tmp_path, observer=heard)
    assert sum("compiling" in line for line in heard.lines) == 2


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch warns of its own functions
@pytest.mark.slow
def test_the_compiled_layer_trains_as_the_plain_one(tmp_path: Path) -> None:
    given = config(train__steps=6, model__scheme="deepnorm")
    plain, fast = runs_with(given, tmp_path, {"runtime.fused": False}, {"runtime.compile": True})
    assert fast.meta["environment"]["compiled"]
    assert_same_losses(plain, fast, tolerance=1e-4)


CPU = {"gpu": False, "parallel": None, "fusible": False}
GPU = CPU | {"gpu": True, "fusible": True}
DROPOUT, RECOMPUTE = {"model.dropout": 0.1}, {"runtime.recompute_every": 2}
UNLIKE, EAGER = {"model.scheme": "dlcl"}, {"runtime.compile": False}
CHANGING = {"model.scheme": "changing"}
REPLAY, COMPILE = {"runtime.replay": True}, {"runtime.compile": True}


@pytest.fixture
def changing() -> None:
    """Register a scheme that does not declare itself static."""

    class Changing(Scheme, name="changing", label="Changing", paper="none"):
        """x <- x + G(x)."""

        norms_per_sublayer = 0

        def residual(self, x: Any, G: Any) -> Any:
            return x + G(x)


@pytest.mark.parametrize(
    ("changes", "machine", "expected"),
    [
        ({}, CPU, FastPaths(True, False, False, True)),
        ({"train.steps": 49}, CPU, FastPaths(True, False, False, False)),
        ({"runtime.replay": False}, CPU, FastPaths(True, False, False, False)),
        ({"train.steps": 5, "runtime.replay": True}, CPU, FastPaths(True, False, False, True)),
        (DROPOUT, CPU, FastPaths(False, False, False, True)),
        (DROPOUT | RECOMPUTE, CPU, FastPaths(False, False, False, False)),
        (RECOMPUTE, CPU, FastPaths(True, False, False, True)),
        ({}, CPU | {"parallel": "data"}, FastPaths(True, False, False, False)),
        ({}, CPU | {"parallel": "fully_sharded"}, FastPaths(False, False, False)),
        ({"runtime.compile": True}, CPU, FastPaths(False, True, False)),
        ({"runtime.fused": False}, CPU, FastPaths(False, False, False, True)),
        ({}, GPU, FastPaths(True, False, True)),
        (EAGER, GPU | {"fusible": False}, FastPaths(False, False, True)),
        ({"runtime.fused": True}, GPU | {"fusible": False}, FastPaths(True, False, True)),
        ({"runtime.cuda_graph": False}, GPU, FastPaths(True, False, False)),
        ({}, GPU | {"parallel": "data"}, FastPaths(True, False, False)),
        ({}, GPU | {"parallel": "fully_sharded"}, FastPaths(False, False, False)),
        (UNLIKE, GPU, FastPaths(True, False, True)),
        (CHANGING, GPU, FastPaths(True, False, False)),
        (CHANGING, CPU, FastPaths(True, False, False, False)),
        (UNLIKE | {"runtime.fused": False}, GPU, FastPaths(False, False, True)),
        (EAGER | DROPOUT | RECOMPUTE, GPU, FastPaths(False, False, False)),
    ],
)
@pytest.mark.usefixtures("changing")
def test_auto_is_a_fixed_rule(
    changes: dict[str, Any],
    machine: dict[str, Any],
    expected: FastPaths,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rule, "has_triton", lambda: False)
    given = with_overrides(Config(), {"train.steps": 50} | changes)
    every = changes.get("runtime.recompute_every", 0)
    assert choose_fast_paths(given, **machine) == replace(expected, recompute_every=every)


@pytest.mark.parametrize(
    ("given", "needs"),
    [
        ({"runtime.fused": True, "model.dropout": 0.1}, "runtime.fused.*needs model.dropout=0"),
        ({"runtime.fused": True, "runtime.compile": True}, "needs runtime.compile=false"),
        ({"runtime.cuda_graph": True}, "runtime.cuda_graph.*one process with a GPU"),
        (REPLAY | COMPILE, "runtime.replay.*needs runtime.compile=false; or use auto"),
        (
            REPLAY | DROPOUT | RECOMPUTE,
            "runtime.replay.*needs runtime.recompute_every=0 with dropout",
        ),
        (COMPILE | UNLIKE, "needs a scheme whose layers are"),
        (REPLAY | CHANGING, "needs a scheme that declares static=True"),
    ],
)
@pytest.mark.usefixtures("changing")
def test_a_fast_path_without_its_requirements_is_refused(
    given: dict[str, Any], needs: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=needs):
        deepstack.train(with_overrides(config(), given), out=tmp_path)
    assert not list(tmp_path.rglob("status.json"))


def test_recomputed_dropout_is_not_captured_in_cuda_graphs() -> None:
    given = with_overrides(Config(), DROPOUT | RECOMPUTE | {"runtime.cuda_graph": True})
    with pytest.raises(ConfigError, match=r"cuda_graph.* needs runtime.recompute_every=0 with dr"):
        choose_fast_paths(given, **GPU)


@pytest.mark.parametrize(
    ("changes", "fusible"),
    [
        ({}, True),
        ({"model.scheme": "pre_ln"}, True),
        ({"model.scheme": "hyper_connections"}, False),
        ({"model.norm.kind": "rms"}, True),
        ({"model.norm.kind": "dynamic_tanh"}, False),
        ({"model.norm.gain": False}, False),
        ({"model.scheme": "parallel"}, True),
        ({"model.scheme": "parallel", "model.norm.kind": "rms"}, True),
        ({"model.n_heads": 1, "model.d_model": 256}, False),
        ({"model.family": "decoder"}, True),
        ({"model.family": "encoder_decoder"}, False),
        ({"train.lr_factors": {"q": 0.5}}, False),
        ({"model.positions": "rotary"}, False),
        ({"model.gated": True, "model.activation": "silu"}, False),
        ({"model.qk_norm": True}, True),
        ({"model.qk_norm": True, "model.norm.kind": "rms"}, True),
        ({"model.qk_norm": True, "model.norm.kind": "dynamic_tanh"}, False),
        ({"model.qk_norm": True, "model.positions": "rotary"}, False),
        ({"model.n_heads": 4, "model.n_kv_heads": 2}, False),
        ({"model.n_heads": 4, "model.n_kv_heads": 2, "train.lr_factors": {"k": 0.5}}, False),
        ({"model.attention_options": {"window": 4}}, False),
        ({"model.attention_options": {"soft_cap": 9.0}}, False),
    ],
    ids=str,
)
def test_layers_are_fully_fused_on_a_gpu_if_their_parts_have_kernels(
    changes: dict[str, Any], fusible: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heads, "kernels", lambda module: object())  # as with Triton
    assert is_fully_fused(two_layers(with_overrides(Config(), changes))) is fusible


@pytest.mark.parametrize(
    ("file", "changes", "compiles"),
    [
        ("decoder_96", {}, True),
        ("decoder_96", {"train.steps": 3}, False),
        ("decoder_small", {}, False),
        ("deepnorm_1000_gpu", {}, False),  # every part has a fused kernel
        ("deepnorm_1000_gpu", {"model.scheme": "hyper_connections"}, True),
        ("deepnorm_1000_gpu", {"model.scheme": "hyper_connections", "train.steps": 20}, False),
        ("deepnorm_1000", {}, False),
        ("encoder_decoder", {"model.d_model": 512, "train.steps": 30}, False),
        ("encoder_decoder", {"model.d_model": 512, "model.depth": 20, "train.steps": 9000}, True),
    ],
)
def test_layers_compile_where_that_saves_more_time_than_it_takes(
    file: str, changes: dict[str, Any], compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heads, "kernels", lambda module: object())
    monkeypatch.setattr(rule, "has_triton", lambda: True)
    given = load_config(ROOT / f"configs/{file}.yaml", [f"{k}={v}" for k, v in changes.items()])
    paths = fast_paths_of(given, torch.device("cuda"))
    assert (paths.compiled, paths.fused, paths.captured) == (compiles, not compiles, True)
