"""Analyses of models that deepstack did not build: `analyze_model` and `analyze_huggingface`."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.command_line import typed
from helpers.family_models import VOCAB, perturbed, tokens_for
from torch import Tensor, nn

import deepstack
from deepstack.depth_use import MEASURES, Request, measure_all
from deepstack.depth_use.layered import Sample, StackLayers
from deepstack.errors import ConfigError, ResourceError
from deepstack.records import RunFolder
from deepstack.records.analyses import read_analysis

WIDTH, DEPTH = 16, 3


class Block(nn.Module):
    """A Pre-LN layer whose first argument is a mask, or a tuple with the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, first: Any, x: Tensor | None = None, scale: float = 0.5) -> Any:
        x = first[0] if x is None else x
        return x + scale * torch.tanh(self.mix(self.norm(x))), scale


class External(nn.Module):
    def __init__(self, in_tuple: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.in_tuple, self.embed = in_tuple, nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.last = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x, _ = block((x,)) if self.in_tuple else block(None, x=x, scale=0.5)
        return self.out(self.last(x))


def batch() -> dict[str, Tensor]:
    tokens = torch.randint(0, VOCAB, (2, 40), generator=torch.Generator().manual_seed(1))
    return {"tokens": tokens}


def test_an_external_model_is_measured_like_the_same_stack_of_deepstack() -> None:
    pre_ln = {"model__depth": DEPTH, "model__scheme": "pre_ln", "model__family": "decoder"}
    model = perturbed(**pre_ln, task__name="copy").model
    inputs, training = tokens_for(model), tokens_for(model, 1)
    targets = torch.randint(0, VOCAB, inputs.shape)
    batches = Sample(inputs, targets), Sample(inputs), Sample(training)
    wanted = measure_all(list(MEASURES), Request(StackLayers(model, "decoder"), *batches))
    found = deepstack.analyze_model(
        model, inputs, list(MEASURES), layers=list(model.decoder.layers), targets=targets,
        head=lambda x: model.head(model.decoder.final_norm(x), model.embedding),
        training=training,
    )  # fmt: skip
    for name in MEASURES:
        missing = wanted[name].arrays.keys() - found[name].arrays.keys()
        assert all(key.startswith("cosine_") for key in missing), name
        for key, values in found[name].arrays.items():
            same = pytest.approx(wanted[name].arrays[key], rel=1e-3, abs=1e-5, nan_ok=True)
            assert values == same, (name, key)


def test_layers_with_tuples_and_keywords_are_changed_and_restored() -> None:
    model = External().train()
    before, state = model(**batch()), torch.get_rng_state()
    result = deepstack.analyze_model(
        model, batch(), ["lens", "effects", "jacobian"], head=("last", "out"), layers="blocks"
    )
    assert torch.equal(model(**batch()), before) and torch.equal(torch.get_rng_state(), state)
    assert model.training and all("forward" not in vars(block) for block in model.blocks)
    x = model.embed(batch()["tokens"])
    without, _ = model.blocks[2](None, model.blocks[0](None, x)[0])
    moved = (model.out(model.last(without)).softmax(-1) - before.softmax(-1)).norm(dim=-1).max()
    assert result["effects"].arrays["output_change"][1] == pytest.approx(moved.item(), rel=1e-5)
    assert result["effects"].about["layers"] == "blocks"
    assert "loss" not in result["lens"].arrays and "loss_without" not in result["effects"].arrays
    assert 0.0 < result["jacobian"].scalars["mean_from_identity"] < 1.0
    with pytest.raises(ConfigError, match="called without a tensor as its first argument"):
        deepstack.analyze_model(External(True), batch(), head=("last", "out"), layers="blocks")


def test_the_jacobian_of_torch_s_own_layers_is_measured() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.Embedding(VOCAB, 8), layer, nn.Linear(8, VOCAB))
    tokens = torch.randint(0, VOCAB, (1, 4))
    result = deepstack.analyze_model(model, tokens, ["jacobian"], head="2", layers=[layer])
    assert result["jacobian"].scalars["mean_from_identity"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"head": "out"}, "head: after the last layer it does not give the model's logits"),
        ({"head": ("last", "ou")}, "did you mean 'out'"),
        ({"head": ("last", "out"), "what": ["swap"]}, "swap: found no targets"),
        ({"head": ("last", "out"), "what": ["lense"]}, "did you mean 'lens'"),
        ({"head": ("last", "out"), "layers": "last"}, "holds no modules"),
    ],
)
@pytest.mark.parametrize("scale", [1.0, 1e-4])
def test_refusals_say_what_to_give(arguments: dict[str, Any], message: str, scale: float) -> None:
    model = External()
    model.out.requires_grad_(False).weight.mul_(scale)
    model.out.bias.mul_(scale)
    with pytest.raises(ConfigError, match=message):
        deepstack.analyze_model(model, batch(), **arguments)


