"""A folded model computes the same, a refused one would not; plain tensors go there and back."""

import math
from typing import Any

import pytest
import torch
from helpers.configs import config_with
from helpers.papers import PAPERS
from helpers.sampling import some

from deepstack.base.errors import ConfigError
from deepstack.config import Config
from deepstack.model import build_model
from deepstack.model.build import Built
from deepstack.model.plain import from_plain, set_values, to_plain, values_of
from deepstack.schemes import SCHEMES, StackNorm
from deepstack_lab.ledger.fold import compare, fold

VOCAB, SEQ = 13, 6


def config_of(scheme: str = "pre_ln", depth: int = 3, **changes: Any) -> Config:
    keys = {
        "model.scheme": scheme, "model.depth": depth, "model.d_model": 16, "model.n_heads": 4,
        "model.d_ff": 24, "model.activation": "gelu", "model.head": "separate",
        "task.seq_len": SEQ, "train.batch_size": 3,
    }  # fmt: skip
    return config_with(keys, **changes)


def moved(config: Config) -> Built:
    """Every parameter away from where it starts: gains from 1, biases and scalars from 0."""
    built = build_model(config, vocab_size=VOCAB)
    torch.manual_seed(1)
    with torch.no_grad():
        for value in values_of(built.model).values():
            value.add_(0.3 * torch.rand_like(value) + 0.05)
    return built


def tokens(built: Built) -> torch.Tensor:
    length = SEQ * (2 if built.model.source_len else 1)
    return torch.arange(2 * length).view(2, length) * 5 % VOCAB


def folded(config: Config, built: Built, **options: Any) -> tuple[Config, Any, Any]:
    """Return the folded configuration and values, and their comparison with the original."""
    after = fold(config, built, **options)
    return *after, compare((config, values_of(built.model)), after, tokens(built))


@pytest.mark.parametrize(
    "scheme, family",
    some(((name, family) for name in SCHEMES.names() for family in SCHEMES[name].families), 4),
)
def test_a_scheme_is_folded_exactly_if_linear_maps_alone_read_its_norms(
    scheme: str, family: str
) -> None:
    config = config_of(scheme, depth=4, model__family=family)
    built = moved(config)
    norms = [m for m in built.model.modules() if isinstance(m, StackNorm)]
    if not norms:
        with pytest.raises(ConfigError, match="nothing to fold: no norm"):
            fold(config, built)
        return
    small, values, found = folded(config, built)
    assert not (small.model.norm.gain or small.model.norm.bias)
    before, after = (sum(map(torch.numel, v.values())) for v in (values_of(built.model), values))
    assert before - after == 2 * sum(norm.shape[0] for norm in norms)
    assert found.equal is PAPERS[scheme].folds
    assert found.equal or found.difference > 1e-3 * found.largest


@pytest.mark.parametrize(
    "changes",
    [
        {"model__norm__kind": "rms", "model__norm__bias": False},
        {"model__norm__kind": "batch"},
        {"model__norm__kind": "dynamic_tanh"},
        {"model__norm__gain": False},
        {"model__bias": False},
        {"model__bias": False, "model__norm__bias": False},
        {"model__head": "bert"},
        {"model__init__distribution": "ntk"},
        {"train__lr_factors": {"q": 0.5}},
        {"train__trainable": ("q", "norm_gain")},
        {"train__trainable": ("norm_gain",)},
        {"model__family": "encoder_decoder", "train__lr_factors": {"cross_k": 0.5}},
        {"runtime__banks": False},
        {"model__scheme": "mix_ln", "model__scheme_options": {"share": 0.0}},
    ],
    ids=lambda changes: " ".join(f"{k.split('__')[-1]}={v}" for k, v in changes.items()),
)
def test_fold_keeps_the_function_under_other_settings(changes: dict[str, Any]) -> None:
    config = config_of(**changes)
    built = moved(config)
    small, values, found = folded(config, built)
    assert found.equal, found
    assert not small.model.norm.gain
    assert small.model.norm.bias == (config.model.norm.bias and not config.model.bias)
    set_values(build_model(small, vocab_size=VOCAB).model, values)


def test_trained_norms_of_queries_and_keys_are_named_as_the_reason() -> None:
    config = config_of(model__qk_norm=True)
    with pytest.raises(ConfigError, match=r"model.qk_norm: true: .*_norm, whose gain is trained"):
        folded(config, moved(config))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model__bias": False},
        {"model__norm__kind": "dynamic_tanh"},
        {"model__norm__kind": "rms", "model__norm__bias": False},
        {"model__family": "encoder_decoder"},
        {"model__norm__gain": False},
        {"model__scheme": "complete_p", "model__scheme_options": {"base_width": 4}},
    ],
)
def test_a_tied_head_keeps_the_last_gain_unless_untied(changes: dict[str, Any]) -> None:
    config = config_of(model__head="tied", **changes)
    built = moved(config)
    small, values, found = folded(config, built)
    assert found.equal and small.model.head == "tied"
    gains = [key for key in values if key.endswith("norm.gain")]
    last = [*built.model.stacks][-1]
    assert (f"{last}.final_norm.gain" in gains) == bool(small.model.norm.final_gain)
    assert len(gains) == len(built.model.stacks) * config.model.norm.gain
    set_values(build_model(small, vocab_size=VOCAB).model, values)
    small, values, found = folded(config, built, untie=True)
    assert found.equal and small.model.head == "separate"
    assert values["head.weight"].shape == (VOCAB, 16)
    assert not [key for key in values if key.endswith("norm.gain")]


def test_a_bias_that_stays_in_its_norm_needs_a_gain_other_than_0() -> None:
    config = config_of(model__bias=False)
    built = moved(config)
    with torch.no_grad():
        values_of(built.model)["encoder.layers.0.scheme.attention_norms.0.gain"][0] = 0
    with pytest.raises(ConfigError, match="a bias cannot be divided by a gain of 0"):
        fold(config, built)


def test_one_wrong_number_would_be_seen() -> None:
    config = config_of()
    built = moved(config)
    before, (small, values) = (config, values_of(built.model)), fold(config, built)
    for name, change in (("layers.1.attention.qkv", 1e-5), ("layers.1.attention.o", math.nan)):
        values[f"encoder.{name}"][0, 0] += change
        assert not compare(before, (small, values), tokens(built)).equal


@pytest.mark.parametrize("scheme", sorted(SCHEMES))
@pytest.mark.parametrize("banks", [True, False])
def test_plain_tensors_go_there_and_back(scheme: str, banks: bool) -> None:
    config = config_of(
        scheme, runtime__banks=banks, model__head="bert", model__norm__kind="batch",
        model__gated=not banks,
    )  # fmt: skip
    model = moved(config).model
    values = values_of(model)
    plain = to_plain(model, values)
    torch.testing.assert_close(from_plain(model, plain), values, rtol=0, atol=0)
    a = plain["encoder.layers.1.attention.k.weight"]
    assert torch.equal(a, model.layers[1].attention.qkv[16:32])  # type: ignore[union-attr, index]
    assert torch.equal(plain["embedding.weight"], model.embedding)
    if not banks:
        assert plain["encoder.layers.2.feed_forward.w3.weight"].shape == (24, 16)
    del plain["embedding.weight"]
    with pytest.raises(ConfigError, match=r"have no embedding\.weight"):
        from_plain(model, plain)
