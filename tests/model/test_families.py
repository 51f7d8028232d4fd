"""Decoders, alone and beside an encoder: their masks, their start and decoding."""

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.extensions import needs
from helpers.family_models import SEQ, VOCAB, config, perturbed, tokens_for
from torch import Tensor, nn

import deepstack
from deepstack.base.errors import ConfigError
from deepstack.model import build_model
from deepstack.schemes import FAMILIES, SCHEMES, stack_schemes
from deepstack.tasks import TASKS, task_families

DECODERS = [
    (name, family)
    for name, scheme in SCHEMES.items()
    for family in scheme.families
    if family != "encoder"
]
MERGING = [name for name, s in SCHEMES.items() if s.merges and "encoder_decoder" in s.families]


BOTH = {"model__family": "encoder_decoder"}
MERGED = BOTH | {"model__decoder_attention": "merged"}
AVERAGE = BOTH | {"model__decoder_attention": "average"}
ROTARY = {"model__positions": "rotary"}
DECODED = [
    *({"model__scheme": name, "model__family": family} for name, family in DECODERS),
    *(MERGED | {"model__scheme": name} for name in MERGING),
    MERGED | {"model__scheme": "ds_init", "model__qk_norm": True},
    *(AVERAGE | {"model__scheme": name} for name in ("post_ln", "sub_ln", "deepnorm")),
    *(
        ROTARY | {"model__scheme": name, "model__family": family, "model__qk_norm": name != "ngpt"}
        for name, family in DECODERS
        if name in ("deepnorm", "real_former", "hyper_connections", "ngpt")
    ),
]


@needs("ledger")
@pytest.mark.parametrize("changes", DECODED, ids=str)
def test_tokens_decoded_one_by_one_have_the_logits_of_the_whole(changes: dict[str, Any]) -> None:
    """So that no position sees those after it."""
    from deepstack_lab.ledger.decoding import decoder_of

    model = perturbed(**changes).model.double()
    tokens = tokens_for(model)
    expected = model(tokens).detach()
    assert expected.shape == (2, SEQ, VOCAB)
    source, target = model.split(tokens)
    step = decoder_of(model, source if model.source_len else None)
    found = torch.stack([step(target[:, i]) for i in range(SEQ)], dim=1)
    scale = expected.abs().amax().item()  # a perturbed stack without a norm may be at hundreds
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10 * scale)
    with pytest.raises(ConfigError, match=r"task.seq_len: found 8"):
        step(target[:, 0])


@needs("ledger")
def test_generated_tokens_are_the_most_probable_ones() -> None:
    from deepstack_lab.ledger.decoding import generate

    model = perturbed(model__family="encoder_decoder").model
    source, target = model.split(tokens_for(model))
    generated = generate(model, target[:, :2], 4, source=source)
    shown = torch.cat([source, target[:, :2], generated], dim=1)
    expected = model(shown[:, :-1])[:, 1:].argmax(dim=-1)
    assert torch.equal(generated, expected)
    for without in (perturbed().model, model):
        with pytest.raises(ConfigError, match="allowed decoder"):
            generate(without, target[:, :2], 4)
    for begin, length in ((0, 2), (1, 0)):
        with pytest.raises(ConfigError, match=f"length={length} after {begin} tokens; allowed"):
            generate(model, target[:, :begin], length, source=source)
    with pytest.raises(ConfigError, match="all these positions are filled") as caught:
        generate(model, target[:, :1], model.seq_len + 1, source=source)
    assert caught.value.key == "task.seq_len"
    with pytest.raises(ConfigError, match="a source of 9 tokens, allowed at most 8"):
        generate(model, target[:, :1], 2, source=torch.zeros(1, 9, dtype=torch.int64))


@needs("ledger")
def test_merged_attention_is_its_equation() -> None:
    from deepstack_lab.ledger.claims.attention import merged_formula

    model = perturbed(model__scheme="post_ln", **MERGED).model
    merged = model.decoder.layers[1].attention
    x, m = torch.randn(2, 5, 16), torch.randn(2, 7, 16)
    torch.testing.assert_close(merged(x, m), merged_formula(merged, x, m), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["post_ln", "deepnorm"])
