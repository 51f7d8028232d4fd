"""Analyses of models of transformers, one of each kind of attention, beside plain PyTorch."""

import contextlib
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.extensions import needs
from torch import Tensor, nn

import deepstack

VOCAB, D, DEPTH, SEQ = 40, 16, 4, 10
NAMES: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT2LMHeadModel": ("GPT2Config", {}),
    "LlamaForCausalLM": ("LlamaConfig", {}),  # rotary, grouped queries
    "OPTForCausalLM": ("OPTConfig", {"ffn_dim": 32, "word_embed_proj_dim": D}),
    "BloomForCausalLM": ("BloomConfig", {}),  # alibi
    "FalconForCausalLM": ("FalconConfig", {"multi_query": True, "head_dim": None}),
    "GPTNeoXForCausalLM": ("GPTNeoXConfig", {}),  # parallel residual
    "Qwen3ForCausalLM": ("Qwen3Config", {}),  # norms of queries and keys
    "Gemma2ForCausalLM": ("Gemma2Config", {"sliding_window": 4}),  # capped logits
    "Gemma3ForCausalLM": (
        "Gemma3TextConfig",
        {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "CohereForCausalLM": ("CohereConfig", {"logit_scale": 0.5}),
    "GraniteForCausalLM": ("GraniteConfig", {"logits_scaling": 2.0}),
    "MixtralForCausalLM": ("MixtralConfig", {"num_local_experts": 3}),
    "GptOssForCausalLM": ("GptOssConfig", {"num_local_experts": 4, "sliding_window": 4}),
    "DeepseekV2ForCausalLM": (
        "DeepseekV2Config",
        {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
         "v_head_dim": 8, "num_key_value_heads": 2, "first_k_dense_replace": 1,
         "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
         "moe_intermediate_size": 16},
    ),
}  # fmt: skip


def tokens() -> Tensor:
    return torch.randint(2, VOCAB, (1, SEQ), generator=torch.Generator().manual_seed(0))


def build(name: str) -> Any:
    """A model whose layers matter; transformers' default of a key-value cache stays on."""
    transformers: Any = pytest.importorskip("transformers")
    kind, more = NAMES[name]
    sizes = {
        "vocab_size": VOCAB, "hidden_size": D, "intermediate_size": 32, "num_hidden_layers": DEPTH,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0,
        "bos_token_id": 0, "eos_token_id": 1, "max_position_embeddings": 32,
    }  # fmt: skip
    torch.manual_seed(0)
    given = {key: value for key, value in (sizes | more).items() if value is not None}
    config = getattr(transformers, kind)(**given)
    with contextlib.suppress(Exception):  # models without experts
        config._experts_implementation = "eager"
    model = getattr(transformers, name)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6.0)
    return model


def layers_of(model: Any) -> nn.ModuleList:
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == DEPTH]
    return lists[0]


def holder_of(model: Any) -> tuple[Any, str]:
    layers = layers_of(model)
    return next((m, n) for m in model.modules() for n, c in m.named_children() if c is layers)


def loss_of(logits: Tensor) -> float:
    return F.cross_entropy(logits[0, :-1].float(), tokens()[0, 1:]).item()


def plain(model: Any) -> Tensor:
    return model(input_ids=tokens(), use_cache=False).logits  # type: ignore[no-any-return]


def loss_in_order(model: Any, order: Sequence[int]) -> float:
    """The loss with the layers in this order, each with the mask of its kind."""
    (holder, name), layers, config = holder_of(model), layers_of(model), model.config
    kinds = getattr(config, "layer_types", None)
    setattr(holder, name, nn.ModuleList(layers[i] for i in order))
    config.num_hidden_layers = len(order)
    if kinds is not None:
        config.layer_types = [kinds[i] for i in order]
    try:
        return loss_of(plain(model))
    finally:
        setattr(holder, name, layers)
        config.num_hidden_layers = DEPTH
        if kinds is not None:
            config.layer_types = kinds


