"""Training on a GPU; skipped without one."""

from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.configs import config_with, runs_with
from helpers.listeners import Listens
from helpers.small_runs import data_of, interrupted
from torch import nn

import deepstack
from deepstack.base.errors import ResourceError
from deepstack.config import with_overrides
from deepstack.fast import PassRecorder
from deepstack.fast.gpu.products import DeviceProduct
from deepstack.records import Run
from deepstack.schemes import SCHEMES
from deepstack.schemes.post_norm import PostLN
from deepstack.training import temporary_run

# torch warns of its settings and functions while it compiles
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:::torch")]

config = partial(config_with, {
    "model.depth": 6, "model.d_model": 32, "task.seq_len": 32, "train.batch_size": 8,
    "train.steps": 24, "train.eval_every": 8, "runtime.device": "cuda",
})  # fmt: skip


def log_of(run: Run) -> bytes:
    return (run.path / "steps.csv").read_bytes()


SAME: list[tuple[dict[str, Any], dict[str, Any]]] = [
    *(
        ({"model__scheme": name, "train__precision": precision}, {})
        for name in ("deepnorm", "post_ln", "pre_ln")
        for precision in ("fp32", "bf16")
    ),
    *(
        ({"train__optimizer": name, "train__weight_decay": 0.1}, {"runtime.banks": False})
        for name in ("adamw", "adam", "muon")
    ),
    (
        {"train__optimizer": "sgd", "train__weight_decay": 0.1, "train__momentum": 0.9},
        {"runtime.banks": False},
    ),
]


@pytest.mark.parametrize(("changes", "other"), SAME, ids=str)
def test_a_config_twice_or_without_banks_gives_the_same_bytes(
    changes: dict[str, Any], other: dict[str, Any], tmp_path: Path
) -> None:
    one, two = runs_with(config(**changes), tmp_path, {}, other)
    assert one.state == two.state == "done"
    assert log_of(one) == log_of(two)


@pytest.mark.parametrize("at", [3, 11, 19])
def test_interrupted_and_continued_is_uninterrupted(at: int, tmp_path: Path) -> None:
    given = config(model__dropout=0.1)
    whole = deepstack.train(given, out=tmp_path / "a")
    interrupted(given, tmp_path / "b", at)
    assert log_of(deepstack.train(given, out=tmp_path / "b")) == log_of(whole)


def test_divergence_is_found_though_rows_are_read_late(tmp_path: Path) -> None:
    run = deepstack.train(
        config(train__lr=1e5, train__optimizer="sgd", train__clip=None), out=tmp_path
    )
    assert run.state == "diverged"
    assert run.status["step"] == run.steps["step"].iloc[-1] < 24


BOTH: dict[str, Any] = {"model__family": "encoder_decoder"}
GROUPED: dict[str, Any] = {"model__n_heads": 4, "model__n_kv_heads": 2}
MODERN = GROUPED | {
    "model__family": "decoder", "model__scheme": "pre_ln", "model__positions": "rotary",
    "model__qk_norm": True, "model__norm__kind": "rms", "model__norm__bias": False,
    "model__bias": False, "model__activation": "silu", "model__gated": True,
}  # fmt: skip
EAGER = {"runtime.compile": False, "runtime.cuda_graph": False}
PLAIN = EAGER | {"runtime.fused": False}
FUSED = EAGER | {"runtime.fused": True}
CAPTURED = {"runtime.cuda_graph": True}


def apart(one: Run, two: Run) -> float:
    columns = ["loss", "grad_norm", "model_update"]
    return float((one.steps[columns] / two.steps[columns] - 1).abs().max().max())


