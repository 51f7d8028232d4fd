"""C++ kernels at the edges: large offsets, overflow, saturation, long sums, weights at rest."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.kernels import drawn, rerun
from helpers.kernels import kernels as kernels
from helpers.small_runs import small
from torch import Tensor

import deepstack
from deepstack.fast.native import Kernels

ATEN = torch.ops.aten
LONG = 2**22


def results_of(kernels: Kernels, function: Callable[..., Any], *inputs: Tensor) -> list[Tensor]:
    """Return the results of a function of which kernels compute every operation."""
    results, calls = rerun(function, list(inputs), kernels)
    assert calls == 0
    return results


@pytest.mark.parametrize("offset", [0.0, 1e4, 1e6, -1e6])
@pytest.mark.parametrize("dim", [0, 1])
def test_a_common_offset_of_logits_costs_no_digits(
    offset: float, dim: int, kernels: Kernels
) -> None:
    logits = drawn((257, 257))[0] + offset
    [result] = results_of(kernels, lambda x: x.log_softmax(dim), logits)
    exact = logits.double().log_softmax(dim)
    assert float((result - exact).abs().max()) < 1e-6


def test_the_gradient_of_offset_logits_is_right(kernels: Kernels) -> None:
    logits = drawn((4, 257))[0] + 1e6
    targets = torch.arange(4)

    dy = -F.one_hot(targets, 257).float()

    def gradient(x: Tensor, dy: Tensor) -> Tensor:
        return ATEN._log_softmax_backward_data(dy, x.log_softmax(1), 1, torch.float32)

    [result] = results_of(kernels, gradient, logits, dy)
    exact = logits.double().requires_grad_()
    F.cross_entropy(exact, targets, reduction="sum").backward()
    assert exact.grad is not None
    assert float((result - exact.grad).norm()) < 1e-6 * float(exact.grad.norm())


def test_gelu_is_never_positive_below_zero(kernels: Kernels) -> None:
    x = torch.cat([-torch.logspace(-3, 9, 4001), torch.tensor([-5.42, -5.5, -1e30])])
    ones = torch.ones_like(x)
    y, dx = results_of(kernels, lambda x, dy: (F.gelu(x), ATEN.gelu_backward(dy, x)), x, ones)
    assert float(y.max()) <= 0
    exact = x.double().requires_grad_()
    F.gelu(exact).sum().backward()
    assert exact.grad is not None
    torch.testing.assert_close(y.double(), F.gelu(exact.detach()), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(dx.double(), exact.grad, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bounds", [(2, -2), (-2, 2), (None, 1), (1, None), (float("inf"), 0)])
def test_clamp_takes_the_upper_bound_where_bounds_cross(bounds: Any, kernels: Kernels) -> None:
    x = torch.tensor([-5.0, -1.0, 0.0, 1.5, 5.0, float("inf"), -float("inf"), float("nan")])
    [result] = results_of(kernels, lambda x: x.clamp(*bounds), x)
    torch.testing.assert_close(result, x.clamp(*bounds), rtol=0, atol=0, equal_nan=True)


def test_clamp_with_a_bound_that_is_not_a_number_is_torchs(kernels: Kernels) -> None:
    x = drawn((9,))[0]
    [result], _ = rerun(lambda x: x.clamp(float("nan"), 1), [x], kernels)
    assert bool(result.isnan().all())


@pytest.mark.parametrize("scale", [1e20, 1e38])
@pytest.mark.parametrize("width", [3, 16, 64, 257, 1000])
def test_a_norm_whose_squares_overflow_is_not_a_number(
    width: int, scale: float, kernels: Kernels
) -> None:
    x = drawn((20, width))[0]
    x[::2] *= scale * 100

    def norm(x: Tensor) -> tuple[Tensor, ...]:
        y, mean, factor = ATEN.native_layer_norm(x, [width], None, None, 1e-5)
        mask = [True, False, False]
        dx = ATEN.native_layer_norm_backward(x, x, [width], mean, factor, None, None, mask)[0]
        return y, dx

    y, dx = results_of(kernels, norm, x)
    assert bool(y[::2].isnan().all()) and bool(dx[::2].isnan().all())
    exact = F.layer_norm(x[1::2].double(), [width])
    assert float((y[1::2] - exact).norm()) < 1e-6 * float(exact.norm())


def test_elu_keeps_its_digits_near_zero(kernels: Kernels) -> None:
    x = torch.cat([-torch.logspace(-20, 2, 2001), torch.logspace(-20, 2, 201)])
    for function in (F.elu, F.selu):
        [result] = results_of(kernels, function, x)
        torch.testing.assert_close(result.double(), function(x.double()), rtol=5e-7, atol=0)


SUMS: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
    "a row": (lambda x: x.sum(), torch.full((LONG,), 0.1)),
    "a mean": (lambda x: x.mean(), torch.full((LONG,), 0.1)),
    "a norm": (lambda x: x.norm(), torch.full((LONG,), 0.1)),
    "columns": (lambda x: x.sum(0), torch.full((LONG // 8, 8), 0.1)),
    "norms of columns": (lambda x: x.norm(dim=0), torch.full((LONG // 8, 8), 0.1)),
    "a column": (lambda x: x.sum(0), torch.full((LONG // 4, 9), 0.1)[:, :1]),
    "every second number": (lambda x: x.sum(), torch.full((2048, 2048), 0.1)[:, ::2]),
    "short rows": (lambda x: x.sum((0, 2)), torch.full((LONG // 4, 3, 2), 0.1)),
    "a softmax": (lambda x: x.softmax(0), torch.zeros(LONG)),
    "columns of a softmax": (lambda x: x.softmax(0), torch.zeros(LONG // 4, 3)),
}


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_of_millions_of_numbers_is_exact_to_rounding(name: str, kernels: Kernels) -> None:
    function, x = SUMS[name]
    [result] = results_of(kernels, function, x)
    exact = function(x.double())
    assert float(((result - exact) / exact).abs().max()) < 3e-6


def test_gradients_of_gain_and_bias_over_many_tokens_are_exact_to_rounding(
    kernels: Kernels,
) -> None:
    tokens, width = LONG // 16, 8
    dy = torch.full((tokens, width), 0.1)
    x = torch.linspace(-1, 1, width).expand(tokens, width).contiguous()

    def gradients(dy: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        _, mean, rstd = ATEN.native_layer_norm(x, [width], None, None, 1e-5)
        gain = torch.ones(width, dtype=x.dtype)
        mask = [False, True, True]
        return ATEN.native_layer_norm_backward(dy, x, [width], mean, rstd, gain, gain, mask)[1:]

    results = results_of(kernels, gradients, dy, x)
    for one, exact in zip(results, gradients(dy.double(), x.double()), strict=True):
        assert float((one - exact).norm()) < 3e-6 * float(exact.norm())


@pytest.mark.parametrize("scheme", ["pre_ln", "deepnorm"])
def test_weights_that_do_not_move_give_a_model_update_of_zero(
    scheme: str, tmp_path: Path, kernels: Kernels
) -> None:
    config = small(
        model__scheme=scheme, model__depth=12, train__trainable=["head"], train__lr=1e-30,
        train__steps=3, runtime__replay="native",
    )  # fmt: skip
    run = deepstack.train(config, out=tmp_path)
    assert run.meta["environment"]["executor"] == f"C++, {kernels.description}"
    updates = run.steps[["model_update", "model_update_step", "model_update_rel"]]
    assert updates.to_numpy().max() == 0.0
