"""Queries and keys: rotary positions, and norms before the logits."""

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import scheme_pieces
from helpers.family_models import perturbed
from helpers.gradients import assert_same_gradients
from helpers.scheme_literals import norm
from torch import Tensor

from deepstack.config import Config, with_overrides
from deepstack.fast.fuse import fused_sublayer
from deepstack.fast.fused_sublayers import FusedSublayer
from deepstack.model import check_scheme
from deepstack.model.query_key import Rotation
from deepstack.model.transformer import sinusoidal


def turned(h: Tensor, first: int = 0) -> Tensor:
    """Pairs of coordinates as complex numbers, times e^(i p θ)."""
    pairs = torch.view_as_complex(h.unflatten(-1, (-1, 2)))
    angles = 10000 ** (-2 * torch.arange(pairs.shape[-1]) / h.shape[-1])
    positions = torch.arange(first, first + h.shape[-2])[:, None]
    return torch.view_as_real(pairs * torch.exp(1j * positions * angles)).flatten(-2)


def test_a_rotation_turns_pairs_by_their_angles() -> None:
    h = torch.randn(2, 3, 5, 6)
    rotation = Rotation(9, 6)
    torch.testing.assert_close(rotation(h), turned(h), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(rotation(h, 4), turned(h, 4), rtol=1e-5, atol=1e-6)
    assert rotation(h.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("default", "kept"),
    [(torch.float32,) * 2, (torch.float64,) * 2, (torch.bfloat16, torch.float32)],
)
def test_tables_follow_the_default_type(default: torch.dtype, kept: torch.dtype) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        rotation, table = Rotation(50, 8), sinusoidal(50, 8)
    finally:
        torch.set_default_dtype(before)
    p, i = np.arange(50)[:, None], np.arange(4)
    angle = p / 10000.0 ** (2 * i / 8)
    for found, exact in (
        (rotation.cos[:, ::2], np.cos(angle)),
        (rotation.sin[:, 1::2], np.sin(angle)),
        (table[:, 1::2], np.cos(angle) * math.sqrt(2 / 8)),
    ):
        assert found.dtype == kept
        error = np.abs(found.double().numpy() - exact).max()
        assert error < (1e-14 if kept == torch.float64 else 1e-7)


@pytest.mark.parametrize("family", ["encoder", "decoder"])
@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("rotary", [True, False])
@pytest.mark.parametrize("normed", [True, False])
def test_attention_is_its_equation(family: str, kind: str, rotary: bool, normed: bool) -> None:
    """From the plain matrices, with weights written out."""
    changes: dict[str, Any] = {
        "model__norm__kind": kind, "model__qk_norm": normed, "model__family": family,
        "model__positions": "rotary" if rotary else "learned",
    }  # fmt: skip
    layer = scheme_pieces.perturbed("pre_ln", 2, **changes).layers[1]
    attention = layer.attention

    def norm(h: Tensor, module: Any) -> Tensor:
        normed = {"layer": F.layer_norm, "rms": F.rms_norm}[kind]
        return normed(h, h.shape[-1:], module.gain, eps=1e-5) + module.bias

    def qkv(parts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = parts
        if normed:
            q, k = norm(q, attention.qk.q_norm), norm(k, attention.qk.k_norm)
        return (turned(q), turned(k), v) if rotary else (q, k, v)

    def masked(logits: Tensor) -> Tensor:
        future = torch.ones(6, 6).triu(1).bool() & torch.tensor(family == "decoder")
        return logits.masked_fill(future, -math.inf)

    x = torch.randn(2, 6, scheme_pieces.D)
    expected = scheme_pieces.pieces(layer, 2, 2).A(x, qkv=qkv, logits=masked)
    torch.testing.assert_close(attention(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["encoder", "decoder"])
@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize(("gain", "bias"), [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize(("rotary", "normed"), [(True, False), (False, True), (True, True)])
def test_attention_is_a_chain_on_a_cpu(
    family: str, kind: str, gain: bool, bias: bool, rotary: bool, normed: bool
) -> None:
    changes: dict[str, Any] = {
        "model__norm__kind": kind, "model__norm__gain": gain, "model__norm__bias": bias,
        "model__qk_norm": normed, "model__positions": "rotary" if rotary else "learned",
    }  # fmt: skip
    attention = perturbed(model__family=family, **changes).model.layers[1].attention
    x = torch.randn(3, 6, 16)
    chain = fused_sublayer(attention)
    assert isinstance(chain, FusedSublayer)
    with torch.no_grad():
        torch.testing.assert_close(chain(x[:, :4]), attention(x[:, :4]), rtol=1e-4, atol=1e-5)
    assert_same_gradients(attention, attention, lambda: fused_sublayer(attention), x)


def test_attention_with_an_unfused_norm_of_queries_is_not_fused() -> None:
    for kind in ("batch", "dynamic_tanh"):
        given: dict[str, Any] = {"model__norm__kind": kind, "model__positions": "rotary"}
        attention = perturbed(**given).model.layers[1].attention
        assert fused_sublayer(attention) is not None
        normed = perturbed(model__qk_norm=True, **given).model.layers[1].attention
        assert fused_sublayer(normed) is None


def test_queries_and_keys_across_are_normed_and_not_turned() -> None:
    both = {"model__positions": "rotary", "model__qk_norm": True}
    model = perturbed(model__family="encoder_decoder", **both).model
    cross = model.decoder.layers[1].cross_attention
    x, memory = torch.randn(2, 5, 16), torch.randn(2, 7, 16)

    k, v = (memory @ cross.kv.T + cross.kv_bias).chunk(2, dim=-1)
    projected = x @ cross.q.T + cross.q_bias, k, v
    q, k, v = (h.view(2, -1, 2, 8).transpose(1, 2) for h in projected)
    q, k = norm(cross.qk.q_norm)(q), norm(cross.qk.k_norm)(k)
    y = F.scaled_dot_product_attention(q, k, v)
    expected = y.transpose(1, 2).reshape(2, 5, 16) @ cross.o.T + cross.o_bias
    torch.testing.assert_close(cross(x, memory), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("seq_len", [2, 3, 4, 5])
@pytest.mark.parametrize("family", ["encoder", "encoder_decoder"])
def test_rotary_positions_allow_short_sequences(seq_len: int, family: str) -> None:
    sizes = {"model.depth": 2, "model.d_model": 8, "model.n_heads": 1, "task.seq_len": seq_len}
    kind = {"model.positions": "rotary", "model.family": family, "task.name": "copy"}
    check_scheme(with_overrides(Config(), sizes | kind))
