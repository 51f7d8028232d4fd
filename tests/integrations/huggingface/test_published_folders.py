"""Folders as they are published: constants beside the weights, and code that transformers has."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import deepstack
from deepstack.base.errors import ConfigError

TOKENS = torch.arange(20).view(2, 10)
SIZES = {
    "vocab_size": 20, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "max_position_embeddings": 16, "num_layers": 2, "num_heads": 2,
    "attention_types": [[["global", "local"], 1]], "window_size": 4, "n_positions": 16,
    "n_embd": 16, "n_layer": 2, "n_head": 2, "rotary_dim": 4, "bos_token_id": 0, "eos_token_id": 0,
    "d_model": 16, "n_layers": 2, "n_heads": 2, "max_seq_len": 16,
}  # fmt: skip
TRIL = torch.ones(16, 16).tril().view(1, 1, 16, 16)
RATES = 10000 ** (-torch.arange(0, 2, 2) / 2)


def gpt2(layer: int) -> dict[str, Tensor]:
    return {f"transformer.h.{layer}.attn.bias": TRIL.to(torch.uint8)}


def gpt_neo(layer: int) -> dict[str, Tensor]:
    """Every second layer has a window of four positions."""
    mask = TRIL - TRIL.tril(-4) if layer else TRIL
    start = f"transformer.h.{layer}.attn.attention"
    return {f"{start}.bias": mask.to(torch.uint8), f"{start}.masked_bias": torch.tensor(-1e9)}


def gpt_j(layer: int) -> dict[str, Tensor]:
    start = f"transformer.h.{layer}.attn"
    masks = dict.fromkeys((f"{start}.bias", f"{start}.causal_mask"), TRIL.bool())
    return {name: mask.clone() for name, mask in masks.items()} | {
        f"{start}.masked_bias": torch.tensor(-1e9)
    }


def gpt_neox(layer: int) -> dict[str, Tensor]:
    start = f"gpt_neox.layers.{layer}.attention"
    rates = {f"{start}.rotary_emb.inv_freq": RATES.half()}
    return rates | {f"{start}.bias": TRIL.bool(), f"{start}.masked_bias": torch.tensor(-1e9)}


def saved(name: str, folder: Path, more: Callable[[int], dict[str, Tensor]]) -> Tensor:
    """Save a model and further tensors of its two layers; return the model's logits."""
    transformers: Any = pytest.importorskip("transformers")
    torch.manual_seed(0)
    kind = f"{name}LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM"
    model = getattr(transformers, kind)(getattr(transformers, f"{name}Config")(**SIZES)).eval()
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    save_file(load_file(file) | more(0) | more(1), file, {"format": "pt"})
    with torch.no_grad():
        out: Tensor = model(TOKENS).logits
    return out


def with_code(folder: Path, **changes: Any) -> None:
    """Let config.json name code of the folder."""
    file = folder / "config.json"
    config = json.loads(file.read_text()) | {"auto_map": {"AutoModelForCausalLM": "m.M"}}
    file.write_text(json.dumps(config | changes))


def loss_of(logits: Tensor) -> float:
    flat = logits[:, :-1].flatten(0, 1)
    return torch.nn.functional.cross_entropy(flat, TOKENS[:, 1:].flatten()).item()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("GPT2", gpt2), ("GPTNeo", gpt_neo), ("GPTJ", gpt_j), ("GPTNeoX", gpt_neox),
    ],
)  # fmt: skip
@pytest.mark.parametrize("prefix", ["", "module."])
def test_constants_beside_the_weights_are_left_out(
    name: str, more: Any, prefix: str, tmp_path: Path
) -> None:
    logits = saved(name, tmp_path, more)
    file = tmp_path / "model.safetensors"
    save_file({prefix + key: x for key, x in load_file(file).items()}, file, {"format": "pt"})
    found = deepstack.analyze_huggingface(tmp_path, TOKENS)["lens"]
    assert found.scalars["final_loss"] == pytest.approx(loss_of(logits), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Falcon", "Mpt"])
def test_code_of_a_folder_is_not_needed_where_transformers_has_the_model(
    name: str, tmp_path: Path
) -> None:
    logits = saved(name, tmp_path, lambda layer: {})
    with_code(tmp_path)
    found = deepstack.analyze_huggingface(tmp_path, TOKENS)["lens"]
    assert found.scalars["final_loss"] == pytest.approx(loss_of(logits), rel=1e-5)
    assert found.notes == [
        f"the folder's code was not run: {name.lower()} is built by transformers"
    ]
    with_code(tmp_path, model_type="mine")
    with pytest.raises(ConfigError, match="auto_map: transformers has no model 'mine', and code"):
        deepstack.analyze_huggingface(tmp_path, TOKENS)


MASK = "transformer.h.0.attn.bias"
NOT_CONSTANT: dict[str, tuple[dict[str, Tensor], str]] = {
    "a mask of later positions": (
        {MASK: TRIL.mT.contiguous().bool()},
        f"{MASK} is bool, and not a mask",
    ),
    "a mask without a rule": ({MASK: (TRIL - torch.eye(16)[3]).abs().bool()}, "and not a mask"),
    "packed weights": ({MASK: 7 * TRIL.to(torch.uint8)}, f"{MASK} is uint8, and not a mask"),
    "bytes of another shape": ({"x": torch.ones(2, 3, dtype=torch.uint8)}, "x is U8; allowed F64"),
    "a mask in floats": ({"transformer.h.0.attn.mask": 2 * TRIL}, r"lacks tensors .*\.attn\.mask"),
    "a small masked bias": ({"h.masked_bias": torch.tensor(-1.0)}, "lacks tensors .*masked_bias"),
    "another model's rates": ({"h.inv_freq": 2 * RATES}, "lacks tensors of the files: h.inv_freq"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NOT_CONSTANT)
def test_other_tensors_are_no_constants(name: str, tmp_path: Path) -> None:
    tensors, message = NOT_CONSTANT[name]
    saved("GPTJ", tmp_path, lambda layer: tensors)
    with pytest.raises(ConfigError, match=message):
        deepstack.analyze_huggingface(tmp_path, TOKENS)
