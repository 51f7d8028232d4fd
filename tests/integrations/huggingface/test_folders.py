"""Damaged and unfit folders of Hugging Face: each is refused with one line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.command_line import refusal
from helpers.extensions import needs
from safetensors.torch import load_file, save_file

import deepstack
from deepstack.base.errors import ConfigError, ResourceError

TOKENS = torch.arange(20).view(2, 10)


def edit(**changes: Any) -> Callable[[Path], None]:
    """An edit of config.json; None removes a key."""

    def apply(folder: Path) -> None:
        file = folder / "config.json"
        config = json.loads(file.read_text()) | changes
        file.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))

    return apply


def tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        held = load_file(folder / "model.safetensors")
        change(held)
        save_file(held, folder / "model.safetensors", {"format": "pt"})

    return apply


def content(name: str, data: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(data) and None


def index(name: Any) -> Callable[[Path], None]:
    """Weights in shards, of which the index names one as given."""

    def apply(folder: Path) -> None:
        weights = folder / "model.safetensors"
        held = list(load_file(weights))
        weights.rename(folder / "part.safetensors")
        names = {key: "part.safetensors" for key in held} | {held[0]: name}
        text = json.dumps({"metadata": {}, "weight_map": names})
        (folder / "model.safetensors.index.json").write_text(text)

    return apply


def truncated(size: int) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:size])

    return apply


def rename(old: str, new: str) -> Callable[[Path], None]:
    return tensors(lambda held: held.update({new: held.pop(old)}))


NORM = "transformer.ln_f.weight"
LAST = "transformer.h.1."
DAMAGED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "tensor missing": (tensors(lambda t: t.pop(NORM)), f"lack weights .* random: {NORM}"),
    "tensor renamed": (rename(NORM, "transformer.norm.weight"), f"lack weights .*: {NORM}"),
    "tensor of another shape": (
        tensors(lambda t: t.update({NORM: torch.ones(7)})), f"other shapes .*: {NORM}",
    ),
    "tensor unexpected": (
        tensors(lambda t: t.update(more=torch.ones(7))), "lacks tensors of the files: more",
    ),
    "layer missing": (
        tensors(lambda t: [t.pop(k) for k in list(t) if k.startswith(LAST)]), "lack weights",
    ),
    "layer more in the file": (edit(n_layer=1), "lacks tensors of the files: transformer.h.1"),
    "layer more in the config": (edit(n_layer=3), "lack weights of the model"),
    "width of the config": (edit(n_embd=24), "other shapes|not a causal"),
    "vocabulary of the config": (edit(vocab_size=30), "other shapes .*: transformer.wte.weight"),
    "absurd layers": (edit(n_layer=10**9), "n_layer: found 1,000,000,000; the weights are"),
    "absurd width": (edit(n_embd=10**12), "n_embd: found 1,000,000,000,000; the weights"),
    "absurd vocabulary": (edit(vocab_size=10**9), "vocab_size: found 1,000,000,000; the"),
    "negative layers": (edit(n_layer=-3), "n_layer: found -3; the weights are"),
    "a word for a number": (edit(n_layer="two"), "not a causal language model"),
    "heads that do not divide": (edit(n_head=3), "not a causal language model"),
    "not a number": (tensors(lambda t: t[NORM].fill_(float("nan"))), "not finite"),
    "another model": (edit(model_type="t5"), "not a causal language model|lack"),
    "unknown model": (edit(model_type="no_such_model"), "not a causal language model"),
    "no model": (edit(model_type=None), "model_type: found None"),
    "quantized": (edit(quantization_config={"bits": 4}), "quantization_config: the weights are"),
    "code": (
        edit(auto_map={"AutoModelForCausalLM": "m.M"}, model_type="mine"),
        "auto_map: transformers has no model 'mine'",
    ),
    "weights elsewhere": (edit(transformers_weights="../w.safetensors"), "names other weights"),
    "config no JSON": (content("config.json", b"{"), "config.json: Expecting property"),
    "config a list": (content("config.json", b"[1]"), "config.json: found list; allowed a mapping"),
    "config no text": (content("config.json", b"\xff\xfe"), "config.json: .*decode"),
    "config nested deeply": (content("config.json", b'{"a":' * 9**5), "config.json: "),
    "weights empty": (truncated(0), r"model.safetensors: .*header"),
    "weights cut in the header": (truncated(100), r"model.safetensors: .*header"),
    "weights cut in a tensor": (truncated(3000), r"model.safetensors: .*"),
    "integers": (
        tensors(lambda t: t.update({NORM: torch.ones(16, dtype=torch.int8)})), "is I8; allowed",
    ),
    "index outside": (index("../part.safetensors"), "found the file '../part.safetensors'"),
    "index absolute": (index("/tmp/part.safetensors"), "found the file '/tmp/part.safet"),
    "index of a missing file": (index("other.safetensors"), "other.safetensors is missing"),
    "index of a number": (index(3), "found the file '3'; allowed"),
    "adapter": (content("adapter_config.json", b"{}"), "PEFT adapter .*merge_and_unload"),
}  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    transformers: Any = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=20, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0,
        eos_token_id=0, use_cache=True,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("whole")
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def copy(whole: Path, folder: Path) -> Path:
    for file in whole.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_folder_is_refused_with_one_line(name: str, whole: Path, tmp_path: Path) -> None:
    damage, message = DAMAGED[name]
    damage(copy(whole, tmp_path))
    with pytest.raises(ConfigError, match=message) as raised:
        deepstack.analyze_huggingface(tmp_path, TOKENS)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 500


@pytest.mark.slow
@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod."])
def test_prefixes_of_wrappers_are_stripped_with_a_note(
    prefix: str, whole: Path, tmp_path: Path
) -> None:
    wanted = deepstack.analyze_huggingface(whole, TOKENS)["lens"]
    copy(whole, tmp_path)
    tensors(lambda t: [t.update({prefix + k: t.pop(k)}) for k in list(t)])(tmp_path)
    found = deepstack.analyze_huggingface(tmp_path, TOKENS)["lens"]
    assert found.arrays["kl"] == pytest.approx(wanted.arrays["kl"], rel=1e-6)
    assert not wanted.notes and "stripped" in found.notes[0]


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["Llama", "OPT", "Mixtral"])
def test_a_head_may_be_absent_if_it_is_tied(name: str, tied: bool, tmp_path: Path) -> None:
    transformers: Any = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": 20, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 16,
        "ffn_dim": 24, "word_embed_proj_dim": 16, "num_local_experts": 2, "pad_token_id": 0,
    }  # fmt: skip
    config = getattr(transformers, f"{name}Config")(**sizes, tie_word_embeddings=tied)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        logits = model(TOKENS).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), TOKENS[:, 1:].flatten()).item()
    found = deepstack.analyze_huggingface(tmp_path, TOKENS)["lens"]
    assert found.scalars["final_loss"] == pytest.approx(loss, rel=1e-5)
    tensors(lambda t: t.pop("lm_head.weight", None))(tmp_path)
    if tied:
        deepstack.analyze_huggingface(tmp_path, TOKENS)
    else:
        with pytest.raises(ConfigError, match=r"lack weights .*: lm_head.weight"):
            deepstack.analyze_huggingface(tmp_path, TOKENS)


@pytest.mark.slow
def test_shards_and_tokens_outside_the_vocabulary(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = deepstack.analyze_huggingface(whole, TOKENS)["lens"]
    index("part.safetensors")(copy(whole, tmp_path))
    found = deepstack.analyze_huggingface(tmp_path, TOKENS)["lens"]
    assert found.arrays["kl"] == pytest.approx(wanted.arrays["kl"])
    with pytest.raises(ConfigError, match=r"found 1 to 20; .* has the tokens 0 to 19"):
        deepstack.analyze_huggingface(whole, TOKENS + 1)
    monkeypatch.setattr("deepstack.integrations.huggingface.folder.available_memory", lambda: 1000)
    with pytest.raises(ResourceError, match="GB in fp32"):
        deepstack.analyze_huggingface(whole, TOKENS)


@needs("depth_use")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("adapter_config.json", "PEFT adapter"),
        ("pytorch_model.bin", "pickle files"),
        ("model.gguf", "weights in GGUF"),
        ("tf_model.h5", "of TensorFlow"),
    ],
)
def test_folders_of_other_formats_are_named(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(b"x")
    text = tmp_path / "text.txt"
    text.write_text("text")
    assert message in refusal(2, "analyze", tmp_path, "--text", text)
