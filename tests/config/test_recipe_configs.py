"""Recipes of published language models: each is listed with its source, builds and trains."""

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.command_line import succeed, typed
from helpers.sampling import some

from deepstack.config import load_config
from deepstack.config.load import recipe_paths

# recipe -> norm, its place in the layer, positions, published learning rate (None: not published),
# activation, gate, biases, head
PUBLISHED: dict[str, tuple[Any, ...]] = {
    "gpt2": ("layer", "before", "learned", None, "gelu", False, True, "tied"),
    "llama": ("rms", "before", "rotary", 3e-4, "silu", True, False, "separate"),
    "gemma2": ("rms", "both", "rotary", None, "gelu", True, False, "tied"),
    "olmo2": ("rms", "after", "rotary", 3e-4, "silu", True, False, "separate"),
    "qwen3": ("rms", "before", "rotary", None, "silu", True, False, "separate"),
    "deepseek_v3": ("rms", "before", "rotary", 2.2e-4, "silu", True, False, "separate"),
}
SCHEMES = {"before": ("pre_ln", "pre_ln_scaled"), "after": ("res_post_norm",),
           "both": ("sandwich_ln",)}  # fmt: skip
GROUPED = {"gemma2": 2, "qwen3": 4}  # heads to a head of keys and values
QK_NORM = {"olmo2", "qwen3"}


def test_every_recipe_is_one_of_these() -> None:
    assert set(recipe_paths()) == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_recipe_has_the_parts_of_its_model(name: str) -> None:
    norm, where, positions, lr, activation, gated, bias, head = PUBLISHED[name]
    config = load_config(name)
    model = config.model
    assert (model.norm.kind, model.positions, model.activation) == (norm, positions, activation)
    assert (model.gated, model.bias, model.head) == (gated, bias, head)
    assert model.family == "decoder" and model.scheme in SCHEMES[where]
    assert model.n_heads // (model.n_kv_heads or model.n_heads) == GROUPED.get(name, 1)
    assert model.qk_norm == (name in QK_NORM)
    assert lr is None or config.train.lr == pytest.approx(lr)
    assert config.train.optimizer == "adamw"


@pytest.mark.parametrize("name", some(PUBLISHED, 3))
def test_a_recipe_is_checked_and_trains(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny = ("model.depth=2", "model.d_model=16", "model.d_ff=32", "task.seq_len=8",
            "train.batch_size=2", "train.eval_batches=1", "log.probe_sequences=1")  # fmt: skip
    checked = typed("check", name, *tiny)
    assert checked.exit_code == 0 and "-d2-s0-" in checked.stdout
    words = (*tiny, "train.steps=2", "train.warmup_steps=0", "-q")
    folder = Path(succeed("train", name, *words).strip().splitlines()[-1])
    steps = (folder / "steps.csv").read_text().splitlines()
    assert len(steps) == 3, "a head and two steps"


def test_recipes_are_listed_with_source_and_lacks() -> None:
    rows = {row["name"]: row for row in json.loads(typed("list", "recipes", "--json").stdout)}
    assert set(rows) == set(PUBLISHED)
    for name, row in rows.items():
        assert "https://" in row["source"] and row["published"] and row["lacks"], name
        assert ("not published" in row["rate"]) == (PUBLISHED[name][3] is None), name
    assert "attention_options.window" in rows["gemma2"]["lacks"]
    assert rows["olmo2"]["where"] == "x <- x + LN(G(x))" and "of q and k" in rows["olmo2"]["norm"]
    assert "mixture of experts" in rows["deepseek_v3"]["lacks"]
    assert "OLMo 2" in typed("list", "recipes", "--json").stdout
