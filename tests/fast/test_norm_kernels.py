"""The results of the kernels for layer norms, on a GPU or by Triton's interpreter."""

from functools import partial
from typing import Any

import helpers.kernels
import pytest
import torch
import torch.nn.functional as F
from helpers.kernels import HALF

KERNELS = "norm_kernels"


close = partial(helpers.kernels.close, error=2e-6)


@pytest.mark.parametrize("added", [None, "fp32", "half"])
@pytest.mark.parametrize(("gain", "bias"), [(True, True), (False, True), (True, False)])
@pytest.mark.parametrize("shape", [(2, 3, 32), (300, 40), (5, 5000)], ids=str)
def test_the_norm_of_a_sum_and_its_gradients(
    shape: tuple[int, ...], gain: bool, bias: bool, added: str | None, device: str, kernels: Any
) -> None:
    kind = HALF[device] if added == "half" else torch.float32
    x = torch.randn(shape, device=device)
    y = None if added is None else torch.randn(shape, device=device).to(kind)
    width = shape[-1]
    g = 1 + torch.rand(width, device=device) if gain else None
    b = torch.randn(width, device=device) if bias else None
    dout = torch.randn(shape, device=device)
    terms = [t.double().requires_grad_() for t in (x, y) if t is not None]
    z = 1.5 * terms[0] + terms[1] if len(terms) > 1 else terms[0]
    own = {n: t.double().requires_grad_() for n, t in (("g", g), ("b", b)) if t is not None}
    right = F.layer_norm(z, (width,), own.get("g"), own.get("b"), 1e-5)
    right.backward(dout.double())

    found = kernels.normed(x, g, b, 1e-5, plus=y, scale=1.5, copy=HALF[device])
    assert close(found.out, right)
    assert found.copy.dtype is HALF[device] and close(found.copy, found.out, error=4e-3)
    alone = kernels.normed(x, g, b, 1e-5, plus=y, scale=1.5, save=False)
    assert close(alone.out, found.out) and alone.copy is alone.saved is None
    dx, dy, sums = kernels.normed_backward(
        dout, found.saved, g, scale=1.5, plus=None if y is None else kind
    )
    assert close(dx, terms[0].grad)
    if y is not None:
        assert dy.dtype is kind and close(
            dy, terms[1].grad, error=2e-6 if added == "fp32" else 1e-2
        )
    right_sums = {name: t.grad for name, t in own.items()}
    if y is not None:
        right_sums["y"] = terms[1].grad.flatten(0, -2).sum(0)
    found_sums = dict(zip("gby", sums.sum(0), strict=False))
    assert all(close(found_sums[name], right_sums[name], error=1e-5) for name in right_sums)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of the interpreter's numpy
def test_norms_of_strided_tensors_and_of_nan_equal_torch(device: str, kernels: Any) -> None:
    x = torch.randn(8, 96, device=device)[:, ::3]
    x[2, 1], x[5, 0] = float("nan"), float("inf")
    right = F.layer_norm(x, (32,))
    found = kernels.normed(x, None, None, 1e-5)
    assert torch.equal(found.out.isnan(), right.isnan()) and right.isnan().any()
    fine = ~right.isnan()
    assert close(found.out[fine], right[fine])
    dx, _, _ = kernels.normed_backward(
        torch.ones(1, 1, device=device).expand(8, 32), found.saved, None
    )
    assert torch.equal(dx.isnan(), right.isnan())
