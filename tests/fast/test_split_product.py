"""Products of fp32 numbers as sums of products of shorter ones: as exact as fp32's own."""

from typing import Any

import pytest
import torch
from helpers.kernels import error_of, on_devices
from torch import Tensor

KERNELS = "split_product"
SHAPES = [(64, 64, 64), (33, 70, 130), (7, 136, 40), (1, 1, 1), (130, 3, 257), (16, 16, 0)]
LARGE = [(512, 1536, 512), (512, 512, 512), (512, 2048, 512), (512, 512, 2048)]


def drawn(rows: int, columns: int, depth: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """x, W and b."""
    shapes = (rows, depth), (columns, depth), (columns,)
    x, weight, bias = (torch.randn(shape).to(device) for shape in shapes)
    return x, weight, bias


def assert_exact(kernels: Any, x: Tensor, weight: Tensor, error: float = 5e-7, **more: Any) -> None:
    """Assert that the product is nearly that in float64, and equal bit for bit if repeated."""
    right = x.double() @ weight.double().t()
    if more.get("bias") is not None:
        right += more["bias"].double()
    right = right.clamp(min=0) if more.get("relu") else right
    found, again = (kernels.split_product(x, weight, **more) for _ in range(2))
    assert error_of(found, right) < error
    assert torch.equal(found, again)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("device", "shape"), on_devices(SHAPES, LARGE))
def test_the_result_is_as_exact_as_fp32(
    shape: tuple[int, int, int], biased: bool, relu: bool, device: str, kernels: Any
) -> None:
    x, weight, b = drawn(*shape, device)
    error = 1e-6 if shape in LARGE else 5e-7
    assert_exact(kernels, x, weight, error, bias=b if biased else None, relu=relu)


@pytest.mark.parametrize("parts", [1, 3, 16])
@pytest.mark.parametrize("tile", [(16, 64, 16), (64, 32, 64)])
def test_any_tiles_and_parts(
    tile: tuple[int, int, int], parts: int, device: str, kernels: Any
) -> None:
    x, weight, bias = drawn(70, 50, 130, device)
    settings = kernels.Tiles(*tile, warps=4, stages=2, parts=parts)
    assert_exact(kernels, x, weight, 1e-6, bias=bias, relu=True, settings=settings)


@pytest.mark.parametrize("size", [1e-30, 1e-6, 1e15])
def test_any_size(size: float, device: str, kernels: Any) -> None:
    x, weight, _ = drawn(20, 24, 100, device)
    x = x * size * torch.logspace(0, 3, 20, device=device)[:, None]
    assert_exact(kernels, x, weight / size**0.5)


def test_strided_tensors_give_the_same_result(device: str, kernels: Any) -> None:
    wide, weight, _ = drawn(20, 24, 96, device)
    assert_exact(kernels, wide[:, ::3], weight[:, :32].contiguous())


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # NumPy's, of inf - inf
def test_nan_and_infinity_spread_as_in_fp32(parts: int, device: str, kernels: Any) -> None:
    x, weight, bias = drawn(20, 24, 70, device)
    settings = kernels.Tiles(16, 16, 32, warps=4, stages=2, parts=parts)
    x[3, 5], x[4, 69] = float("nan"), float("inf")
    weight[7, 2] = -float("inf")
    x[9, 11] = torch.tensor(0x7F800001, dtype=torch.int32).view(torch.float32)  # NaN, last bit
    x[10, 0] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    for relu in (False, True):
        found = kernels.split_product(x, weight, bias, relu=relu, settings=settings)
        for row in (3, 9, 10):
            assert bool(found[row].isnan().all())
        assert not bool(found[4].isfinite().any())
        assert not bool(found[:, 7].isfinite().any())
        found[[3, 4, 9, 10]] = found[:, 7] = 0.0
        assert bool(found.isfinite().all())


def test_large_numbers_do_not_overflow(device: str, kernels: Any) -> None:
    x = torch.full((16, 1), 0.99 * torch.finfo(torch.float32).max, device=device)
    assert_exact(kernels, x, torch.full((16, 1), -0.25, device=device))


def test_none(device: str, kernels: Any) -> None:
    for rows, columns in ((0, 8), (8, 0)):
        x, weight, _ = drawn(rows, columns, 16, device)
        assert kernels.split_product(x, weight).shape == (rows, columns)


@pytest.mark.parametrize("shape", LARGE)
def test_the_tiles_fill_a_gpu(shape: tuple[int, int, int], kernels: Any) -> None:
    rows, columns, depth = shape
    tiles = kernels.tiles_for(rows, columns, depth)
    programs = -(-rows // tiles.M) * -(-columns // tiles.N) * tiles.parts
    assert 90 <= programs and tiles.parts * tiles.K <= depth
