"""The results of the kernels that rotate and repeat heads, on a GPU or by Triton's interpreter."""

from functools import partial
from typing import Any

import helpers.kernels
import pytest
import torch

from deepstack.model.query_key import Rotation

KERNELS = "head_kernels"

close = partial(helpers.kernels.close, error=1e-6)


@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rotates", [True, False], ids=["rotated", "straight"])
@pytest.mark.parametrize(("heads", "keys"), [(6, 2), (3, 1), (3, 3)])
def test_heads_are_rotated_and_repeated(
    heads: int, keys: int, rotates: bool, kind: torch.dtype, device: str, kernels: Any
) -> None:
    batch, seq, d_head = 3, 5, 12
    tokens, d, n = batch * seq, heads * d_head, (heads + 2 * keys) * d_head
    x, dy = (torch.randn(tokens, width, device=device).to(kind) for width in (n, 3 * d))
    own = x.double().requires_grad_()
    by_head = own.view(batch, seq, heads + 2 * keys, d_head)
    parts = list(by_head.split([heads, keys, keys], dim=2))
    if rotates:
        at = torch.arange(seq, device=device)[:, None, None]
        angle = at * 10000.0 ** (-torch.arange(0, d_head, 2, device=device) / d_head)
        turn = torch.polar(torch.ones_like(angle).double(), angle.double())
        for i, h in enumerate(parts[:2]):
            pairs = torch.view_as_complex(h.unflatten(-1, (-1, 2)))
            parts[i] = torch.view_as_real(pairs * turn).flatten(-2)
    for i in (1, 2):
        parts[i] = parts[i].repeat_interleave(heads // keys, dim=2)
    right = torch.cat(parts, dim=2).reshape(tokens, 3 * d)
    right.backward(dy.double())

    table = Rotation(seq + 2, d_head).to(device)
    angles = (table.cos, table.sin) if rotates else None
    rounding = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}[kind]
    found = kernels.arranged(x, heads, keys, angles, seq)
    assert found.dtype is kind and close(found, right, error=rounding)
    assert torch.equal(found[:, 2 * d :], right[:, 2 * d :].to(kind))
    dx = kernels.arranged_backward(dy, heads, keys, angles, seq)
    assert dx.dtype is kind and close(dx, own.grad, error=rounding)
