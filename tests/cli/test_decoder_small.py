"""The modern recipe: decoder_small.yaml with few layers and steps, decoder_96.yaml by counts."""

import json
from pathlib import Path

import numpy as np
import pytest
from helpers import ROOT
from helpers.command_line import succeed
from helpers.small_runs import data_of, interrupted, sweep_here

import deepstack
from deepstack.config import load_config

FILE = ROOT / "configs" / "decoder_small.yaml"
LARGE = ROOT / "configs" / "decoder_96.yaml"
FEW = [
    "model.depth=3", "model.d_model=32", "model.d_ff=48", "task.seq_len=16", "train.batch_size=4",
    "train.steps=8", "train.warmup_steps=2", "train.eval_every=4", "train.eval_batches=1",
]  # fmt: skip


@pytest.mark.parametrize("vocab", [pytest.param(257, marks=pytest.mark.slow), 50_257])
def test_check_counts_the_96_layers_of_the_large_recipe(vocab: int, tmp_path: Path) -> None:
    words: list[object] = []
    if vocab > 257:
        np.arange(vocab, dtype="<u2").tofile(tmp_path / "tokens.bin")
        options = f"seq_len: 1024, vocab_size: {vocab}, path: {tmp_path}"
        words = [f"task={{name: tokens, {options}}}"]
    (row,) = json.loads(succeed("check", LARGE, *words, "--json"))
    tokens, d, heads = 512 * 1024, 512, 2 * 64
    matrices = 2 * d * d + 2 * d * heads + 3 * d * 1408
    gains = 2 * d + 2 * 64
    assert row["parameters"] == 96 * (matrices + gains) + d + (d + 1) * vocab
    assert row["tokens a step"] == tokens
    forward = 2 * tokens * (96 * (matrices + 2 * 1024 * d) + d * vocab)
    assert row["FLOPs a step"] == 3 * forward
    assert 50_000 < row["memory estimate (MB)"] < 75_000


def test_check_accepts_the_small_recipe() -> None:
    (row,) = json.loads(succeed("check", FILE, "--json"))
    assert row["depth"] == 24 and row["FLOPs a step"] > 8e9 and row["memory estimate (MB)"] > 0


def test_the_large_recipe_has_the_parts_of_the_small_one() -> None:
    small, large = (load_config(file).model_dump() for file in (FILE, LARGE))
    sizes = {"depth", "d_model", "d_ff", "n_heads"}
    differing = {key for key in small["model"] if small["model"][key] != large["model"][key]}
    assert differing == sizes
    for key in ("optimizer", "schedule", "schedule_options", "betas", "weight_decay"):
        assert small["train"][key] == large["train"][key]


def test_the_recipe_names_what_it_stands_for() -> None:
    model, train = load_config(FILE).model, load_config(FILE).train
    assert (model.norm.kind, model.qk_norm, model.gated, model.activation) == (
        "rms", True, True, "silu",
    )  # fmt: skip
    assert model.n_kv_heads == model.n_heads // 2 and model.positions == "rotary"
    assert (train.optimizer, train.schedule) == ("muon", "wsd")


def test_a_killed_run_resumes_with_equal_bytes(tmp_path: Path) -> None:
    config = load_config(FILE, FEW)
    whole = deepstack.train(config, out=tmp_path / "whole")
    interrupted(config, tmp_path / "cut", at=5)
    run = deepstack.train(config, out=tmp_path / "cut")
    assert run.state == "done" and data_of(run) == data_of(whole)
    assert run.steps.lr.iloc[-1] == pytest.approx(3e-3 * 1 / (0.2 * 7))


@pytest.mark.slow
def test_every_command_reads_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tools.calibrate.calibrate", "tools.signal.signal"):
        monkeypatch.setattr(f"deepstack.{name}.sweep", sweep_here)
    out = ["--out", tmp_path]
    few = [word for word in FEW if not word.startswith("model.depth")]
    run = succeed("train", FILE, *FEW, "log.attribution_every=4", *out, "--quiet")
    rows = json.loads(
        succeed("calibrate", FILE, *few, "--depths", "2,4", "--seeds", "0", "--steps", "2",
                *out, "--json", "--quiet")
    )["rows"]  # fmt: skip
    assert {"k", "v", "w3"} <= {row["role"] for row in rows}
    signals = json.loads(
        succeed("signal", FILE, *few, "--depths", "2,4", "--seeds", "0", *out, "--json", "--quiet")
    )
    assert signals
    analysis = json.loads(succeed("analyze", run, "--what", "lens,effects", "--json"))
    assert analysis
    succeed("plot", "update_vs_step", run, "--format", "csv", "--to", tmp_path)
    succeed("plot", "attribution_vs_step", run, "--format", "csv", "--to", tmp_path)
    succeed("report", run, "--to", tmp_path / "page.html")
    assert len((tmp_path / "page.html").read_bytes()) > 10_000
