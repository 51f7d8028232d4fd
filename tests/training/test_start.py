"""A run begins from another one: with its weights, or for more steps after its end."""

import json
import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.command_line import refusal, typed
from helpers.extensions import known, needs
from helpers.small_runs import data_of, interrupted, reseal, small, stop_at
from safetensors.torch import load_file, save_file
from torch import Tensor

import deepstack
from deepstack.base.errors import ConfigError, DifferenceError, Interrupted
from deepstack.model import build_model
from deepstack.records import Run, RunFolder, find_runs, problems
from deepstack.tasks import task_of
from deepstack.training import RunPlan, parent_of
from deepstack.training.parts.start import grown_rows, start_of

# --- other data or more layers, from the weights of a run -----------------------------------------


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
    start.begin(RunPlan(config, task_of(config)), built)
    return built, start


@pytest.mark.slow(turn=58)
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


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda key, value: value[:0], "embedding is float32 (0, "),
        (lambda key, value: value[:1], "not float32 (3, "),
        (lambda key, value: torch.cat([value, value]), "is another model's"),
        (lambda key, value: value.long(), "is int64"),
        (lambda key, value: value.half(), "is float16"),
        (lambda key, value: value.to(torch.complex64), "is complex64"),
        (lambda key, value: value[..., :-1], "is another model's"),
        (lambda key, value: value.reshape(-1), "embedding is float32"),
        (lambda key, value: value.sum(), "embedding is float32 ()"),
    ],
)
def test_weights_of_another_form_are_refused_though_they_are_sealed(
    change: Callable[[str, Tensor], Tensor], words: str, trained: Run, tmp_path: Path
) -> None:
    other = shutil.copytree(trained.path, tmp_path / "other")
    (file,) = other.glob("checkpoint/*/weights.safetensors")
    weights = {key: change(key, value).contiguous() for key, value in load_file(file).items()}
    save_file(weights, file)
    reseal(file.parent)
    with pytest.raises(ConfigError, match=re.escape(words)):
        deepstack.train(config_from(trained, model__start=str(other)), out=tmp_path / "out")


@needs("export")
def test_a_terabyte_of_nothing_is_refused_at_once(trained: Run, tmp_path: Path) -> None:
    other = Path(shutil.copytree(trained.path, tmp_path / "other"))
    (weights,) = other.glob("checkpoint/*/weights.safetensors")
    for path, words in ((weights, "of which the disk holds"), (other / "steps.csv", "is damaged")):
        os.truncate(path, 2**40)
        with pytest.raises(ConfigError, match=words):
            deepstack.train(config_from(trained, model__start=str(other)), out=tmp_path / "out")
        assert "of which the disk holds" in typed("verify", other).output
        if path == weights:
            refusal(7, "export", other, "--to", tmp_path / "export")
        shutil.copy(trained.path / path.relative_to(other), path)


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


