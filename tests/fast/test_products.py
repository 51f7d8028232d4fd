"""Products by MKL and by oneDNN: exact in fp32, chosen by size, equal when replayed."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from helpers.kernels import NEEDS_ONEDNN, error_of
from helpers.small_runs import interrupted, small

import deepstack
from deepstack.base.errors import ConfigError
from deepstack.fast import fast_paths_of, products
from deepstack.fast.fused_sublayers import Product
from deepstack.fast.products import (
    FP32_ERROR,
    LARGE_PRODUCT,
    ProductFunctions,
    choose_library,
    linear_addmm,
    linear_addmm_,
)
from deepstack.training.environment import fingerprint

CPU = torch.device("cpu")
# 128 tokens: every product of the feed-forward is large, and the product with W_o is small
LARGE = {"model__d_model": 64, "train__batch_size": 8, "model__depth": 2, "train__steps": 8}


def run(out: Path, **changes: Any) -> Any:
    return deepstack.train(small(**LARGE, **changes), out=out)


@NEEDS_ONEDNN
@pytest.mark.parametrize("tokens", [LARGE_PRODUCT // (64 * 256), 1024])
def test_large_products_and_their_gradients_are_exact_in_fp32(tokens: int) -> None:
    x, dy = torch.randn(tokens, 64), torch.randn(tokens, 256)
    weight = torch.nn.Parameter(torch.randn(256, 64))
    bias = torch.nn.Parameter(torch.randn(256))
    weight.grad, bias.grad = torch.zeros_like(weight), torch.zeros_like(bias)
    product = Product(weight, bias, library="onednn")
    saved: list[torch.Tensor] = []
    y = product.forward(x, 1, saved)
    dx = product.backward(dy, 1, saved)
    a, b, w, g = (t.detach().double() for t in (x, bias, weight, dy))
    for result, wanted in ((y, a @ w.t() + b), (dx, g @ w), (weight.grad, g.t() @ a)):
        assert error_of(result.detach(), wanted) < FP32_ERROR


@NEEDS_ONEDNN
@pytest.mark.parametrize("alpha", [1.0, 0.5])
def test_products_for_threads_scale_the_product_alone(alpha: float) -> None:
    a, b, bias, total = torch.randn(96, 32), torch.randn(32, 8), torch.randn(8), torch.randn(96, 8)
    product = alpha * (a.double() @ b.double())
    assert error_of(linear_addmm(bias, a, b, alpha), bias.double() + product) < FP32_ERROR
    added = linear_addmm_(total.clone(), a, b, alpha)
    assert error_of(added, total.double() + product) < FP32_ERROR


@NEEDS_ONEDNN
def test_a_library_takes_effect_and_leaves_no_setting_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = ProductFunctions(*(Mock(wraps=function) for function in products.ONEDNN))
    monkeypatch.setitem(products.BY_LIBRARY, "onednn", counted)
    other = run(tmp_path / "mkl", runtime__products="mkl", runtime__replay=False)
    assert not any(function.called for function in counted)
    one = run(tmp_path / "onednn", runtime__products="onednn", runtime__replay=False)
    assert counted.addmm.called and counted.mm.called and counted.addmm_.called
    torch.testing.assert_close(
        one.steps["loss"].iloc[-1], other.steps["loss"].iloc[-1], rtol=1e-4, atol=0
    )
    assert one.meta["environment"]["products"] == "onednn"
    assert "products" not in other.meta["environment"]
    with pytest.raises(RuntimeError):
        products.ONEDNN.mm(torch.ones(2, 3), torch.ones(2, 3))
    assert not products.uses_onednn()


@NEEDS_ONEDNN
def test_a_resume_with_another_library_is_refused(tmp_path: Path) -> None:
    config = small(**LARGE, runtime__products="mkl")
    interrupted(config, tmp_path, 4)
    with pytest.raises(ConfigError, match="products was None, is 'onednn'"):
        run(tmp_path, runtime__products="onednn")


@pytest.mark.parametrize("is_amd", [True, False])
@pytest.mark.parametrize("is_fp32", [True, False])
def test_auto_is_a_rule_of_processor_and_size(
    is_amd: bool, is_fp32: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "is_amd_with_avx512", lambda: is_amd)
    monkeypatch.setattr(products, "onednn_is_fp32", lambda: is_fp32)
    assert choose_library("auto", LARGE_PRODUCT) == ("onednn" if is_amd and is_fp32 else "mkl")
    assert choose_library("auto", LARGE_PRODUCT - 1) == "mkl"


def test_onednn_is_refused_where_it_rounds_or_has_no_effect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ConfigError, match="needs fused sublayers on a CPU"):
        fast_paths_of(small(runtime__products="onednn", runtime__fused=False), CPU)
    monkeypatch.setattr(products, "onednn_is_fp32", lambda: False)
    with pytest.raises(ConfigError, match="does not multiply in full fp32"):
        choose_library("onednn", LARGE_PRODUCT)


def test_onednn_multiplies_bf16_only_on_a_processor_with_bf16(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, has_it in {
        "is_amd_with_avx512": 1,
        "onednn_is_fp32": 1,
        "onednn_has_bf16": 0,
    }.items():
        monkeypatch.setattr(products, name, lambda has_it=has_it: bool(has_it))
    in_bf16 = small(runtime__products="onednn", train__shards=2, train__precision="bf16")
    with pytest.raises(ConfigError, match="no bf16 products for shards on this processor; use"):
        fast_paths_of(in_bf16, CPU)
    assert choose_library("auto", LARGE_PRODUCT, threads=True, bf16=True) == "mkl"
    assert choose_library("auto", LARGE_PRODUCT, threads=True) == "onednn_linear"
    assert choose_library("onednn", LARGE_PRODUCT, bf16=True) == "onednn"


@pytest.mark.slow
@NEEDS_ONEDNN
def test_other_kernels_of_onednn_have_another_fingerprint() -> None:
    code = (
        "import torch; from deepstack.training.environment import fingerprint; "
        "print(fingerprint(torch.device('cpu'), bf16=False))"
    )
    # The oldest kernels of oneDNN: the processor takes newer ones by itself.
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": "SSE41"}
    other = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
    assert other.strip() != fingerprint(CPU, bf16=False), "a resume under these kernels is refused"
