"""Settings of self-attention against plain PyTorch: grouped queries, a window, a soft cap."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.configs import config_with
from helpers.extensions import needs
from helpers.family_models import perturbed
from helpers.sampling import some
from helpers.small_runs import small
from torch import Tensor

import deepstack
from deepstack.base.errors import ConfigError
from deepstack.config import parameter_count
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


def literal(attention: Any, options: dict[str, Any], x: Tensor, *of_k_and_v: Tensor) -> Tensor:
    """Return G(x) head by head, from W_q, W_k, W_v and W_o; k and v may have their own inputs."""
    size, kv_heads = D // HEADS, options.get("n_kv_heads", HEADS)
    chosen = options.get("attention_options", {})
    cap, window = chosen.get("soft_cap"), chosen.get("window", math.inf)
    of_k, of_v = of_k_and_v or (x, x)
    if kv_heads == HEADS:
        maps = list(zip(attention.qkv.chunk(3), attention.qkv_bias.chunk(3), strict=True))
    else:
        maps = list(zip(attention.kv.chunk(2), attention.kv_bias.chunk(2), strict=True))
        maps.insert(0, (attention.q, attention.q_bias))
    q, k, v = (z @ W.T + b for z, (W, b) in zip((x, of_k, of_v), maps, strict=True))
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
def test_q_k_and_v_have_separate_inputs_where_a_scheme_asks(options: dict[str, Any]) -> None:
    attention = model_of(options, "decoder", model__scheme="mudd").layers[0].attention
    x, k, v = torch.randn(3, 2, SEQ, D)
    with torch.no_grad():
        read = attention.slots["inputs"](x, (k, v))
        expected = literal(attention, options, *read)
        torch.testing.assert_close(attention(x, (k, v)), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "changes",
    [
        {"model__init__distribution": "ntk"},
        {"model__init__distribution": "ntk", "model__bias": False, "model__n_kv_heads": 2},
        {"train__lr_factors": {"k": 0.5}},
    ],
    ids=str,
)
def test_separate_products_of_one_input_are_the_joint_product(changes: dict[str, Any]) -> None:
    attention = model_of({}, "encoder", **changes).layers[0].attention
    x = torch.randn(2, SEQ, D)
    torch.testing.assert_close(attention.products_of_each((x, x, x)), list(attention.products(x)))


@needs("ledger")
@every_option
def test_a_decoder_decodes_position_by_position(options: dict[str, Any]) -> None:
    from deepstack_lab.ledger.decoding import generate

    model = model_of(options, "decoder").eval()
    start = torch.arange(3)[None]
    added = generate(model, start, 5)
    tokens = torch.cat([start, added], dim=1)
    with torch.no_grad():
        assert torch.equal(model(tokens[:, :-1])[:, 2:].argmax(-1), added)


@pytest.mark.parametrize("family", ["encoder", "decoder"])
@pytest.mark.parametrize("options", [{}, *OPTIONS.values()], ids=["plain", *OPTIONS])
def test_packed_documents_are_read_as_if_each_were_alone(
    options: dict[str, Any], family: str
) -> None:
    """Rotary positions, so that a document alone has the same distances."""
    model = model_of(options | {"document_end": 0}, family, model__positions="rotary").eval()
    tokens = torch.tensor([[3, 5, 0, 7, 0, 9, 4, 8], [1, 2, 3, 4, 5, 6, 7, 8]])
    with torch.no_grad():
        together = model.hidden(tokens)
        for row, parts in ((0, [(0, 3), (3, 5), (5, 8)]), (1, [(0, 8)])):
            for first, last in parts:
                alone = model.hidden(tokens[row : row + 1, first:last])[0]
                torch.testing.assert_close(together[row, first:last], alone, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(together[0, 3:5], model.hidden(tokens[:1, :5] + 1)[0, 3:5])


@pytest.mark.parametrize(
    "more", some([{}, {"runtime__recompute_every": 2}, {"train__shards": 2}], 3)
)
def test_a_run_with_documents_is_the_same_on_every_fast_path(
    more: dict[str, Any], tmp_path: Path
) -> None:
    given: dict[str, Any] = {"train__steps": 4, "train__eval_every": 0}
    given |= {"model__document_end": 3, "model__family": "decoder", "task__name": "markov"}
    runs = [
        deepstack.train(small(**given, **more, runtime__replay=replay), out=tmp_path / str(replay))
        for replay in (False, "python")
    ]
    assert all(run.state == "done" for run in runs)
    one, other = (run.steps[["loss", "grad_norm", "model_update"]].to_numpy() for run in runs)
    np.testing.assert_allclose(one, other, rtol=1e-4)
    plain = deepstack.train(small(**given | {"model__document_end": None}), out=tmp_path / "plain")
    assert abs(plain.steps.loss.iloc[0] - runs[0].steps.loss.iloc[0]) > 1e-4
    entropies = [
        run.folder.read_layers("attention_entropy_attention")[1][0].mean() for run in (*runs, plain)
    ]
    assert entropies[0] == pytest.approx(entropies[1], rel=1e-4) and entropies[0] < entropies[2]


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
            {"document_end": 9},
            "model.document_end: found 9; allowed a token of the task, 0 to 8",
        ),
        (
            {"document_end": 1, "family": "encoder_decoder"},
            "model.document_end: found 1 with model.family=encoder_decoder",
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
