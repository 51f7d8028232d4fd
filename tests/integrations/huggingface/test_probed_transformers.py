"""The probe on tiny models of transformers, peft and torch.ao: right and without effect."""

import copy
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from helpers.extensions import needs
from torch import Tensor, nn

import deepstack

VOCAB, D, SEQ, STEPS = 40, 16, 10, 4
TEXT = {
    "vocab_size": VOCAB, "hidden_size": D, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0,
    "bos_token_id": 0, "eos_token_id": 1, "max_position_embeddings": 32,
}  # fmt: skip


class Case(NamedTuple):
    """hidden: the module whose output is F.  loss: (model, batch) -> the loss."""

    model: Any
    batch: Callable[[int], dict[str, Tensor]]
    hidden: str
    loss: Callable[[Any, dict[str, Tensor]], Tensor]


def tokens(seed: int) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return {"input_ids": torch.randint(2, VOCAB, (2, SEQ), generator=rng)}


def labelled(model: Any, batch: dict[str, Tensor]) -> Tensor:
    out: Tensor = model(**batch, labels=batch["input_ids"]).loss
    return out


def causal(name: str, hidden: str, **more: Any) -> Case:
    transformers: Any = pytest.importorskip("transformers")
    kind = getattr(transformers, f"{name}Config")
    end = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
    model = getattr(transformers, f"{name}{end}")(kind(**TEXT | more))
    return Case(model, tokens, hidden, labelled)


def levit() -> Case:
    """It keeps the biases of attention in evaluation mode until train(); they alone are trained."""
    transformers: Any = pytest.importorskip("transformers")
    config = transformers.LevitConfig(
        image_size=64, hidden_sizes=[16, 24, 32], num_attention_heads=[2, 2, 2], depths=[1, 1, 1],
        key_dim=[8, 8, 8], num_labels=5,
    )  # fmt: skip
    model = transformers.LevitForImageClassification(config)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("attention_biases" in name)
        parameter.data.mul_(8.0 if parameter.ndim > 1 else 1.0)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.momentum = 0.0  # so that averages move nothing

    def images(seed: int) -> dict[str, Tensor]:
        rng = torch.Generator().manual_seed(seed)
        return {"pixel_values": torch.randn(2, 3, 64, 64, generator=rng)}

    return Case(
        model, images, "levit.encoder", lambda m, b: m(**b, labels=torch.tensor([1, 3])).loss
    )


def switch() -> Case:
    transformers: Any = pytest.importorskip("transformers")
    config = transformers.SwitchTransformersConfig(
        vocab_size=VOCAB, d_model=D, d_kv=8, d_ff=32, num_layers=2, num_heads=2, num_experts=3,
        num_decoder_layers=2, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1,
        expert_capacity=8, decoder_start_token_id=0,
    )  # fmt: skip
    model = transformers.SwitchTransformersForConditionalGeneration(config)

    def both(seed: int) -> dict[str, Tensor]:
        return tokens(seed) | {"decoder_input_ids": tokens(seed + 100)["input_ids"]}

    def loss(m: Any, b: dict[str, Tensor]) -> Tensor:
        logits = m(**b).logits.flatten(0, 1)
        return nn.functional.cross_entropy(logits, b["decoder_input_ids"].flatten())

    return Case(model, both, "decoder.final_layer_norm", loss)


def bert() -> Case:
    transformers: Any = pytest.importorskip("transformers")
    model = transformers.BertForMaskedLM(transformers.BertConfig(**TEXT))
    return Case(model, tokens, "bert.encoder", labelled)


def lora(*, merged: bool) -> Case:
    peft: Any = pytest.importorskip("peft")
    case = causal("GPT2", "base_model.model.transformer.ln_f", hidden_size=D)
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], lora_dropout=0.1, fan_in_fan_out=True)
    model = peft.get_peft_model(case.model, config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    if merged:
        model.merge_adapter()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("ln_" in name)
    return case._replace(model=model)


class Quantised(nn.Module):
    """A perceptron whose weights and activations are quantised while it trains."""

    def __init__(self) -> None:
        super().__init__()
        quantisation: Any = pytest.importorskip("torch.ao.quantization")
        layers = nn.Sequential(nn.Linear(D, D), nn.ReLU(), nn.Linear(D, D), nn.ReLU())
        layers.qconfig = quantisation.get_default_qat_qconfig("fbgemm")  # type: ignore[assignment]
        self.inner: Any = quantisation.prepare_qat(layers.train())
        self.out = nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.inner(x))
        return y


