"""Schemes in which layers read more than a stream, scale it past the gradient, or start apart."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers.scheme_literals import stream_into
from helpers.scheme_pieces import perturbed, pieces

from deepstack.schemes.hyper_connections import sinkhorn


@pytest.mark.parametrize("n", [1, 2, 4, 9])
def test_sinkhorn_goes_to_a_doubly_stochastic_matrix(n: int) -> None:
    torch.manual_seed(0)
    R = torch.randn(n, n, 50, dtype=torch.float64)
    found = sinkhorn(R, 500)
    ones = torch.ones(n, 50, dtype=torch.float64)
    torch.testing.assert_close(found.sum(0), ones)
    torch.testing.assert_close(found.sum(1), ones)
    assert (found > 0).all() and torch.linalg.matrix_norm(found.movedim(2, 0), 2).max() < 1 + 1e-9
    torch.testing.assert_close(sinkhorn(R + 1000, 20), sinkhorn(R, 20))  # no overflow


def test_gpas_scales_the_stream_and_not_its_gradient() -> None:
    layer = perturbed("gpas", 1).layers[0]
    p = pieces(layer, 1, 1)
    with torch.no_grad():
        layer.scheme.gate.fill_(1.5)
    x, R = torch.randn(2, 6, 12, requires_grad=True), torch.randn(2, 6, 12)
    keep = 1 - F.silu(torch.tensor(1.5))
    y = x + p.A(p.a[0](x))
    z = keep * y.detach() + (y - y.detach())  # the value is scaled, the gradient is y's
    expected = z + p.F(p.f[0](z))
    torch.testing.assert_close(layer(x), keep * expected)
    (wanted,) = torch.autograd.grad((expected * R).sum(), x)
    (found,) = torch.autograd.grad((layer(x) * R).sum(), x)
    torch.testing.assert_close(found, wanted)
    (gate,) = torch.autograd.grad((layer(x) * R).sum(), layer.scheme.gate)
    assert gate.abs() > 0


@pytest.mark.parametrize(
    "name",
    [
        "dlcl", "dense_former", "attn_res", "mhc", "x0_lambdas", "real_former",
        "hyper_connections", "frac_connections",
    ],
)  # fmt: skip
def test_what_goes_between_layers_is_in_full_precision_under_autocast(name: str) -> None:
    """Sublayers round to bf16; what they gave is mixed, weighed and summed up in fp32."""
    static = {"dynamic": False} if name.endswith("_connections") else {}
    model = perturbed(name, 6, model__scheme_options=static)
    x = torch.randn(2, 6, 12)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        *_, found = model.last.stream(x)
    tensors = [t for t in torch.utils._pytree.tree_leaves(found) if torch.is_tensor(t)]
    assert {t.dtype for t in tensors} == {torch.float32}
    given, layer = stream_into(name, 2, x), model.layers[1]
    with torch.no_grad():  # sublayers that give nothing: no bf16 at all
        layer.attention.o.zero_(), layer.attention.o_bias.zero_()
        layer.feed_forward.w2.zero_(), layer.feed_forward.w2_bias.zero_()
        whole = layer(given)
        with torch.autocast("cpu", torch.bfloat16):
            half = layer(given)
    torch.testing.assert_close(half[0], whole[0], rtol=1e-6, atol=1e-6)