def test_an_average_attention_is_its_equation(name: str) -> None:
    model = perturbed(model__scheme=name, **AVERAGE).model.double()
    own = model.decoder.layers[1].attention
    x = torch.randn(2, 5, 16, dtype=own.q.dtype)
    for i in range(5):
        mean = sum(x[:, j] for j in range(i + 1)) / (i + 1)
        hidden = (mean @ own.v.T + own.v_bias).clamp(min=0)
        g = hidden @ own.o.T + own.o_bias
        both = torch.cat([x[:, i], g], dim=1)
        gate_in = 1 / (1 + torch.exp(-(both @ own.q.T + own.q_bias)))
        gate_of_g = 1 / (1 + torch.exp(-(both @ own.k.T + own.k_bias)))
        torch.testing.assert_close(own(x)[:, i], gate_in * x[:, i] + gate_of_g * g)


@needs("bound")
def test_an_average_attention_is_trained_without_a_bound(tmp_path: Path) -> None:
    run = deepstack.train(config(**AVERAGE, model__qk_norm=True), out=tmp_path)
    assert run.state == "done" and np.isnan(run.layers("bound_attention")[1]).all()


@pytest.mark.parametrize("roles", [["cross_v"], ["cross_q", "embedding"]])
def test_one_role_of_the_decoder_may_be_trained_alone(roles: list[str], tmp_path: Path) -> None:
    given = config(model__family="encoder_decoder", train__trainable=roles)
    gradients = deepstack.train(given, out=tmp_path).layers("grad_norm")[1]
    assert (gradients[:, :3] == 0).all() and (gradients[:, 3:] > 0).all()


def torch_pairs(ours: Any, theirs: Any) -> list[tuple[Tensor, Tensor]]:
    """Return the parameters of our stack beside torch's."""
    pairs: list[tuple[Tensor, Tensor]] = []
    norms = [(ours.final_norm, theirs.norm)] if ours.final_norm is not None else []
    for a, b in zip(ours.layers, theirs.layers, strict=True):
        G, f = a.attention, a.feed_forward
        pairs += [
            (G.qkv, b.self_attn.in_proj_weight), (G.qkv_bias, b.self_attn.in_proj_bias),
            (G.o, b.self_attn.out_proj.weight), (G.o_bias, b.self_attn.out_proj.bias),
            (f.w1, b.linear1.weight), (f.w1_bias, b.linear1.bias),
            (f.w2, b.linear2.weight), (f.w2_bias, b.linear2.bias),
        ]  # fmt: skip
        if hasattr(a, "cross_attention"):
            G, other = a.cross_attention, b.multihead_attn
            pairs += [
                (torch.cat([G.q, G.kv]), other.in_proj_weight),
                (torch.cat([G.q_bias, G.kv_bias]), other.in_proj_bias),
                (G.o, other.out_proj.weight), (G.o_bias, other.out_proj.bias),
            ]  # fmt: skip
        each = enumerate(a.scheme.per_sublayer("norms"), start=1)
        norms += [(norm, getattr(b, f"norm{index}")) for index, (norm,) in each]
    for norm, reference in norms:
        pairs += [(norm.gain, reference.weight), (norm.bias, reference.bias)]
    return pairs


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")  # torch warns of its own choice
@pytest.mark.parametrize(("name", "norm_first"), [("post_ln", False), ("pre_ln", True)])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_stacks_equal_torchs_own(name: str, norm_first: bool, activation: str) -> None:
    """Forward and every gradient of encoder and decoder, with copied weights."""
    settings: dict[str, Any] = {"model__scheme": name, "model__activation": activation}
    model = perturbed(**BOTH, model__decoder_depth=2, **settings).model.double()
    theirs = nn.Transformer(
        16, 2, 3, 2, 64, dropout=0.0, activation=activation, batch_first=True,
        norm_first=norm_first, dtype=torch.float64,
    )  # fmt: skip
    pairs = []
    for side, own in model.stacks.items():
        stack = getattr(theirs, side)
        pairs += torch_pairs(own, stack)
        if own.final_norm is None:
            stack.norm = None  # nn.Transformer puts a norm after Post-LN's own
    with torch.no_grad():
        for ours, copied in pairs:
            copied.copy_(ours)
    tokens = tokens_for(model)
    found = model.hidden(tokens)
    source, target = model.split(model.embed(tokens).detach())
    mask = nn.Transformer.generate_square_subsequent_mask(SEQ, dtype=torch.float64)
    expected = theirs(source, target, tgt_mask=mask, tgt_is_causal=True)
    torch.testing.assert_close(found, expected)
    weights = torch.randn_like(expected)
    (expected * weights).sum().backward()
    (found * weights).sum().backward()
    for ours, copied in pairs:
        if ours.is_leaf:
            torch.testing.assert_close(ours.grad, copied.grad)