@pytest.mark.parametrize(
    "changes",
    [
        *({"model__scheme": name} for name in SCHEMES.names()),
        {"model__d_model": 192, "task__seq_len": 100},  # a library's kernels
        {"model__d_model": 192, "task__seq_len": 100, "train__batch_size": 64},  # nothing later
        {"runtime__recompute_every": 2},
        {"runtime__banks": False},
        {"model__init__distribution": "ntk"},
        {"model__family": "decoder"},
        BOTH,
        {"model__activation": "gelu"},
        {"model__activation": "relu2"},
        {"model__activation": "silu", "model__gated": True},
        {"model__gated": True, "train__precision": "bf16", "model__d_model": 192},
        {"model__positions": "rotary", "model__qk_norm": True},
        {"train__optimizer": "muon", "train__weight_decay": 0.1},
        {"model__norm__gain": False},
        {"model__norm__kind": "batch"},
        {"model__norm__kind": "rms"},
        {"model__norm__kind": "rms", "model__d_model": 192, "train__precision": "bf16"},
        {"model__qk_norm": True},
        {"model__qk_norm": True, "model__norm__kind": "rms", "model__family": "decoder"},
        {"model__qk_norm": True, "model__d_model": 192, "train__precision": "bf16"},
        {"model__positions": "rotary", "model__d_model": 192, "train__precision": "bf16"},
        GROUPED,
        GROUPED | {"model__d_model": 192, "task__seq_len": 100},
        MODERN,
        MODERN | {"model__d_model": 192, "task__seq_len": 100, "train__precision": "bf16"},
        {"model__bias": False},
        BOTH | {"model__decoder_attention": "merged", "model__scheme": "post_ln"},
        {"train__spectral_penalty": 0.1},
        {"train__trainable": ["w1", "norm_bias"]},
        {"train__precision": "bf16"},
        {"train__precision": "bf16", "model__d_model": 192, "train__batch_size": 64},
    ],
    ids=str,
)
def test_fused_sublayers_train_as_plain_ones_also_if_captured(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    given = config(train__clip=0.3, train__steps=8, **changes)
    one, two, captured = runs_with(given, tmp_path, PLAIN, FUSED, FUSED | CAPTURED)
    assert two.meta["environment"]["fused"]
    assert log_of(captured) == log_of(two)
    assert apart(one, two) < (0.05 if "train__precision" in changes else 1e-3)


@pytest.mark.parametrize("name", SCHEMES.names())
def test_a_captured_step_is_the_eager_one_bit_for_bit(name: str, tmp_path: Path) -> None:
    given = config(model__scheme=name, train__clip=0.3)
    one, two = runs_with(given, tmp_path, EAGER, EAGER | CAPTURED)
    assert data_of(two) == data_of(one) and len(data_of(one)) > 20


@pytest.mark.parametrize(
    "changes",
    [
        *({"model__scheme": name} for name in SCHEMES.names()),
        {"runtime__fused": True},
        BOTH | {"runtime__fused": True},
        {"runtime__recompute_every": 2},
        {"model__dropout": 0.1},
        {"train__trainable": ["w1", "w2"]},
    ],
    ids=str,
)
def test_a_step_too_large_for_one_graph_is_captured_in_parts(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def capture_end(graph: torch.cuda.CUDAGraph) -> None:
        end(graph)
        ends.append(graph)
        if len(ends) == 1:  # with all layers in it
            raise torch.OutOfMemoryError("out of memory")

    ends: list[torch.cuda.CUDAGraph] = []
    end = torch.cuda.CUDAGraph.capture_end
    # evaluations run eagerly, so that the first graph is the step's
    monkeypatch.setattr(PassRecorder, "capture", lambda self, function, warm_up=None: function)
    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_end", capture_end)
    monkeypatch.setattr(import_module("deepstack.fast.capture"), "LAYERS", 2)
    given = config(train__clip=0.3, model__depth=5, log__layers_every=0, **changes)
    eager = EAGER | {"runtime.fused": given.runtime.fused}
    one = deepstack.train(with_overrides(given, eager), out=tmp_path / "a")
    assert not ends
    captured = with_overrides(given, eager | CAPTURED)
    assert log_of(deepstack.train(captured, out=tmp_path / "b")) == log_of(one)
    # one that failed; before the layers, three parts there and three back; the update; before the
    # layers of the probe and their three parts
    assert len(ends) >= 1 + 7 + 1 + 4 - ("train__trainable" in changes)  # x_0 needs no gradient


@pytest.mark.parametrize("name", ["deepnorm", "keel", "mix_ln", "branch_norm", "sub_ln"])
@pytest.mark.parametrize("captured", [False, True])
def test_a_compiled_layer_trains_as_the_eager_one(
    name: str, captured: bool, tmp_path: Path
) -> None:
    given = config(model__scheme=name, train__clip=0.3)
    way = {"runtime.compile": True, "runtime.cuda_graph": captured}
    one, two = runs_with(given, tmp_path, PLAIN, way)
    assert apart(one, two) < 1e-3


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_step_that_cannot_be_captured_is_launched_kernel_by_kernel(
    dropout: float, tmp_path: Path
) -> None:
    class Waits(PostLN, name="waits", label="Waits", paper="none", static=True):
        """x <- LN(x + G(x)), and the host reads x."""

        def residual(self, x: Any, G: Any, norm: Any) -> Any:
            x.sum().item()
            return super().residual(x, G, norm)

    eager = config(model__scheme="waits", model__dropout=dropout, runtime__compile=False)
    one, auto = runs_with(eager, tmp_path, EAGER, {"runtime.cuda_graph": "auto"})
    assert log_of(auto) == log_of(one)
    with pytest.raises(ResourceError, match="cuda_graph=false"):
        runs_with(eager, tmp_path / "c", CAPTURED)


def test_a_run_leaves_no_memory_behind(tmp_path: Path) -> None:
    runs_with(config(), tmp_path / "warm", {})
    before = torch.cuda.memory_allocated()
    runs_with(config(), tmp_path, {}, {})
    assert torch.cuda.memory_allocated() <= before


def test_a_captured_step_never_waits_for_the_device() -> None:
    given = config(runtime__compile=False, runtime__cuda_graph=True, log__layers_every=0)
    with temporary_run(given) as run:
        try:
            for mode in ("default", "error"):
                torch.cuda.set_sync_debug_mode(mode)
                for _ in range(5):
                    run.step(*run.batch(1), run.learning_rate(1))
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_a_relu_in_a_librarys_product_keeps_nan() -> None:
    weight, bias = torch.ones(256, 128, device="cuda"), torch.ones(256, device="cuda")
    weight[3, 5] = float("nan")
    product = DeviceProduct(nn.Parameter(weight), nn.Parameter(bias), relu=True)
    assert not product.small_kernels(512)
    with torch.autocast("cuda", torch.bfloat16):
        y = product.forward(torch.ones(512, 128, device="cuda"), 512, [])
    assert y.dtype is torch.bfloat16
    assert bool(y[:, 3].isnan().all()) and bool((y[:, :3] == 129).all())


@pytest.mark.parametrize("width", [32, 512])
def test_work_that_takes_long_is_announced(width: int, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    heard = Listens()
    given = config(runtime__fused=True, train__steps=2, model__d_model=width)
    deepstack.train(given, out=tmp_path, observer=heard)
    assert any("Triton" in line for line in heard.lines)