@pytest.mark.parametrize(
    ("changes", "new"),
    [
        ({"model__init__distribution": "torch_linear"}, {}),
        ({"model__init__distribution": "torch_linear", "runtime__banks": False}, {}),
        ({"model__norm__kind": "batch", "model__scheme": "sub_ln"}, {}),
        (
            {"model__init__distribution": "torch_linear", "model__family": "encoder_decoder"},
            {"model__decoder_depth": 3},
        ),
        (
            {"model__init__distribution": "torch_linear", "model__family": "encoder_decoder",
             "model__decoder_attention": "merged", "model__gated": True},
            {"model__decoder_depth": 4},
        ),
    ],
    ids=str,
)  # fmt: skip
def test_identity_keeps_the_last_hidden_state_bit_for_bit(
    changes: dict[str, Any], new: dict[str, Any], tmp_path: Path
) -> None:
    """With biases that are drawn, and under the running averages of batch norms."""
    changes = {"model__depth": 2, **changes}
    shallow_run = deepstack.train(small(**PARENT | changes), out=tmp_path)
    shallow, _ = started(config_from(shallow_run, **changes))
    deep = {**changes, "model__depth": 4, "model__grow": "identity", **new}
    built, _ = started(config_from(shallow_run, **deep))
    length = 16 if "model__family" in changes else 8  # source and target
    tokens = torch.randint(0, 6, (4, length), generator=torch.Generator().manual_seed(0))
    for which in ("own", "followed"):
        with torch.no_grad(), shallow.model.statistics(which), built.model.statistics(which):
            assert torch.equal(shallow.model.hidden(tokens), built.model.hidden(tokens)), which
    if "torch_linear" in changes.values():  # only the added layers are 0
        assert built.state()["encoder.layers.attention.qkv_bias"][2:].any()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model__unique_layers": 1}, "identity with model.unique_layers=1, whose further layers"),
        (
            {"model__family": "encoder_decoder", "model__decoder_attention": "average"},
            "identity with model.decoder_attention=average, whose gates add a share of x",
        ),
    ],
)
def test_identity_is_refused_where_new_layers_add_more_than_zero(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    run = deepstack.train(small(**PARENT, **changes), out=tmp_path)
    config = config_from(run, **changes, model__depth=4, model__grow="identity")
    with pytest.raises(ConfigError, match=re.escape(words)):
        deepstack.train(config, out=tmp_path)


# --- more steps of a finished run, as a new run that names its parent -----------------------------


# The parent ends at step 12; an evaluation and a record of every layer at its end belong to it.
STEPS: dict[str, Any] = known(
    {"train__schedule": "constant", "train__eval_every": 5, "log__attribution_every": "log"}
)
QUICK: dict[str, Any] = known({"log__attribution_every": 0, "log__layers_every": 0})


def parent_run(out: Path, **settings: Any) -> Run:
    return deepstack.train(small(**STEPS | settings, runtime__keep_optimizer=True), out=out)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A parent for tests of refusals and of resumed extensions."""
    return parent_run(tmp_path_factory.mktemp("parent"), **QUICK)


def extend(run: Run, steps: int, *overrides: str, **options: Any) -> Run:
    parent = parent_of(run.path, steps, overrides)
    return deepstack.train(parent.config, out=run.path.parents[1], parent=parent, **options)


MUON = {"train__optimizer": "muon", "model__dropout": 0.1, "train__schedule": "inverse_sqrt"}


@pytest.mark.parametrize(
    ("settings", "is_interrupted"),
    [pytest.param(MUON, False, marks=pytest.mark.slow), ({}, True)],
    ids=str,
)
def test_an_extended_run_is_one_that_was_trained_at_once(
    settings: dict[str, Any], is_interrupted: bool, tmp_path: Path
) -> None:
    run = parent_run(tmp_path, **settings)
    before = data_of(run)
    if is_interrupted:
        with pytest.raises(Interrupted):
            extend(run, 8, stop=stop_at(3))
    longer = extend(run, 8)
    whole = deepstack.train(small(**STEPS | settings, train__steps=20), out=tmp_path / "whole")
    assert longer.path != run.path and longer.name == whole.name
    assert data_of(longer) == data_of(whole) and data_of(run) == before
    extends = longer.meta["extends"]
    assert (extends["run"], extends["step"], extends["exact"]) == (run.name, 12, True)
    assert len(longer.meta.get("resumed", [])) == is_interrupted
    assert longer.meta["created"] >= run.meta["created"]
    assert problems(longer.folder) == problems(run.folder) == []
    assert len(longer.timing) == 20
    checked = typed("rerun", longer.path, "--check")
    assert checked.exit_code == 0 and checked.stdout.startswith("identical: ")
    assert data_of(extend(longer, 2))["steps.csv"].startswith(before["steps.csv"])


def test_an_extension_keeps_the_fast_path_of_its_parent(finished: Run) -> None:
    with suppress(Interrupted):  # so many steps are replayed by default
        extend(finished, 200, stop=stop_at(1))
    (longer,) = (run for run in find_runs(finished.path.parent) if run.name != finished.name)
    replayed = [each.meta["environment"]["replayed"] for each in (finished, longer)]
    assert replayed == [False, False] and "environment_changed" not in longer.meta


def test_a_schedule_that_depends_on_the_steps_is_chosen(tmp_path: Path) -> None:
    run = parent_run(tmp_path, train__schedule="cosine", **QUICK)
    refused = typed("train", run.path, "--extend", 8, "--out", tmp_path)
    assert refused.exit_code == 2
    for text in (
        "train.schedule=cosine depends on the number of steps; choose",
        "train.schedule=cosine over 20 steps",
        "train.schedule=constant train.lr=RATE",
    ):
        assert text in refused.stderr
    words = ["train", run.path / "config.yaml", "--extend", 8, "--out", tmp_path, "-q"]
    choice = ["train.schedule=constant", "train.lr=0.0001"]
    longer = Run(typed(*words, *choice).stdout.strip())
    assert longer.path.parent == run.path.parent and not longer.meta["extends"]["exact"]
    assert longer.steps["lr"].tolist() == [*run.steps["lr"], *[0.0001] * 8]
    # The same command finds the run; the same config without a parent is another run.
    assert typed(*words, *choice).stdout.strip() == str(longer.path)
    alone = deepstack.train(deepstack.load_config(longer.path / "config.yaml"), out=tmp_path)
    assert alone.path.name == f"{longer.name}-2" and "extends" not in alone.meta
    again = typed("rerun", longer.path, "--check")
    assert again.exit_code == 2 and "under another schedule" in again.stderr
    assert not extend(run, 8, "train.schedule=cosine").meta["extends"]["exact"]


def test_runs_that_cannot_be_extended(finished: Run, tmp_path: Path) -> None:
    settings = STEPS | QUICK
    stopped = interrupted(small(**settings), tmp_path / "a")
    weights = deepstack.train(small(**settings), out=tmp_path / "b")
    diverged = deepstack.train(small(**settings, train__max_loss=0.1), out=tmp_path / "c")
    changed = RunFolder(shutil.copytree(finished.path, tmp_path / "d"))
    changed.evals_path.write_bytes(changed.evals_path.read_bytes().replace(b"5", b"6", 1))
    for path, steps, overrides, message in (
        (finished.path, 0, [], "found 0; allowed a number of further steps from 1 on"),
        (finished.path, 8, ["model.dropout=0.1"], r"found model\.dropout; an extension allows"),
        (finished.path, 8, ["train.steps=30"], r"found train\.steps; an extension allows"),
        (tmp_path / "nowhere", 8, [], "nowhere is not a run"),
        (stopped.path, 8, [], "is interrupted; allowed a finished run"),
        (weights.path, 8, [], r"keeps only its weights.*runtime\.keep_optimizer=true"),
        (diverged.path, 8, [], "is diverged; allowed"),
        (changed.path, 8, [], r"is damaged: evals\.csv: changed"),
    ):
        with pytest.raises((ConfigError, DifferenceError), match=message):
            parent_of(path, steps, overrides)


def test_an_extension_on_other_data_or_in_another_environment_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "my.txt"
    text.write_text("one way " * 200)
    run = parent_run(tmp_path, task__name="text", task__path=str(text), **QUICK)
    with pytest.raises(ConfigError, match="begun in another environment: threads"):
        extend(run, 8, "runtime.threads=3")
    text.write_text("another " * 200)
    with pytest.raises(ConfigError, match="was trained on other data"):
        extend(run, 8)
    folders = [path for path in run.path.parent.iterdir() if RunFolder(path).exists()]
    assert folders == [run.path]


def test_an_attempt_that_was_killed_begins_again(tmp_path: Path) -> None:
    run = parent_run(tmp_path, **QUICK)
    parent = parent_of(run.path, 8)
    draft = RunFolder(tmp_path / "draft")
    parent.enter(RunPlan(parent.config, task_of(parent.config)), draft)
    (draft.path / "config.yaml").unlink()
    name = extend(run, 8).name
    shutil.rmtree(run.path.parent / name)
    draft.path.rename(run.path.parent / name)
    longer = extend(run, 8)
    assert longer.name == name and longer.state == "done" and problems(longer.folder) == []
