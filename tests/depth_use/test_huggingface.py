"""`deepstack.analyze_huggingface`: a folder of transformers, compared with transformers itself."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.command_line import typed

import deepstack
from deepstack.errors import ConfigError, ResourceError
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
        removed = model.transformer.h.pop(2)
        loss = model(tokens, labels=tokens).loss.item()
    assert removed is not None
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