def quantised() -> Case:
    def numbers(seed: int) -> dict[str, Tensor]:
        return {"x": torch.randn(4, D, generator=torch.Generator().manual_seed(seed))}

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        out: Tensor = (model(**batch) - batch["x"].flip(0)).square().mean()
        return out

    return Case(Quantised(), numbers, "out", loss)


CASES: dict[str, Callable[[], Case]] = {
    "LeViT": levit,
    "Mixtral": lambda: causal("Mixtral", "model.norm", num_local_experts=3),
    "Switch": switch,
    "GPT-2": lambda: causal("GPT2", "transformer.ln_f"),
    "GPT-NeoX": lambda: causal("GPTNeoX", "gpt_neox.final_layer_norm"),
    "Mamba": lambda: causal("Mamba", "backbone.norm_f", state_size=4, expand=2, conv_kernel=3),
    "RecurrentGemma": lambda: causal(
        "RecurrentGemma", "model.final_norm", lru_width=D, attention_window_size=4,
        num_hidden_layers=3, block_types=["recurrent", "recurrent", "attention"],
    ),
    "BERT": bert,
    "LoRA": lambda: lora(merged=False),
    "LoRA, merged": lambda: lora(merged=True),
    "fake quantisation": quantised,
}  # fmt: skip


def build(name: str) -> Case:
    torch.manual_seed(0)
    case = CASES[name]()
    case.model.train()
    return case


def training(case: Case) -> Iterator[tuple[torch.optim.Optimizer, float]]:
    trained = [p for p in case.model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(7)
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        loss = case.loss(case.model, case.batch(step))
        loss.backward()
        optimizer.step()
        yield optimizer, loss.item()


@torch.no_grad()
def F_of(case: Case) -> Tensor:
    """F of a copy in evaluation mode, by a hook; draws do not count."""
    held = (x for m in case.model.modules() for x in vars(m).values() if isinstance(x, Tensor))
    graphs = {id(x): x.detach().clone() for x in held if not x.is_leaf}  # which have no copies
    with torch.random.fork_rng():
        model = copy.deepcopy(case.model, graphs).eval()
        found: list[Any] = []
        hook = model.get_submodule(case.hidden).register_forward_hook(
            lambda module, args, output: found.append(output)
        )
        model(**case.batch(0))
        hook.remove()
    F = getattr(found[-1], "last_hidden_state", found[-1])
    F = F[0] if isinstance(F, tuple) else F
    return F.double()  # type: ignore[no-any-return]


def tensors_of(model: nn.Module) -> dict[str, Any]:
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: (t.shape, t.detach().clone()) for name, t in named}


@needs("probe")
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the libraries
@pytest.mark.parametrize("name", CASES)
def test_training_is_the_same_and_the_update_is_right(name: str, tmp_path: Path) -> None:
    alone = build(name)
    F_0, moved, losses = F_of(alone), [], []
    for _, loss in training(alone):
        losses.append(loss)
        moved.append((F_of(alone) - F_0).norm(dim=-1).mean().item())
    case, found = build(name), []
    described = torch.optim.AdamW(case.model.parameters(), lr=0.01)
    options: dict[str, Any] = {"layers": (), "attribution_every": 1}
    with deepstack.probe(
        case.model, case.batch(0), described, out=tmp_path / "run", hidden=case.hidden, **options
    ) as probe:
        for _, loss in training(case):
            found.append(loss)
            probe.step(loss)
    assert found == losses
    ends = tensors_of(alone.model), tensors_of(case.model)
    assert ends[0].keys() == ends[1].keys()
    for key, (shape, values) in ends[0].items():
        assert shape == ends[1][key][0], key
        assert torch.equal(values.nan_to_num(), ends[1][key][1].nan_to_num()), key
    assert probe.run.steps["model_update"].tolist() == pytest.approx(moved, rel=1e-4)
