"""The results of the kernels for small layers, on a GPU or by Triton's interpreter."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.kernels import close, dtype_of

KERNELS = "small_kernels"


@pytest.mark.parametrize("precision", ["float32", "half"])
@pytest.mark.parametrize("shape", [(64, 64, 96), (33, 48, 80), (16, 20, 24), (7, 136, 40)])
def test_products(shape: tuple[int, int, int], precision: str, device: str, kernels: Any) -> None:
    rows, depth, columns = shape
    kind = dtype_of(precision, device)
    x = torch.randn(rows, depth, device=device).to(kind)
    weight = torch.randn(columns, depth, device=device)
    bias, gate = torch.randn(columns, device=device), torch.randn(rows, columns, device=device)
    turned = weight.t().contiguous()
    right = F.linear(x.float(), weight.to(kind).float())
    assert close(kernels.product(x, weight), right)
    assert close(kernels.product(x, turned, straight=True), right)
    assert close(kernels.product(x, weight, bias), right + bias)
    assert close(kernels.product(x, weight, bias, relu=True), torch.relu(right + bias))
    gated = kernels.product(x, turned, straight=True, gate=gate.to(kind))
    assert close(gated, torch.where(gate > 0, right, 0.0))


def test_strided_tensors_give_the_same_result(device: str, kernels: Any) -> None:
    wide, weight = torch.randn(16, 96, device=device), torch.randn(24, 32, device=device)
    assert close(kernels.product(wide[:, ::3], weight), wide[:, ::3] @ weight.t())
    dy = torch.ones(1, 1, device=device).expand(16, 32)  # as of a sum
    for given in (wide, wide.t().contiguous().t()):
        found = kernels.attend_backward(given, dy, 16, 2, False)
        assert close(found, kernels.attend_backward(wide, dy.contiguous(), 16, 2, False))
        assert close(kernels.attend(given, 16, 2, False), kernels.attend(wide, 16, 2, False))


def test_nan_stays_nan_through_a_relu(device: str, kernels: Any) -> None:
    x, weight = torch.ones(16, 16, device=device), torch.ones(16, 16, device=device)
    x[3, 5] = float("nan")
    found = kernels.product(x, weight, weight[0], relu=True)
    assert bool(found[3].isnan().all()) and not bool(found[:3].isnan().any())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("precision", ["float32", "half"])
@pytest.mark.parametrize("shape", [(2, 32, 2, 32), (3, 20, 2, 16), (2, 17, 3, 24), (1, 32, 1, 64)])
def test_attention(
    shape: tuple[int, int, int, int], precision: str, causal: bool, device: str, kernels: Any
) -> None:
    batch, seq, heads, head = shape
    kind = dtype_of(precision, device)
    qkv = torch.randn(batch * seq, 3 * heads * head, device=device).to(kind)
    dy = torch.randn(batch * seq, heads * head, device=device).to(kind)
    exact = qkv.double().requires_grad_()
    q, k, v = exact.view(batch, seq, 3, heads, head).permute(2, 0, 3, 1, 4).unbind(0)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    y = y.transpose(1, 2).reshape(dy.shape)
    y.backward(dy.double())
    assert exact.grad is not None
    assert close(kernels.attend(qkv, seq, heads, causal), y)
    assert close(kernels.attend_backward(qkv, dy, seq, heads, causal), exact.grad)
