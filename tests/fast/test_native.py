"""C++ kernels replay a step: its numbers to rounding, and equal bytes after a resume."""

import os
import platform
import signal
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import ROOT
from helpers.configs import config_with
from helpers.kernels import drawn, rerun
from helpers.kernels import kernels as kernels
from helpers.sampling import some
from helpers.small_runs import data_of, weights_of
from helpers.turns import by_turns
from torch import Tensor

import deepstack
from deepstack.base.errors import Interrupted
from deepstack.config import Config, with_overrides
from deepstack.fast.native import Kernels, cache, compiler
from deepstack.schemes import SCHEMES
from deepstack.training.timing import temporary_run

config = partial(config_with, {
    "model.depth": 8, "model.d_model": 24, "model.n_heads": 3, "task.name": "markov",
    "task.seq_len": 12, "train.batch_size": 4, "train.steps": 8, "train.eval_every": 5,
    "train.eval_batches": 1, "train.clip": 0.1, "log.layers_every": 4,
    "runtime.device": "cpu", "runtime.threads": 1,
})  # fmt: skip


def first_step(given: Config, replay: Any) -> tuple[list[float], dict[str, Tensor], list[Any]]:
    """Return the measurements, gradients and functions of the first step."""
    with temporary_run(with_overrides(given, {"runtime.replay": replay})) as run:
        run.begin()
        # a step of SGD moves F by as much as its gradient: 1e-4 of it is near the rounding of F
        rate = 1.0 if given.train.optimizer == "sgd" else 1e-4
        measured = run.step(*run.batch(1), rate)
        values = [measured.loss, measured.grad_norm, *measured.probe.values()]
        gradients = {bank.key: bank.gradients().clone() for bank in run.state.built.banks}
        bound = getattr(run.step.update, "bound", [])
        functions = [function for part in bound for function, _, _ in part.operations]
        return [float(value) for value in values], gradients, functions


def assert_equal_to_rounding(given: Config, kernels: Kernels) -> list[Any]:
    """Compare a step by kernels with the eager step, and return the functions it calls."""
    eager, expected, _ = first_step(given, False)
    native, gradients, functions = first_step(given, "native")
    assert kernels.run in functions
    assert native[0] == pytest.approx(eager[0], rel=1e-6)
    assert native == pytest.approx(eager, rel=2e-5, abs=2e-8)
    largest = max(float(gradient.norm()) for gradient in expected.values())
    for key, gradient in expected.items():
        error = float((gradients[key] - gradient).norm())
        # some gradients, such as a key's bias's, are zero but for the rounding of a sum
        assert error <= 5e-5 * max(float(gradient.norm()), 1e-2 * largest), key
    return functions


@pytest.mark.parametrize("name", some(SCHEMES.names(), 12, SCHEMES.names().index("mhc") % 12))
def test_every_scheme_by_kernels_equals_the_eager_step_to_rounding(
    name: str, kernels: Kernels
) -> None:
    functions = assert_equal_to_rounding(config(model__scheme=name), kernels)
    assert len(functions) < 60, "operations of layers run by torch"


KINDS: list[dict[str, Any]] = [
    {"model__n_kv_heads": 1, "model__positions": "rotary", "model__family": "decoder"},
    {"model__attention_options": {"window": 4, "soft_cap": 5.0}},
    {"train__optimizer": "sgd", "train__momentum": 0.9},
    {"train__optimizer": "muon", "train__weight_decay": 0.1},
    {"runtime__fused": False},
    {"runtime__banks": False},
    {"train__shards": 2},
    {"runtime__recompute_every": 2},
    {"model__norm__kind": "rms", "model__positions": "rotary", "model__qk_norm": True},
    {"model__norm__kind": "batch"},
    {"model__norm__kind": "dynamic_tanh", "model__activation": "gelu"},
    {"model__gated": True, "model__activation": "silu"},
    {"model__activation": "selu", "model__family": "decoder"},
    {"model__family": "encoder_decoder", "task__name": "copy"},
    # small: nearly equal singular values make the vector of the penalty sensitive to rounding
    {"train__spectral_penalty": 0.01, "train__label_smoothing": 0.2},
    {"train__z_loss": 0.1},
    {"model__d_model": 72, "model__d_ff": 264, "train__batch_size": 16},
]


