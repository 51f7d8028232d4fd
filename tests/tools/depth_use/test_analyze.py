"""Analyses of a run's folder, and of models that deepstack did not build: files and refusals."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.command_line import refusal, succeed, typed
from helpers.family_models import VOCAB, perturbed, tokens_for
from helpers.small_runs import small
from torch import Tensor, nn

import deepstack
from deepstack.base.errors import ConfigError, NothingMatchedError
from deepstack.records import Inspection, Run
from deepstack.tools.depth_use.analyses import MEASURES, Request, measure_all
from deepstack.tools.depth_use.layered import Sample, StackLayers
from deepstack.tools.depth_use.runs import analyze_run
from deepstack.training import load_trained


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    config = small(train__eval_batches=3, train__lr=1e-2, model__scheme="pre_ln")
    return deepstack.train(config, study="runs", out=tmp_path_factory.mktemp("out"))


@pytest.mark.slow(turn=53)
def test_a_run_folder_has_the_arrays_their_meaning_and_checksums(trained: Run) -> None:
    shutil.rmtree(trained.path / "analysis", ignore_errors=True)
    before = Inspection(trained.folder).files
    words = "--what", ",".join(MEASURES), "--probes", 2, "--batches", 3, "--json"
    (run,) = json.loads(succeed("analyze", trained.path, *words))
    for name in MEASURES:
        result, stored = run["analyses"][name], Run(trained.path).analysis(name)
        assert result["scalars"] == stored.scalars
        assert stored.about["weights_sha256"] and stored.about["depth"] == 4
        assert stored.columns.keys() == stored.arrays.keys() | stored.scalars.keys()
        assert all(stored.columns[key]["meaning"] for key in stored.columns)
    loss = Run(trained.path).analysis("lens").arrays["loss"][-1]  # after the last layer
    assert loss == pytest.approx(trained.evals["loss_masked"].iloc[-1], rel=1e-5)
    inspection = Inspection(trained.folder)
    files = [path for path in (trained.path / "analysis").glob("*/*") if path.stem != "checksums"]
    assert inspection.files == before + len(files) > before + 30
    assert inspection.verdict == "whole"


def test_a_repeated_call_replaces_the_analysis(trained: Run) -> None:
    wide = analyze_run(trained.path, ["effects"])["effects"]
    narrow = analyze_run(trained.path, ["effects"], every=2)["effects"]
    stored = Run(trained.path).analysis("effects")
    assert stored.arrays["removed"].tolist() == [1, 3]
    assert stored.notes == narrow.notes != wide.notes
    folder = trained.path / "analysis"
    shutil.copytree(folder / "effects", folder / ".draft-effects")  # as a kill leaves them
    shutil.copytree(folder / "effects", folder / ".gone-effects")
    assert Inspection(trained.folder).verdict == "whole"
    analyze_run(trained.path, ["effects"])
    assert not list(folder.glob(".*"))
    assert Run(trained.path).analysis("effects").arrays["removed"].tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("file", ["kl.npy", "columns.json", "checksums.json"])
def test_verify_notices_a_flipped_bit(trained: Run, file: str) -> None:
    analyze_run(trained.path, ["lens"])
    path = trained.path / "analysis" / "lens" / file
    whole = path.read_bytes()
    path.write_bytes(whole[:-2] + bytes([whole[-2] ^ 1]) + whole[-1:])
    assert "analysis/lens/" in refusal(6, "verify", trained.path)
    path.unlink()
    refusal(6, "verify", trained.path)
    path.write_bytes(whole)
    (path.parent / "more.npy").write_bytes(b"")
    assert "more.npy: not listed" in typed("verify", trained.path).stderr
    (path.parent / "more.npy").unlink()
    succeed("verify", trained.path)
    elsewhere = path.rename(trained.path.parent / file)
    path.symlink_to(elsewhere)
    refusal(6, "verify", trained.path)  # a link is not a file of an analysis
    elsewhere.replace(path)


def test_two_runs_of_different_depth_are_compared(trained: Run, tmp_path: Path) -> None:
    other = deepstack.train(small(model__depth=2, train__steps=1), study="runs", out=tmp_path)
    words = ("analyze", trained.path, "--what", "similarity", "--with", other.path)
    printed = typed(*words)
    assert printed.exit_code == 0 and "similarity: no numbers; arrays are in" in printed.stderr
    result = Run(trained.path).analysis("similarity")
    assert result.arrays["cka_with"].shape == (5, 3)
    assert np.isfinite(result.arrays["cka_with"]).all()
    assert result.about["with"]["run"] == str(other.path)
    elsewhere = deepstack.train(
        small(task__name="markov", train__steps=1), study="runs", out=tmp_path
    )
    refused = refusal(2, *words[:-1], elsewhere.path)
    assert "--with: " in refused and "task." in refused


def test_refusals_name_the_remedy(trained: Run, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'effects'"):
        analyze_run(trained.path, ["effect"])
    with pytest.raises(ConfigError, match=r"side .*decoder"):
        analyze_run(trained.path, ["lens"], side="decoder")
    with pytest.raises(ConfigError, match="batches: found 0; allowed 1 or more"):
        analyze_run(trained.path, batches=0)
    diverged = deepstack.train(small(train__max_loss=1e-3), study="runs", out=tmp_path)
    with pytest.raises(
        NothingMatchedError, match=r"has diverged; .* train\.keep_weights=log --study"
    ):
        analyze_run(diverged.path)
    whole = deepstack.train(small(train__steps=1), study="runs", out=tmp_path)
    printed = typed("analyze", tmp_path / "runs", "--what", "swap", "--json")
    assert [run["run"] for run in json.loads(printed.stdout)] == [str(whole.path)]
    assert printed.stderr.count("left out: ") == 1
    assert "did you mean 'swap'" in refusal(2, "analyze", tmp_path / "runs", "--what", "swaps")


@pytest.mark.parametrize(
    ("what", "option", "users"),
    [
        ("lens", ["--every", "2"], "effects, swap, linear, jacobian, similarity"),
        ("lens,effects", ["--probes", "3"], "jacobian"),
        ("swap", ["--with", "results"], "similarity"),
        ("lens", ["--training-batches", "2"], "linear"),
    ],
)
def test_a_setting_that_no_analysis_reads_is_refused(
    what: str, option: list[str], users: str, tmp_path: Path
) -> None:
    message = refusal(2, "analyze", tmp_path, "--what", what, *option)
    text = f"{option[0]}: found with --what {what}, which does not use it; allowed with {users}"
    assert text in message


def test_an_analysis_has_the_precision_of_its_run(tmp_path: Path) -> None:
    run = deepstack.train(small(train__precision="bf16"), study="runs", out=tmp_path)
    printed = typed("analyze", run.path, "--json")
    lens = json.loads(printed.stdout)[0]["analyses"]["lens"]
    assert (lens["about"]["device"], lens["about"]["precision"]) == ("cpu", "bf16")
    assert "computed on cpu, products in bf16" in typed("analyze", run.path).stderr
    trained = load_trained(run.folder, print)
    batches = [trained.task.validation_batch(i, 4) for i in range(4)]
    inputs, targets, masked = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    losses = []
    for enabled in (True, False):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            logits = trained.built.model.eval()(torch.from_numpy(inputs)).float()
        chosen = torch.from_numpy(masked)
        loss = nn.functional.cross_entropy(logits[chosen], torch.from_numpy(targets)[chosen])
        losses.append(loss.item())
    assert lens["scalars"]["final_loss"] == pytest.approx(losses[0], rel=1e-6)
    assert losses[1] != pytest.approx(losses[0], rel=1e-6)


# --- models of others ------------------------------------------------------------------------


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


@pytest.mark.slow(turn=41)
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


def test_a_text_without_a_reader_of_folders_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = "deepstack.tools.depth_use.foreign_folders.import_extensions"
    monkeypatch.setattr(reader, lambda kind: [])
    line = refusal(2, "analyze", tmp_path, "--text", tmp_path / "text.txt")
    assert "this deepstack has no integrations/huggingface" in line