# -- a folder of transformers, compared with transformers itself ----------------------------------


def saved_gpt2(folder: Path, **sizes: int) -> Any:
    """A GPT-2 whose layers matter, saved to a folder."""
    transformers: Any = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(**sizes, n_head=2, bos_token_id=0, eos_token_id=0)
    config.use_cache = False
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0)
    model.save_pretrained(folder)
    return model


@pytest.mark.others
def test_a_gpt2_is_measured_as_transformers_computes_it(tmp_path: Path) -> None:
    model = saved_gpt2(tmp_path, vocab_size=97, n_positions=32, n_embd=32, n_layer=4)
    tokens, training = torch.randint(0, 97, (3, 20)), torch.randint(0, 97, (8, 32))
    result = deepstack.analyze_huggingface(
        tmp_path, tokens, ["lens", "effects", "linear", "jacobian"], training=training
    )
    with torch.no_grad():
        output = model(tokens, labels=tokens, output_hidden_states=True)
        final = output.logits.log_softmax(-1)[:, :-1]
        for index, x in enumerate(output.hidden_states[:-1]):  # the last one is normed
            log_p = model.lm_head(model.transformer.ln_f(x)).log_softmax(-1)[:, :-1]
            kl = (log_p.exp() * (log_p - final)).sum(-1).mean().item()
            assert result["lens"].arrays["kl"][index] == pytest.approx(kl, rel=1e-4)
        assert result["lens"].scalars["final_loss"] == pytest.approx(output.loss.item(), rel=1e-5)
        model.transformer.h.pop(2)
        loss = model(tokens, labels=tokens).loss.item()
    assert result["effects"].arrays["loss_without"][2] == pytest.approx(loss, rel=1e-5)
    assert result["jacobian"].scalars["mean_from_identity"] > 0.1


@pytest.mark.others
def test_the_command_reads_text_by_the_folder_s_tokenizer(tmp_path: Path) -> None:
    tokenizers: Any = pytest.importorskip("tokenizers")
    saved_gpt2(tmp_path / "gpt2", vocab_size=40, n_positions=16, n_embd=16, n_layer=3)
    words = {word: i for i, word in enumerate(["?", *"abcdefghijklmnopqrstuvwxyz "])}
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    library.save(str(tmp_path / "gpt2" / "tokenizer.json"))
    text = tmp_path / "text.txt"
    text.write_text("the layers of a deep stack read and write one stream " * 40)
    command = ["analyze", tmp_path / "gpt2", "--what", "lens,linear", "--text", text, "--json"]
    result = typed(*command, "--batches", 2)
    assert result.exit_code == 0, result.stderr
    (row,) = json.loads(result.stdout)
    folder = RunFolder(tmp_path / "gpt2")
    lens = read_analysis(folder, "lens")
    assert lens.about["held_out_sequences"] == 16 and lens.about["seq_len"] == 16
    assert lens.scalars == row["analyses"]["lens"]["scalars"]
    assert lens.scalars["final_loss"]
    assert read_analysis(folder, "linear").arrays["loss_linear"].shape == (3,)
    assert (folder.analysis_dir / "lens" / "checksums.json").is_file()
    missing = typed("analyze", tmp_path / "gpt2")
    assert missing.exit_code == 2 and "--text: found no text" in missing.stderr


def test_other_folders_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(ConfigError, match=r"no config.json with \*.safetensors"):
        deepstack.analyze_huggingface(tmp_path, tokens)
    (tmp_path / "model.safetensors").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ResourceError, match="pip install transformers"):
        deepstack.analyze_huggingface(tmp_path, tokens)
