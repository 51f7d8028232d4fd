"""A folder of transformers, compared with transformers itself."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.command_line import refusal, succeed
from helpers.extensions import needs
from safetensors.torch import save_file

import deepstack
from deepstack.base.errors import ConfigError, ResourceError
from deepstack.integrations.huggingface.analysis import with_first_token
from deepstack.integrations.huggingface.folder import Folder
from deepstack.records import RunFolder
from deepstack.records.analyses import read_analysis


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


@needs("depth_use")
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
    (row,) = json.loads(succeed(*command, "--batches", 2))
    folder = RunFolder(tmp_path / "gpt2")
    lens = read_analysis(folder, "lens")
    assert lens.about["held_out_sequences"] == 16 and lens.about["seq_len"] == 16
    assert lens.scalars == row["analyses"]["lens"]["scalars"]
    assert lens.scalars["final_loss"]
    assert read_analysis(folder, "linear").arrays["loss_linear"].shape == (3,)
    assert (folder.analysis_dir / "lens" / "checksums.json").is_file()
    assert "--text: found no text" in refusal(2, "analyze", tmp_path / "gpt2")
    (row,) = json.loads(succeed(*command, "--batches", 2, "--bos"))
    first = read_analysis(folder, "lens")
    assert first.about["bos"] and not lens.about["bos"]
    assert first.scalars["final_loss"] != lens.scalars["final_loss"]


def test_sequences_begin_with_the_bos_token_of_the_config(tmp_path: Path) -> None:
    tokens = torch.arange(12).view(2, 6)
    folder = Folder(tmp_path, {"bos_token_id": 7}, [], [], 0)
    wanted = [[7, 0, 1, 2, 3, 4], [7, 6, 7, 8, 9, 10]]
    assert with_first_token(folder, tokens).tolist() == wanted
    with pytest.raises(ConfigError, match=r"--bos: .* has bos_token_id None"):
        with_first_token(Folder(tmp_path, {}, [], [], 0), tokens)


def test_other_folders_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ConfigError, match=r"no config.json with \*.safetensors"):
        deepstack.analyze_huggingface(tmp_path, tokens)
    save_file({"wte.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ResourceError, match="pip install transformers"):
        deepstack.analyze_huggingface(tmp_path, tokens)
