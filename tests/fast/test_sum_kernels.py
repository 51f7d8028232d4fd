"""Sums over tokens in the backward pass, on a GPU or by Triton's interpreter."""

from typing import Any

import pytest
import torch
from helpers.kernels import dtype_of

KERNELS = "sum_kernels"


@pytest.mark.parametrize("precision", ["float32", "half"])
@pytest.mark.parametrize("shape", [(7, 24), (130, 40), (300, 300)], ids=str)
def test_the_gate_of_a_relu(
    shape: tuple[int, int], precision: str, device: str, kernels: Any
) -> None:
    kind = dtype_of(precision, device)
    y = torch.relu(torch.randn(shape, device=device)).to(kind)
    dy = torch.randn(shape, device=device).to(kind)
    y[2, 3] = float("nan")
    right = torch.ops.aten.threshold_backward(dy, y, 0)
    total = dy.float().sum(0)
    assert torch.allclose(kernels.summed(dy).sum(0), total, rtol=1e-5, atol=1e-4)
    sums = kernels.summed(dy, y)  # in place
    assert torch.equal(dy, right)
    assert sums.dtype is torch.float32
    assert torch.allclose(sums.sum(0), right.float().sum(0), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("precision", ["float32", "half"])
@pytest.mark.parametrize("apart", [False, True], ids=["by_head", "by_place"])
@pytest.mark.parametrize("shape", [(2, 3, 9, 8), (1, 2, 130, 16), (3, 40, 7, 8)], ids=str)
def test_heads_side_by_side(
    shape: tuple[int, int, int, int], apart: bool, precision: str, device: str, kernels: Any
) -> None:
    batch, heads, seq, head = shape
    kind = dtype_of(precision, device)
    layout = (batch, seq, heads, head) if apart else shape
    parts = [torch.randn(layout, device=device).to(kind) for _ in range(3)]
    given = [part.transpose(1, 2) for part in parts] if apart else parts
    right = torch.cat([g.transpose(1, 2).reshape(batch * seq, -1) for g in given], dim=1)
    found, sums = kernels.merge(tuple(given))
    assert torch.equal(found, right)
    assert torch.allclose(sums.sum(0), right.float().sum(0), rtol=1e-5, atol=1e-4)
    mixed = (given[0], given[1].contiguous(), given[2].transpose(2, 3).contiguous().transpose(2, 3))
    assert torch.equal(kernels.merge(mixed)[0], right)