@pytest.mark.parametrize("kind", some(KINDS, 6), ids=lambda kind: "-".join(map(str, kind.values())))
def test_every_kind_of_step_by_kernels_equals_the_eager_step(
    kind: dict[str, Any], kernels: Kernels
) -> None:
    assert_equal_to_rounding(config(**({"model__depth": 4} | kind)), kernels)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_resumed_run_by_kernels_has_the_same_bytes(
    dropout: float, tmp_path: Path, kernels: Kernels
) -> None:
    # A record at every step, so that records are replayed too.
    more = {"model__depth": 3, "log__layers_every": 1}
    given = config(model__dropout=dropout, runtime__replay="native", **more)
    whole = deepstack.train(given, out=tmp_path / "whole")
    stops: list[int | None] = [None] * 4 + [signal.SIGINT]
    with suppress(Interrupted):
        deepstack.train(given, out=tmp_path / "resumed", stop=partial(stops.pop, 0))
    resumed = deepstack.train(given, out=tmp_path / "resumed")
    assert resumed.meta["resumed"]
    assert data_of(resumed) == data_of(whole)
    torch.testing.assert_close(weights_of(resumed), weights_of(whole), rtol=0, atol=0)
    assert whole.meta["environment"]["executor"] == f"C++, {kernels.description}"


ATEN = torch.ops.aten
NORM = [(6, 7, 40), (6, 7, 40), (6, 7, 1), (6, 7, 1), (40,), (40,)]
QKV = [(2, 3, 10, 8)] * 3
OPERATIONS: dict[str, tuple[Any, list[tuple[int, ...]]]] = {
    "broadcast": (lambda x, y, z: (x + 2 * y) * z / 3 - x, [(5, 1, 33), (4, 1), (33,)]),
    "exp": (lambda x: torch.exp(10 * x), [(999,)]),
    "activations": (
        lambda x: (F.relu(x), F.gelu(x), F.silu(x), torch.tanh(x), torch.sigmoid(x), F.elu(x)),
        [(1001,)],
    ),
    "gradients": (
        lambda x, dy: (
            ATEN.gelu_backward(dy, x), ATEN.silu_backward(dy, x), ATEN.tanh_backward(dy, x),
            ATEN.sigmoid_backward(dy, x), ATEN.threshold_backward(dy, x, 0),
        ),
        [(7, 33), (7, 33)],
    ),
    "powers": (lambda x: (x.abs().sqrt(), (x * x + 1).rsqrt(), x**2, x.clamp(-1, 0.5)), [(77,)]),
    "sums": (
        lambda x: (x.sum(0), x.sum(1), x.sum((0, 2)), x.sum(), x.mean(-1), x.mean()),
        [(300, 5, 21)],
    ),
    "long sums": (
        lambda x: (x.abs().sum(0), x.abs().sum(), x.norm(dim=0), x.abs().t().contiguous().sum(1)),
        [(9000, 5)],
    ),
    "norms": (lambda x: (x.norm(dim=-1), x.norm(dim=(0, 1)), x.norm()), [(9, 8, 70)]),
    "copies": (
        lambda x, y: (torch.cat([x, y], 1), torch.stack([x[:, :3], y[:, 1:4]], 2), x.t().clone()),
        [(6, 5), (6, 4)],
    ),
    "products": (
        lambda a, b, c: (a @ b, b.t() @ a.t(), torch.addmm(c, a, b, alpha=0.5), a @ b[:, 0]),
        [(19, 300), (300, 37), (37,)],
    ),
    "batches": (lambda a, b: (a @ b, torch.baddbmm(a @ b, a, b)), [(3, 5, 4), (3, 4, 6)]),
    "softmax": (
        lambda x: (x.softmax(-1), x.log_softmax(-1), x.softmax(1), x.log_softmax(0)),
        [(5, 6, 35)],
    ),
    "layer norm": (
        lambda x, g, b: ATEN.native_layer_norm(x, [40], g, b, 1e-5), [(6, 7, 40), (40,), (40,)],
    ),
    "gradient of layer norm": (
        lambda dy, x, m, r, g, b: ATEN.native_layer_norm_backward(
            dy, x, [40], m, r, g, b, [True, True, True]
        ),
        NORM,
    ),
    "attention": (ATEN._scaled_dot_product_flash_attention_for_cpu, QKV),
    "causal attention": (
        lambda *qkv: ATEN._scaled_dot_product_flash_attention_for_cpu(*qkv, 0.0, True), QKV,
    ),
    "gradient of attention": (
        lambda dy, *qkv: ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
            dy, *qkv, *ATEN._scaled_dot_product_flash_attention_for_cpu(*qkv, 0.0, True), 0.0, True
        ),
        [QKV[0], *QKV],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("strided", [False, True])
def test_a_kernel_gives_the_numbers_of_its_operation(
    name: str, strided: bool, kernels: Kernels
) -> None:
    assert_numbers_of(name, strided, kernels)


@pytest.fixture(scope="module", params=["-mno-avx512f", "-mno-avx"])
def narrow_kernels(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Kernels:
    """Kernels for vectors of 256 or 128 bits, as processors without the extension have them."""
    if platform.machine() != "x86_64":
        pytest.skip("no x86 processor")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "FLAGS", (*compiler.FLAGS, request.param))
        found = cache.load_or_compile(tmp_path_factory.mktemp("narrow"), print)
    bits = {"-mno-avx512f": "256 bits", "-mno-avx": "128 bits"}[request.param]
    if bits not in found.description:
        pytest.skip("this processor has no such vectors")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATIONS)
