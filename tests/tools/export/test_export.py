"""The files that `deepstack export RUN --to` writes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.command_line import typed
from helpers.configs import config_with
from safetensors.torch import save_file

from deepstack.base.errors import ConfigError
from deepstack.config import Config, load_config, to_yaml
from deepstack.model import build_model
from deepstack.model.plain import load_export, to_plain, values_of
from deepstack.records import RunFolder
from deepstack.training import load_trained, train

VOCAB, SEQ = 13, 6


def config_of(**changes: Any) -> Config:
    keys = {
        "model.scheme": "pre_ln", "model.depth": 3, "model.d_model": 16, "model.n_heads": 4,
        "model.d_ff": 24, "model.activation": "gelu", "model.head": "separate",
        "task.seq_len": SEQ, "train.batch_size": 3,
    }  # fmt: skip
    return config_with(keys, **changes)


TINY = {
    "model__positions": "sinusoidal", "train__steps": 3, "train__lr": 0.1, "train__eval_every": 0,
    "log__layers_every": 0, "task__name": "markov", "train__eval_batches": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Trained runs by the name of their special property."""
    out = tmp_path_factory.mktemp("results")
    cases = {
        "separate": {},
        "batch": {"model__norm__kind": "batch"},
    }
    return {
        name: train(config_of(**TINY, **more), out=out, study=name).path
        for name, more in cases.items()
    }


@pytest.mark.parametrize("name", ["separate", "batch"])
@pytest.mark.parametrize("target", ["model", "a.safetensors"])
def test_export_writes_a_model_that_runs(
    name: str, target: str, runs: dict[str, Path], tmp_path: Path
) -> None:
    to = tmp_path / "new" / target
    result = typed("export", runs[name], "--to", to, "--json")
    assert result.exit_code == 0, result.output
    (facts,) = json.loads(result.stdout)
    about, weights, settings = sorted(map(Path, facts["files"]))
    assert facts == json.loads(about.read_text())
    written = [*weights.parent.iterdir(), *runs[name].glob("checkpoint/*/*")]
    assert len({path.stat().st_mode for path in written}) == 1
    assert not RunFolder(to).exists()  # below results/ it is not listed as a run
    again = load_export(to)
    before = load_trained(RunFolder(runs[name]), print).built
    inputs = torch.arange(SEQ)[None] % 5
    with torch.no_grad():
        expected, got = before.model.eval()(inputs), again.model.eval()(inputs)
    assert torch.equal(got, expected)
    assert train(load_config(settings, []), out=tmp_path, study="again").state == "done"


def test_export_replaces_nothing(runs: dict[str, Path], tmp_path: Path) -> None:
    to = tmp_path / "model"
    assert typed("export", runs["separate"], "--to", to).exit_code == 0
    again = typed("export", runs["separate"], "--to", to)
    assert again.exit_code == 2 and "exists already" in again.stderr
    other = typed("export", runs["separate"], "--to", tmp_path / "my.pt")
    assert other.exit_code == 2 and "allowed my.safetensors, or a folder" in other.stderr


def test_files_that_do_not_belong_together_are_refused_as_an_export(tmp_path: Path) -> None:
    model = build_model(config_of(), vocab_size=VOCAB).model
    save_file(to_plain(model, values_of(model)), tmp_path / "a.safetensors")
    cases = [
        ("[]", {}, "is not an export of deepstack"),
        ('{"step": null}', {}, "is not an export of deepstack"),
        ('{"step": 3}', {"model__d_ff": 48}, r"w1 is \(24, 16\), and in the .* \(48, 16\)"),
    ]
    for about, changes, message in cases:
        (tmp_path / "a.json").write_text(about)
        (tmp_path / "a.yaml").write_text(to_yaml(config_of(**changes)))
        with pytest.raises(ConfigError, match=message):
            load_export(tmp_path / "a.safetensors")


def test_a_published_run_is_reported_as_without_weights(tmp_path: Path) -> None:
    config = config_of(**TINY | {"train__max_loss": 1e-3})
    run = train(config, out=tmp_path)
    assert run.state == "diverged" and len(run.steps) == 1  # the first step may diverge
    result = typed("export", run.path, "--to", tmp_path / "model")
    assert result.exit_code == 7 and "has diverged; weights" in result.stderr
