"""Settings of self-attention against plain PyTorch: grouped queries, a window, a soft cap."""

import math
from typing import Any

import pytest
import torch
from helpers.configs import config_with
from helpers.family_models import perturbed
from torch import Tensor

from deepstack.base.errors import ConfigError
from deepstack.config import parameter_count
from deepstack.instruments.ledger.decoding import generate
from deepstack.model import build_model

D, HEADS, SEQ = 16, 4, 7
OPTIONS: dict[str, dict[str, Any]] = {
    "groups": {"n_kv_heads": 2},
    "one head": {"n_kv_heads": 1},
    "window": {"attention_options": {"window": 3}},
    "cap": {"attention_options": {"soft_cap": 0.3}},
    "all": {"n_kv_heads": 2, "attention_options": {"window": 2, "soft_cap": 0.5}},
}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))


def model_of(options: dict[str, Any], family: str, **more: Any) -> Any:
    """Return a model whose parameters are random, biases too."""
    changes = {f"model__{key}": value for key, value in options.items()}
    return perturbed(
        model__n_heads=HEADS, model__d_model=D, model__family=family, **changes, **more
    ).model


def literal(attention: Any, options: dict[str, Any], x: Tensor) -> Tensor:
    """Return G(x) head by head, from W_q, W_k, W_v and W_o."""
    size, kv_heads = D // HEADS, options.get("n_kv_heads", HEADS)
    chosen = options.get("attention_options", {})
    cap, window = chosen.get("soft_cap"), chosen.get("window", math.inf)
    if kv_heads == HEADS:
        q, k, v = (x @ attention.qkv.T + attention.qkv_bias).chunk(3, dim=-1)
    else:
        q = x @ attention.q.T + attention.q_bias
        k, v = (x @ attention.kv.T + attention.kv_bias).chunk(2, dim=-1)
    heads = []
    for h in range(HEADS):
        group = h * kv_heads // HEADS
        own, read = (slice(i * size, (i + 1) * size) for i in (h, group))
        logits = q[..., own] @ k[..., read].transpose(1, 2) / math.sqrt(size)
        if cap is not None:
            logits = cap * torch.tanh(logits / cap)
        for i in range(logits.shape[-1]):
            for j in range(logits.shape[-1]):
                if abs(i - j) >= window or (attention.causal and j > i):
                    logits[:, i, j] = -math.inf
        heads.append(logits.softmax(dim=-1) @ v[..., read])
    return torch.cat(heads, dim=-1) @ attention.o.T + attention.o_bias


@every_option
@pytest.mark.parametrize("family", ["encoder", "decoder"])
def test_attention_equals_its_equation(options: dict[str, Any], family: str) -> None:
    attention = model_of(options, family).layers[0].attention
    x = torch.randn(2, SEQ, D)
    with torch.no_grad():
        torch.testing.assert_close(
            attention(x), literal(attention, options, x), rtol=1e-4, atol=1e-5
        )


@every_option
def test_a_decoder_decodes_position_by_position(options: dict[str, Any]) -> None:
    model = model_of(options, "decoder").eval()
    start = torch.arange(3)[None]
    added = generate(model, start, 5)
    tokens = torch.cat([start, added], dim=1)
    with torch.no_grad():
        assert torch.equal(model(tokens[:, :-1])[:, 2:].argmax(-1), added)


def test_the_parameters_of_grouped_queries_are_counted() -> None:
    config = config_with({"model.n_heads": 4, "model.n_kv_heads": 2, "model.d_model": 16})
    counts = build_model(config, vocab_size=9, device="meta").banks.count()
    assert counts["k"] == counts["v"] == counts["q"] // 2 == 6 * 16 * 8
    estimate = parameter_count(config, 9)
    assert {role: counts[role] for role in ("q", "k", "v", "o", "bias")} == {
        role: estimate[role] for role in ("q", "k", "v", "o", "bias")
    }


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_kv_heads": 3}, "model.n_kv_heads: found 3; allowed a divisor of model.n_heads = 2"),
        ({"attention": "softmx"}, "model.attention: unknown attention 'softmx'; did you mean"),
        (
            {"attention_options": {"window": 0}},
            "model.attention_options.window: found 0; allowed an integer from 1 on or null",
        ),
        (
            {"n_kv_heads": 1, "family": "encoder_decoder", "decoder_attention": "merged"},
            "model.n_kv_heads: found 1 with merged attention, which groups no heads; allowed null",
        ),
    ],
)
def test_settings_of_attention_that_do_not_fit_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        given = {f"model.{key}": value for key, value in settings.items()}
        build_model(config_with({"model.scheme": "pre_ln", **given}), vocab_size=9)