def test_kernels_of_narrow_vectors_give_the_same_numbers(
    name: str, narrow_kernels: Kernels
) -> None:
    assert_numbers_of(name, False, narrow_kernels)


def assert_numbers_of(name: str, strided: bool, kernels: Kernels) -> None:
    """The kernels give an operation's numbers to rounding, and the same bytes by three threads."""
    function, shapes = OPERATIONS[name]
    inputs = drawn(*shapes)
    if strided:  # every second row of a larger tensor, or rows far apart
        inputs = [x.repeat_interleave(2, 0)[::2] if x.shape[-1] > 1 < x.ndim else x for x in inputs]
    results, calls = rerun(function, inputs, kernels)
    assert strided or calls == 0
    expected = (
        function(*(x.double() for x in inputs)) if "attention" not in name else function(*inputs)
    )
    expected = expected if isinstance(expected, (tuple, list)) else [expected]
    for result, value in zip(results, expected, strict=True):
        assert result.shape == value.shape
        assert float((result - value).norm()) <= 1e-6 * float(value.norm())
    divided, _ = rerun(function, inputs, by_turns(kernels, seed=0), threads=3)
    torch.testing.assert_close(divided, results, rtol=0, atol=0)


def test_special_values_pass_through_kernels_as_through_torch(kernels: Kernels) -> None:
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -200.0, 200.0, 88.7, -100.0])
    results, calls = rerun(
        lambda x: (x.exp(), F.relu(x), x.sigmoid(), x.tanh(), x.softmax(0)), [x], kernels
    )
    assert calls == 0
    for result, value in zip(
        results, (x.exp(), F.relu(x), x.sigmoid(), x.tanh(), x.softmax(0)), strict=True
    ):
        torch.testing.assert_close(result, value, rtol=1e-6, atol=1e-38, equal_nan=True)


def test_torch_runs_what_no_kernel_computes(kernels: Kernels) -> None:
    x, y = drawn((6, 5), (6, 5))
    results, calls = rerun(lambda x, y: (x * y).cumsum(0).sort().values + x, [x, y], kernels)
    assert calls == 2
    torch.testing.assert_close(results, [(x * y).cumsum(0).sort().values + x])


def test_an_evaluation_by_kernels_equals_the_eager_one_to_rounding(kernels: Kernels) -> None:
    rows = []
    for replay in (False, "native"):
        given = config(train__eval_batches=70, runtime__replay=replay)  # the last batch is smaller
        with temporary_run(given) as run:
            assert len({batch.inputs.shape for batch in run.evaluation.batches}) == 2
            rows += [run.evaluation.measure(run.state.built.model, run.forward) for _ in range(2)]
            bound = getattr(run.forward, "bound", None)
    assert bound is not None
    assert rows[2] == rows[3], "the recorded evaluation and a later one differ"
    assert rows[2]["loss"] == pytest.approx(rows[0]["loss"], rel=1e-6)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="preloads the checks of addresses")
def test_kernels_read_and_write_within_their_operands(tmp_path: Path) -> None:
    """Run the tests of single kernels with checks of addresses and of undefined behaviour."""
    program = compiler.find_compilers()[0].words[0]
    libraries = [
        subprocess.check_output([program, f"-print-file-name={name}"], text=True).strip()
        for name in ("libasan.so", "libstdc++.so.6")
    ]
    if not all(map(os.path.isabs, libraries)):
        pytest.skip("the compiler has no checks of addresses")
    script = (
        "import sys, pytest\n"
        "from deepstack.fast.native import compiler\n"
        "compiler.FLAGS += ('-O1', '-g', '-fsanitize=address,undefined')\n"
        "compiler.FLAGS += ('-fno-sanitize-recover=all',)\n"
        "compiler.PATIENCE = 3000  # seconds: with checks it takes minutes on a busy machine\n"
        "names = 'kernel_gives or special_values or exact or offset or overflow or clamp'\n"
        "files = ['tests/fast/test_native.py', 'tests/fast/test_native_numbers.py']\n"
        "sys.exit(pytest.main(['-qs', '-n', '0', '-p', 'no:cacheprovider', '-k', names, *files]))\n"
    )
    checked = {
        "LD_PRELOAD": " ".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0:verify_asan_link_order=0",
    }
    environment = os.environ | checked | {"XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-c", script]
    answer = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stdout[-3000:] + answer.stderr[-3000:]
    assert "passed" in answer.stdout and "skipped" not in answer.stdout
