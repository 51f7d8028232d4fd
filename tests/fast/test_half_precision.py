"""Fused sublayers under autocast on a CPU, and attention by batched products."""

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from helpers.kernels import NEEDS_ONEDNN, error_of
from helpers.sampling import some

from deepstack.base.errors import ConfigError
from deepstack.config import Config, with_overrides
from deepstack.fast import enable_fast_paths
from deepstack.fast.fused_attention import SelfAttention
from deepstack.fast.products import LARGE_PRODUCT
from deepstack.fast.rule import FastPaths
from deepstack.model import build_model
from deepstack.schemes import SCHEMES
from deepstack.schemes.norms import StackNorm

CHANGES: list[dict[str, Any]] = [
    {},
    {"model.activation": "gelu"},
    {"model.gated": True, "model.activation": "silu"},
    {"model.positions": "rotary", "model.qk_norm": True},
    {"model.bias": False, "model.init.distribution": "ntk"},
    {"model.family": "decoder"},
    {"runtime.banks": False},
]


def gradients(changes: dict[str, Any], fused: bool, half: bool) -> dict[str, torch.Tensor]:
    """Return the gradients of a small model by key, under autocast if `half`."""
    given = {"model.d_model": 32, "model.depth": 3, "task.seq_len": 16, "runtime.device": "cpu"}
    built = build_model(with_overrides(Config(), given | changes), vocab_size=11)
    enable_fast_paths(built.model, FastPaths(fused, False, False), print)
    built.banks.zero_gradients()
    tokens = torch.arange(64).view(4, 16) % 11
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        logits = built.model(tokens)
    logits.float().square().mean().backward()
    return {bank.key: bank.gradients().clone() for bank in built.banks}


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Return the norm of the difference relative to the norm, over all gradients."""
    difference = sum(float((one[key] - other[key]).square().sum()) for key in one)
    return (difference / sum(float(g.square().sum()) for g in other.values())) ** 0.5


@pytest.mark.parametrize("large", [1, LARGE_PRODUCT])
@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_fused_gradients_under_autocast_are_as_near_to_fp32_as_the_plain_ones(
    changes: dict[str, Any], large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deepstack.fast.fused_attention.LARGE_PRODUCT", large)
    exact = gradients(changes, fused=False, half=False)
    plain = distance(gradients(changes, fused=False, half=True), exact)
    fused = distance(gradients(changes, fused=True, half=True), exact)
    assert 0 < fused < 1.3 * plain < 0.1


NORMED_BRANCH = ["sandwich_ln", "res_post_norm", "sub_ln"]  # norms read the result of a product


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    "name", [*NORMED_BRANCH, *some((n for n in SCHEMES if n not in NORMED_BRANCH), 3)]
)
def test_norms_give_fp32_under_autocast_on_a_cpu(name: str, fused: bool) -> None:
    """Also norms of a branch's output, of queries and keys and inside a sublayer, read in bf16."""
    for family, changes in product(SCHEMES[name].families, ({}, {"model.qk_norm": True})):
        given = {
            "model.scheme": name, "model.family": family, "model.depth": 2, "model.d_model": 12,
            "model.n_heads": 3, "task.seq_len": 6, "runtime.device": "cpu", **changes,
        }  # fmt: skip
        try:
            built = build_model(with_overrides(Config(), given), vocab_size=11)
        except ConfigError as error:
            assert error.key == "model.qk_norm"  # the scheme norms queries and keys itself
            continue
        enable_fast_paths(built.model, FastPaths(fused, False, False), print)
        dtypes: dict[str, torch.dtype] = {}
        for key, module in built.model.named_modules():
            if isinstance(module, StackNorm):
                module.register_forward_hook(partial(keep_dtype, dtypes, key))
        tokens = torch.arange(24).view(2, 12) % 11
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            built.model(tokens if built.model.source_len else tokens[:, :6])
        assert set(dtypes.values()) <= {torch.float32}, (family, dtypes)


def keep_dtype(
    dtypes: dict[str, torch.dtype], key: str, norm: StackNorm, given: Any, output: torch.Tensor
) -> None:
    """Keep the dtype of a norm's output under its key."""
    dtypes[key] = output.dtype


@NEEDS_ONEDNN
@pytest.mark.parametrize("causal", [False, True])
def test_attention_by_products_equals_the_flash_kernel(causal: bool) -> None:
    batch, seq, d = 8, 64, 64
    x = torch.randn(batch, seq, 3 * d, generator=torch.Generator().manual_seed(0))
    dy = torch.randn(batch, seq, d, generator=torch.Generator().manual_seed(1))
    results = []
    for library in ("onednn", "mkl"):
        attention = SelfAttention(1, causal, library)
        assert attention.uses_products(x.view(-1, 3 * d), seq) is (library == "onednn")
        saved: list[torch.Tensor] = []
        y = attention.forward(x.clone().view(-1, 3 * d), seq, saved)
        results.append((y, attention.backward(dy.view(-1, d), seq, saved)))
        assert not saved
    for one, other in zip(*results, strict=True):
        assert error_of(one, other) < 1e-6


def test_attention_over_long_sequences_keeps_no_weights() -> None:
    attention = SelfAttention(2, False, "onednn")
    assert attention.uses_products(torch.empty(1024, 3 * 64), 64)
    assert attention.uses_products(torch.empty(1024, 3 * 64, dtype=torch.bfloat16), 64)
    for dtype in (torch.float32, torch.bfloat16):
        saved: list[torch.Tensor] = []
        attention.forward(torch.randn(512, 3 * 64, dtype=dtype), 256, saved)
        assert max(t.numel() for t in saved) < 2 * 2 * 256 * 256