# Figure 2 of DeepNet and equations 11 and 17 of Magneto, for N encoder and M decoder layers
@pytest.mark.parametrize("N", [6, 12, 18, 100, 200, 1000])
@pytest.mark.parametrize("ratio", [1, 3])
def test_coefficients_of_an_encoder_decoder(N: int, ratio: int) -> None:
    M = max(1, N // ratio)
    depths = {"model__depth": N, "model__decoder_depth": M, "model__family": "encoder_decoder"}

    def scheme(name: str, side: str) -> Any:
        return stack_schemes(config(model__scheme=name, **depths))[side]

    alphas = [scheme("deepnorm", side).alpha for side in ("encoder", "decoder")]
    growth = N ** (4 / 16) * M ** (1 / 16)
    assert alphas == pytest.approx([0.81 * growth, (3 * M) ** 0.25], rel=1e-12)
    gains = {
        ("deepnorm", "encoder", "v"): 0.87 / growth,
        ("deepnorm", "decoder", "cross_o"): (12 * M) ** -0.25,
        ("deepnorm", "decoder", "cross_q"): 1.0,
        ("sub_ln", "encoder", "w1"): (np.log(3 * M) * np.log(2 * N) / 3) ** 0.5,
        ("sub_ln", "decoder", "w1"): np.log(3 * M) ** 0.5,
        ("sub_ln", "decoder", "cross_v"): 1.0,
        ("t_fixup", "encoder", "o"): 0.67 * N**-0.25,
        ("t_fixup", "decoder", "o"): (9 * M) ** -0.25,
        ("t_fixup", "decoder", "cross_v"): (9 * M) ** -0.25,
        ("t_fixup", "encoder", "embedding"): (9 * N) ** -0.25,
        ("fixup", "decoder", "w1"): (2 * N + 3 * M) ** -0.5,
        ("fixup", "decoder", "cross_o"): 0.0,
        ("ds_init", "decoder", "cross_k"): 1.0,
        ("post_ln_init", "decoder", "cross_k"): 1 / M,
    }
    for (name, side, role), value in gains.items():
        assert scheme(name, side).gain(role, 1) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize("family", FAMILIES)
def test_sides_have_different_random_numbers_and_a_lone_stack_has_an_encoders(family: str) -> None:
    alone = build_model(config(), vocab_size=VOCAB).banks.state()
    other = build_model(config(model__family=family), vocab_size=VOCAB).banks.state()
    if family != "encoder_decoder":
        renamed = {key.replace("encoder.", f"{family}."): alone[key] for key in alone}
        torch.testing.assert_close(other, renamed, rtol=0, atol=0)
    else:
        key = "layers.feed_forward.w2"
        sides = other[f"encoder.{key}"].flatten(1), other[f"decoder.{key}"].flatten(1)
        assert torch.cosine_similarity(*sides).abs().max() < 0.2


TASKS_OF = [
    (task, family)
    for task, family in product(TASKS, ("decoder", "encoder_decoder"))
    if family in task_families(task)
]


@pytest.mark.parametrize(("task", "family"), TASKS_OF)
def test_every_task_trains_every_family(task: str, family: str, tmp_path: Path) -> None:
    own: dict[str, Any] = {"task__n": 3, "task__max_k": 1} if task == "hops" else {}
    if task == "tokens":
        own["task__path"] = str(tmp_path / "tokens.bin")
        (np.arange(20_000) * 7 % 50).astype("<u2").tofile(own["task__path"])
    given = config(task__name=task, model__family=family, **own)
    run = deepstack.train(given, out=tmp_path / "results")
    assert run.state == "done" and np.isfinite(run.steps["model_update"]).all()
    layers = 6 if family == "encoder_decoder" else 3
    for name in ("grad_norm", "param_update_norm", "ln_input_feed_forward"):
        assert run.layers(name)[1].shape == (3, layers)
        assert np.isfinite(run.layers(name)[1]).all()
    if family == "encoder_decoder":
        crossing = run.layers("ln_input_cross_attention")[1]
        assert np.isnan(crossing[:, :3]).all() and np.isfinite(crossing[:, 3:]).all()


def test_slots_lie_in_the_sublayers_that_a_decoder_has() -> None:
    sub_ln, fixup = (
        perturbed(model__family="encoder_decoder", model__scheme=name).model.decoder.layers[1]
        for name in ("sub_ln", "fixup")
    )
    assert not sub_ln.cross_attention.slots and set(sub_ln.attention.slots) == {"before_out"}
    assert set(fixup.cross_attention.slots) == {"before_cross_out"}