def streams(model: Any) -> tuple[list[Tensor], dict[str, Any]]:
    """x_0 … x_N by hooks, and the keywords of layer 1."""
    states: list[Tensor] = []
    given: dict[str, Any] = {}
    hooks = []
    for index, layer in enumerate(layers_of(model)):

        def enter(_: Any, args: Any, kwargs: Any, index: int = index) -> None:
            if index == 0:
                states.append((args or [kwargs["hidden_states"]])[0].detach().clone())
            if index == 1:
                given.update(args=args[1:], kwargs=dict(kwargs), named=not args)

        def leave(_: Any, args: Any, output: Any) -> None:
            states.append((output[0] if isinstance(output, tuple) else output).detach().clone())

        hooks += [
            layer.register_forward_pre_hook(enter, with_kwargs=True),
            layer.register_forward_hook(leave),
        ]
    plain(model)
    for hook in hooks:
        hook.remove()
    return states, given


def read(model: Any, x: Tensor) -> Tensor:
    """The logits that the model reads if its last layer returns x."""

    def replace(_: Any, args: Any, output: Any) -> Any:
        return (x, *output[1:]) if isinstance(output, tuple) else x

    hook = layers_of(model)[-1].register_forward_hook(replace)
    logits = plain(model)
    hook.remove()
    return logits


@needs("depth_use")
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_a_model_of_transformers_has_the_numbers_of_plain_pytorch(name: str) -> None:
    model = build(name)
    ids = tokens()
    targets = torch.cat([ids[:, 1:], torch.full((1, 1), -100)], dim=1)
    found = deepstack.analyze_model(
        model, ids, ["lens", "effects", "swap", "jacobian"], targets=targets, probes=8, iterations=3
    )
    assert found["lens"].about["depth"] == DEPTH
    states, given = streams(model)
    losses = [loss_of(read(model, x)) for x in states]
    assert found["lens"].arrays["loss"] == pytest.approx(losses, rel=1e-4)
    assert found["lens"].scalars["final_loss"] == pytest.approx(loss_of(plain(model)), rel=1e-4)
    sizes = [((y - x).norm(dim=-1) / x.norm(dim=-1)).mean().item() for x, y in pairwise(states)]
    assert found["effects"].arrays["contribution"] == pytest.approx(sizes, rel=1e-4)
    every = range(DEPTH)
    swapped = [loss_in_order(model, [*every[:i], i + 1, i, *every[i + 2 :]]) for i in every[:-1]]
    assert found["swap"].arrays["loss_swapped"][:-1] == pytest.approx(swapped, rel=1e-4)
    repeated = [loss_in_order(model, [*every[: i + 1], *every[i:]]) for i in every]
    assert found["swap"].arrays["loss_repeated"] == pytest.approx(repeated, rel=1e-4)
    without = [loss_in_order(model, [j for j in every if j != i]) for i in every]
    assert found["effects"].arrays["loss_without"] == pytest.approx(without, rel=1e-4)
    assert model.config.use_cache is not False

    def layer(x: Tensor) -> Tensor:
        kwargs = {k: v for k, v in given["kwargs"].items() if k != "hidden_states"}
        stream = {"hidden_states": x} if given["named"] else {}
        output = layers_of(model)[1](
            *([] if given["named"] else [x]), *given["args"], **kwargs | stream
        )
        return output[0] if isinstance(output, tuple) else output  # type: ignore[no-any-return]

    jacobian = found["jacobian"]
    if name == "BloomForCausalLM":  # its activation is a function without forward mode
        assert "jacobian is not measured: the model's code fails" in jacobian.notes[0]
        return
    with torch.enable_grad():
        J = torch.autograd.functional.jacobian(layer, states[1]).reshape(SEQ * D, SEQ * D)
    exact = ((J - torch.eye(SEQ * D)).square().sum() / (SEQ * D)).sqrt().item()
    error = jacobian.arrays["from_identity_error"][1]
    assert abs(jacobian.arrays["from_identity"][1] - exact) < 5 * error
