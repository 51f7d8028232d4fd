"""A run begins with the weights of another one, of another task or of fewer layers."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.command_line import typed
from helpers.small_runs import data_of, interrupted, small

import deepstack
from deepstack.errors import ConfigError
from deepstack.model import build_model
from deepstack.records import Run
from deepstack.training.start import grown_rows, start_of

PARENT = {
    "task__name": "markov", "task__seq_len": 8, "task__states": 5, "model__scheme": "pre_ln",
    "model__depth": 3, "train__steps": 5,
}  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return deepstack.train(small(**PARENT), out=tmp_path_factory.mktemp("start"))


def config_from(run: Run, **changes: Any) -> deepstack.config.Config:
    return small(**PARENT | {"model__start": str(run.path)} | changes)


def started(config: deepstack.config.Config, vocab_size: int = 6) -> Any:
    built = build_model(config, vocab_size=vocab_size)
    start = start_of(config, vocab_size)
    start.load_into(built, config.model.grow)
    return built, start


def test_a_run_begins_where_another_one_ended(trained: Run, tmp_path: Path) -> None:
    run = deepstack.train(config_from(trained, train__lr=1e-4), out=tmp_path)
    assert run.evals["loss"].iloc[0] == pytest.approx(trained.evals["loss"].iloc[-1], rel=1e-6)
    assert 0 < run.steps["model_update"].iloc[0] < 0.1 * trained.steps["model_update"].iloc[-1]
    assert run.meta["start"]["step"] == 5 and len(run.meta["start"]["sha256"]) == 64
    checked = typed("rerun", run.path, "--check")
    assert checked.exit_code == 0 and checked.stdout.startswith("identical: ")


def test_another_task_and_head_start_their_own_tables_anew(trained: Run, tmp_path: Path) -> None:
    config = small(
        task__name="copy", task__vocab_size=9, task__seq_len=12, model__scheme="pre_ln",
        model__depth=3, model__head="separate", model__start=str(trained.path), train__steps=2,
    )  # fmt: skip
    built, start = started(config, 9)
    drawn = build_model(config, vocab_size=9).state()
    for key, value in built.state().items():
        anew = key.split(".")[0] in ("embedding", "position", "head")
        assert torch.equal(value, drawn[key] if anew else start.weights[key]), key
    log = deepstack.train(config, out=tmp_path).folder.log_path.read_text()
    assert "model.start: embedding (9, 16) starts anew" in log and "head.weight (9, 16)" in log


def test_resume_equals_an_uninterrupted_run_and_needs_the_same_weights(
    trained: Run, tmp_path: Path
) -> None:
    shutil.copytree(trained.path, tmp_path / "begin")
    config = config_from(trained, model__start=str(tmp_path / "begin"), train__steps=12)
    whole = deepstack.train(config, out=tmp_path / "whole")
    folder = interrupted(config, tmp_path)
    sums = tmp_path / "begin" / "checkpoint" / "5" / "checksums.json"
    kept = sums.read_text()
    sums.write_text(json.dumps(json.loads(kept) | {"weights.safetensors": "0" * 64}))
    for command in (["train", folder.config_path, "--out", tmp_path], ["rerun", whole.path]):
        result = typed(*command)
        assert result.exit_code == 2 and re.search("weights|begin has changed", result.stderr)
    sums.write_text(kept)
    assert data_of(deepstack.train(config, out=tmp_path)) == data_of(whole)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model__scheme": "post_ln"}, "model.scheme: found post_ln, and"),
        ({"model__d_model": 32}, "model.d_model: found 32, and"),
        ({"model__depth": 4}, "has 3; allowed under model.start: 3, or more with model.grow"),
        ({"model__depth": 2, "model__grow": "stack"}, "found 2, and"),
        ({"model__depth": 7, "model__grow": "middle"}, "middle: up to twice as many"),
        ({"model__start": "nowhere"}, "model.start: nowhere"),
    ],
)
def test_other_differences_are_refused_with_both_values(
    changes: dict[str, Any], words: str, trained: Run, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words.replace(".", r"\.")):
        deepstack.train(config_from(trained, **changes), out=tmp_path)
    assert not list(tmp_path.iterdir())


def test_layers_are_copied_as_the_table_says() -> None:
    assert grown_rows("stack", 4, 8) == [0, 1, 2, 3, 0, 1, 2, 3]
    assert grown_rows("interleave", 4, 8) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert grown_rows("middle", 4, 6) == [0, 1, 2, 1, 2, 3]


@pytest.mark.parametrize("banks", [True, False])
@pytest.mark.parametrize("grow", ["stack", "interleave", "middle", "identity"])
def test_a_grown_stack_has_the_copies_or_the_same_function(
    grow: str, banks: bool, trained: Run
) -> None:
    config = config_from(trained, model__depth=5, model__grow=grow, runtime__banks=banks)
    built, start = started(config)
    key = "encoder.layers.attention.qkv"
    qkv = built.state()[key]
    if grow != "identity":
        assert torch.equal(qkv, start.weights[key][grown_rows(grow, 3, 5)])
        return
    assert torch.equal(qkv[:3], start.weights[key]) and qkv[3:].std() > 0.05
    tokens = torch.randint(0, 6, (4, 8), generator=torch.Generator().manual_seed(0))
    shallow, _ = started(config_from(trained))
    with torch.no_grad():
        assert torch.equal(shallow.model.hidden(tokens), built.model.hidden(tokens))
