"""Operands of C++ kernels: slices that count from the end, places in memory, sizes of products."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.kernels import drawn, rerun
from helpers.kernels import kernels as kernels
from torch import Tensor

from deepstack.fast.native import Kernels, Translator
from deepstack.fast.recording import Call, TensorRef

ATEN = torch.ops.aten


@pytest.mark.parametrize("step", [1, 2, 3])
@pytest.mark.parametrize("ends", [(-7, 12), (-40, 9), (-40, -3), (3, -2), (0, 12), (-1, 99)])
@pytest.mark.parametrize("dim", [1, -1])
def test_the_gradient_of_a_slice_counts_from_the_end(
    dim: int, ends: tuple[int, int], step: int, kernels: Kernels
) -> None:
    """torch's slices and Python's have the same entries; all others have the gradient 0."""
    [dy] = drawn((5, len(range(12)[slice(*ends, step)])))

    def gradient(dy: Tensor) -> Tensor:
        result: Tensor = ATEN.slice_backward(dy, [5, 12], dim, *ends, step)
        return result

    [found], calls = rerun(gradient, [dy], kernels)
    expected = torch.zeros(5, 12)
    expected[:, ends[0] % 12 if ends[0] >= -12 else 0 : ends[1] : step] = dy
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert calls == 0


@pytest.mark.parametrize(("dim", "index"), [(0, 4), (0, -1), (1, -12), (-1, -2), (-2, 3)])
def test_the_gradient_of_an_entry_counts_from_the_end(
    dim: int, index: int, kernels: Kernels
) -> None:
    [dy] = drawn((5,) if dim in (1, -1) else (12,))
    select: Callable[[Tensor], Tensor] = lambda dy: ATEN.select_backward(dy, [5, 12], dim, index)  # noqa: E731
    [found], calls = rerun(select, [dy], kernels)
    expected = torch.zeros(5, 12)
    expected.select(dim, index).copy_(dy)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert calls == 0


@pytest.mark.parametrize("dim", [0, 1, -1, -2])
def test_tensors_are_joined_along_a_dimension_from_the_end(dim: int, kernels: Kernels) -> None:
    x, y = drawn((4, 6), (4, 6))
    results, calls = rerun(lambda x, y: (torch.cat([x, y], dim), torch.stack([x, y], dim)), [x, y],
                           kernels)  # fmt: skip
    joined, stacked = (one.numpy() for one in results)
    for number, one in enumerate((x, y)):
        axis = range(joined.ndim)[dim]
        part = joined[:, 6 * number :][:, :6] if axis else joined[4 * number :][:4]
        assert (part == one.numpy()).all()
        assert (stacked.take(number, axis=range(stacked.ndim)[dim]) == one.numpy()).all()
    assert calls == 0


ATTENTION = ATEN._scaled_dot_product_flash_attention_for_cpu
QKV = ((2, 3, 5, 8),) * 3
OPTIONS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "a sum in double precision": (lambda x: x.sum(0, dtype=torch.float64), ((300, 5),)),
    "a mean in double precision": (lambda x: x.mean(0, dtype=torch.float64), ((300, 5),)),
    "a norm of moduli": (lambda x: x.norm(p=1, dim=-1), ((7, 30),)),
    "the largest modulus": (lambda x: x.norm(p=float("inf"), dim=0), ((7, 30),)),
    "attention with a scale": (lambda *qkv: ATTENTION(*qkv, scale=0.7)[0], QKV),
    "attention with a mask": (
        lambda q, k, v, mask: ATTENTION(q, k, v, attn_mask=mask)[0], (*QKV, (2, 3, 5, 5))
    ),
    "the gradient of GELU by tanh": (
        lambda dy, x: ATEN.gelu_backward(dy, x, approximate="tanh"), ((99,), (99,))
    ),
    "ELU with a scale": (lambda x: ATEN.elu(x, 1.5, 0.7), ((99,),)),
    "the gradient of ELU with a scale": (
        lambda dy, x: ATEN.elu_backward(dy, 1.5, 0.7, 1, False, x), ((99,), (99,))
    ),
    "a difference with a factor": (lambda x, y: torch.sub(x, y, alpha=3), ((99,), (99,))),
    "a number less a tensor": (lambda x: torch.rsub(x, 2.0, alpha=3), ((99,),)),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_an_operation_count(name: str, kernels: Kernels) -> None:
    """A kernel that does not know an option leaves the operation to torch."""
    function, shapes = OPTIONS[name]
    inputs = drawn(*shapes)
    [found], _ = rerun(function, inputs, kernels)
    expected = function(*inputs)
    assert found.dtype is expected.dtype
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6)


# --- places in memory -----------------------------------------------------------------------------


def reference(
    *size: int, offset: int = 0, stride: tuple[int, ...] | None = None, number: int = 0
) -> TensorRef:
    """A tensor of fp32 numbers, side by side unless it has other strides."""
    if stride is None:
        stride = tuple(torch.empty(size, device="meta").stride())
    return TensorRef(number, offset, size, stride, torch.float32)


def is_by_kernels(kernels: Kernels, call: Call, storage: int = 2**62, base: int = 2**12) -> bool:
    """Whether kernels compute a call whose tensors lie in storages of so many bytes."""
    return Translator(kernels, lambda _: (base, storage)).translate(call) is not None


def doubled(x: TensorRef) -> Call:
    """2 x as a call."""
    out = reference(*x.size, number=1)
    return Call(ATEN.mul.Scalar, (x, 2.0), {}, [(0, out)], {0, 1})


STRIDED = {"offset": 3, "stride": (20, 2)}  # of 5 x 4: 3 + 4 * 20 + 3 * 2 + 1 = 90 numbers


@pytest.mark.parametrize(("storage", "is_inside"), [(360, True), (359, False), (12, False)])
def test_a_tensor_that_reaches_beyond_its_memory_is_left_to_torch(
    storage: int, is_inside: bool, kernels: Kernels
) -> None:
    call = doubled(reference(5, 4, **STRIDED))  # type: ignore[arg-type]
    assert is_by_kernels(kernels, call, storage) == is_inside


def test_a_tensor_before_its_memory_or_between_numbers_is_left_to_torch(kernels: Kernels) -> None:
    assert is_by_kernels(kernels, doubled(reference(6)))
    assert not is_by_kernels(kernels, doubled(reference(6, offset=-1)))
    assert not is_by_kernels(kernels, doubled(reference(6)), base=2**12 + 2)
    half = reference(6)._replace(dtype=torch.float16)
    assert not is_by_kernels(kernels, doubled(half))


@pytest.mark.parametrize(("rows", "stride", "is_inside"), [(2, 2**30, True), (3, 2**30, False)])
def test_strides_beyond_31_bits_are_left_to_torch(
    rows: int, stride: int, is_inside: bool, kernels: Kernels
) -> None:
    """The records of the kernels hold integers of 32 bits: up to 2^31 - 1 numbers of memory."""
    assert is_by_kernels(kernels, doubled(reference(rows, 4, stride=(stride, 1)))) == is_inside


# --- products -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "by_onednn", "expected"),
    [
        ((512, 512, 128), False, True),  # 2^25 multiplications
        ((512, 512, 128), True, False),  # oneDNN's own code for wide products is as fast
        ((512, 512, 63), True, True),
        ((512, 512, 512), False, False),  # 2^27
        ((512, 512, 511), False, True),
    ],
)
@pytest.mark.parametrize("batches", [0, 8])
def test_wide_products_are_left_to_the_library_that_the_step_uses(
    batches: int, sizes: tuple[int, int, int], by_onednn: bool, expected: bool, kernels: Kernels
) -> None:
    """Below 2^27 multiplications a kernel multiplies, and below 2^24 beside oneDNN; of each
    product in a batch."""
    m, n, k = sizes
    batch = (batches,) if batches else ()
    a, b, out = (
        reference(*batch, *size, number=i) for i, size in enumerate(((m, k), (k, n), (m, n)))
    )
    operation: Any = ATEN.bmm.default if batches else ATEN.mm.default
    call = Call(operation, (a, b), {}, [(0, out)], {0, 1, 2}, by_onednn)
    assert is_by_kernels(kernels, call) == expected
