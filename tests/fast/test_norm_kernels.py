"""The results of the kernels for layer and RMS norms, on a GPU or by Triton's interpreter."""

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


@pytest.mark.parametrize("added", [None, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("gain", "bias"), [(True, True), (True, False), (False, False)])
def test_the_rms_norm_of_a_sum_and_its_gradients(
    gain: bool, bias: bool, added: torch.dtype | None, device: str, kernels: Any
) -> None:
    x, dout = (torch.randn(70, 40, device=device) for _ in range(2))
    y = None if added is None else torch.randn(70, 40, device=device).to(added)
    g, b = 1 + torch.rand(40, device=device), torch.randn(40, device=device)
    own = {"g": g.double().requires_grad_(), "b": b.double().requires_grad_()}
    terms = [t.double().requires_grad_() for t in (x, y) if t is not None]
    z = 1.5 * terms[0] + terms[1] if len(terms) > 1 else terms[0]
    right = z / torch.sqrt((z * z).mean(-1, keepdim=True) + 1e-5)
    right = right * own["g"] if gain else right
    right = right + own["b"] if bias else right
    right.backward(dout.double())

    parts = g if gain else None, b if bias else None
    found = kernels.normed(x, *parts, 1e-5, plus=y, scale=1.5, copy=torch.bfloat16, rms=True)
    assert close(found.out, right) and close(found.copy, right, error=4e-3)
    dx, dy, sums = kernels.normed_backward(
        dout, found.saved, parts[0], scale=1.5, plus=added, rms=True
    )
    assert close(dx, terms[0].grad)
    if y is not None:
        assert dy.dtype is added and close(
            dy, terms[1].grad, error=1e-2 if dy.itemsize < 4 else None
        )
    for used, name, sum_ in zip((gain, bias), "gb", sums.sum(0), strict=False):
        assert not used or close(sum_, own[name].grad, error=1e-5)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rms", [True, False], ids=["rms", "layer"])
@pytest.mark.parametrize(
    ("gain", "bias", "keys"), [(True, False, 3), (True, True, 1), (False, False, 3)]
)
def test_heads_of_queries_and_keys_are_normed_and_values_kept(
    gain: bool, bias: bool, keys: int, rms: bool, kind: torch.dtype, device: str, kernels: Any
) -> None:
    tokens, heads, d_head = 23, 3, 24
    size = tokens, heads + 2 * keys, d_head
    x, dout = (torch.randn(size, device=device).to(kind) for _ in range(2))
    g, b = (1 + torch.rand(2, d_head, device=device) for _ in range(2))
    own = {"g": g.double().requires_grad_(), "b": b.double().requires_grad_()}
    x64 = x.double().requires_grad_()
    parts = []
    for i, h in enumerate(x64.split([heads, keys, keys], dim=1)):
        if i < 2:
            centred = h if rms else h - h.mean(-1, keepdim=True)
            h = centred / torch.sqrt((centred * centred).mean(-1, keepdim=True) + 1e-5)
            h = h * own["g"][i] if gain else h
            h = h + own["b"][i] if bias else h
        parts.append(h)
    right = torch.cat(parts, dim=1)
    right.backward(dout.double())

    g_or_none, b_or_none = g if gain else None, b if bias else None
    found = kernels.normed(x, g_or_none, b_or_none, 1e-5, rms=rms, heads=heads, keys=keys)
    rounding = 2e-6 if kind is torch.float32 else 4e-3
    assert found.out.dtype is kind and close(found.out, right, error=rounding)
    assert torch.equal(found.out[:, heads + keys :], x[:, heads + keys :])
    dx, _, sums = kernels.normed_backward(
        dout, found.saved, g_or_none, rms=rms, heads=heads, keys=keys
    )
    assert dx.dtype is kind and close(dx, x64.grad, error=rounding)
    assert torch.equal(dx[:, heads + keys :], dout[:, heads + keys :])
    of_q, of_k = sums.sum(0).split(2)
    for i, (gains, biases) in enumerate((of_q, of_k)):
        assert not gain or close(gains, own["g"].grad[i], error=1e-5)
        assert not bias or close(biases, own["b"].grad[i], error=1e-5)
