"""Attention of fp32 numbers by products of shorter ones: as exact as fp32's own."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.kernels import error_of, on_devices
from torch import Tensor

KERNELS = "split_attention"
SHAPES = [  # sequences, seq, heads, d_head
    (1, 64, 2, 64),
    (2, 33, 3, 24),
    (3, 1, 1, 8),
    (1, 100, 2, 40),
    (2, 70, 1, 128),
    (1, 129, 1, 16),
]
WIDE = [(1, 512, 8, 64), (4, 300, 4, 128), (2, 1000, 3, 48)]


def drawn(sequences: int, seq: int, heads: int, head: int, device: str) -> Tensor:
    """[q, k, v] of all tokens."""
    return torch.randn(sequences * seq, 3 * heads * head).to(device)


def assert_exact(
    kernels: Any, qkv: Tensor, seq: int, heads: int, causal: bool, error: float = 1e-6, **more: Any
) -> None:
    """Assert that the attention is nearly that in float64, and equal bit for bit if repeated."""
    head = qkv.shape[1] // 3 // heads
    q, k, v = qkv.double().view(-1, seq, 3, heads, head).permute(2, 0, 3, 1, 4)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    found, again = (kernels.split_attention(qkv, seq, heads, causal, **more) for _ in range(2))
    assert error_of(found, y.transpose(1, 2).reshape(len(qkv), -1)) < error
    assert torch.equal(found, again)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("device", "shape"), on_devices(SHAPES, WIDE))
def test_the_result_is_as_exact_as_fp32(
    shape: tuple[int, int, int, int], causal: bool, device: str, kernels: Any
) -> None:
    assert_exact(kernels, drawn(*shape, device), *shape[1:3], causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("blocks", [(16, 32), (32, 16), (16, 128), (32, 64), (64, 32)])
def test_any_blocks(blocks: tuple[int, int], causal: bool, device: str, kernels: Any) -> None:
    settings = kernels.Blocks(*blocks, warps=4, stages=2)
    for seq in (64, 75):
        assert_exact(kernels, drawn(1, seq, 2, 32, device), seq, 2, causal, settings=settings)


@pytest.mark.parametrize("causal", [False, True])
def test_weights_of_any_size(causal: bool, device: str, kernels: Any) -> None:
    """Equal weights, equal weights but for one 0, and a largest logit that grows by block."""
    for size in (0.0, 1e-15, 4.0):
        qkv = drawn(1, 80, 1, 16, device)
        qkv[:, :32] *= size
        assert_exact(kernels, qkv, 80, 1, causal, error=2e-6)
    qkv = drawn(1, 80, 1, 16, device)
    qkv[:, :16] = 8.0
    qkv[:, 16:32] = torch.arange(80, device=device)[:, None] - 300.0  # exact
    assert_exact(kernels, qkv, 80, 1, causal)


def test_strided_tensors_give_the_same_result(device: str, kernels: Any) -> None:
    assert_exact(kernels, drawn(2, 20, 4, 24, device)[:, ::4], 20, 1, False)


@pytest.mark.parametrize("causal", [False, True])
# NaN, inf, -inf, and NaN of which the last bit or all are set
@pytest.mark.parametrize("bad", [0x7FC00000, 0x7F800000, -0x800000, 0x7F800001, 0x7FFFFFFF])
@pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")  # NumPy's, of inf - inf
def test_nan_and_infinity_spread_as_in_fp32(
    bad: int, causal: bool, device: str, kernels: Any
) -> None:
    seq, heads, head = 40, 2, 16
    width = heads * head
    value = torch.tensor(bad, dtype=torch.int32).view(torch.float32)
    settings = kernels.Blocks(16, 16, warps=4, stages=2)
    for which in range(3):  # in q, k and v of sequence 1, head 1, token 5
        qkv = drawn(2, seq, heads, head, device)
        qkv[seq + 5, which * width + head + 3] = value.to(device)
        found = kernels.split_attention(qkv, seq, heads, causal, settings=settings)
        spoilt = torch.zeros(found.shape, dtype=torch.bool, device=device)
        rows = slice(seq + 5, seq + 6) if which == 0 else slice(seq + 5 if causal else seq, None)
        spoilt[rows, head + 3 if which == 2 else slice(head, None)] = True
        assert not bool(found[spoilt].isfinite().any())
        assert bool(found[:seq].isfinite().all()) and bool(found[:, :head].isfinite().all())


def test_none(device: str, kernels: Any) -> None:
    assert kernels.split_attention(drawn(0, 8, 2, 16, device), 8, 2, True).shape == (0, 32)
