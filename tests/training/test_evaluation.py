"""The validation loss: the size of its set, its standard error, and what other runs may compare."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.command_line import typed
from helpers.configs import config_with
from helpers.extensions import needs
from helpers.plot_runs import make_run
from helpers.report_pages import draw_only
from helpers.small_runs import interrupted, small

import deepstack
from deepstack.base.errors import ConfigError
from deepstack.config import load_config, validation_sequences
from deepstack.records import Run, data_identity
from deepstack.runs import Runs
from deepstack.runs.studies import find_studies
from deepstack.runs.validation import of_one_validation
from deepstack.tasks import IGNORE
from deepstack.training import load_trained, parent_of
from deepstack.training.evaluation import standard_error

# --- the size ------------------------------------------------------------------------------

ENCODER, DECODER = (16, 2), (64, 64)  # tokens of a sequence and its predicted positions


@pytest.mark.parametrize(
    ("shape", "settings", "sequences"),
    [
        (ENCODER, {"train.steps": 200, "train.eval_every": 50}, 640),  # 3/4 of 50 batches of 16
        (ENCODER, {"train.steps": 200, "train.eval_every": 100}, 1280),
        (ENCODER, {"train.steps": 200, "train.eval_every": 0}, 2432),
        (ENCODER, {"train.steps": 0}, 512),  # 1,024 positions
        (ENCODER, {"train.steps": 10**4, "train.eval_every": 10}, 512),
        (ENCODER, {"train.steps": 10**6, "train.eval_every": 1000}, 4096),  # 8,192 positions
        (DECODER, {"train.steps": 300}, 128),
        (DECODER, {"train.steps": 1}, 32),
        ((4096, 4096), {"train.steps": 300}, 2),
        (ENCODER, {"train.eval_batches": 3}, 48),
    ],
)
def test_the_size_of_the_set_is_a_rule_of_shape_steps_and_evaluations(
    shape: tuple[int, int], settings: dict[str, int], sequences: int
) -> None:
    sizes = {
        validation_sequences(config_with(settings, **{"model.depth": depth}), *shape)
        for depth in (1, 48, 1000)
    }
    assert sizes == {sequences}  # the same at every depth


def test_the_configurations_of_the_first_page_have_it() -> None:
    for name in ("quick", "depth_sweep", "deepnorm_1000", "post_ln_1000", "pre_ln_1000"):
        path = Path(deepstack.__file__).parents[1] / "configs" / f"{name}.yaml"
        if name == "depth_sweep":
            assert "eval_batches" not in path.read_text()
        else:
            config = load_config(path)
            assert 1024 <= 2 * validation_sequences(config, 16, 2) <= 8192


# --- the standard error --------------------------------------------------------------------


def test_the_standard_error_of_means_of_blocks() -> None:
    """Of equal blocks it is the standard deviation of their means over the root of their number."""
    sums, ones = np.array([1.0, 3.0, 2.0, 6.0, 8.0, 4.0]), np.ones(6, dtype=np.int64)
    blocks = np.array([7, 7, 0, 0, 3, 3])  # means 2, 4 and 6
    mean, error = standard_error(sums, ones, blocks)
    assert (mean, error) == (4.0, pytest.approx(2 / math.sqrt(3)))
    mean, error = standard_error(np.array([4.0, 0.0]), np.array([1, 3]), np.array([0, 1]))
    assert (mean, error) == (1.0, pytest.approx(math.sqrt(2 * (3**2 + 3**2)) / 4))
    assert standard_error(sums, ones, np.zeros(6, dtype=np.int64)) == (4.0, None)


@pytest.mark.slow(turn=27)
def test_the_logged_errors_are_those_of_a_jackknife_over_blocks(tmp_path: Path) -> None:
    """Of losses that the plain model gives, leaving out one block of about three sequences."""
    config = small(model__d_model=32, train__eval_batches=100, train__lr=1e-2, train__steps=30)
    run = deepstack.train(config, out=tmp_path)
    trained = load_trained(run.folder, print)
    batch, blocks = trained.task.validation_set(400)
    with torch.no_grad():
        logits = trained.built.model.eval()(torch.from_numpy(batch.inputs))
    losses = F.cross_entropy(
        logits.flatten(0, 1), torch.from_numpy(batch.targets).flatten(), reduction="none"
    ).numpy()
    losses = losses.reshape(batch.targets.shape).astype(float)
    chance = trained.task.chance_losses(batch)
    for column, values, positions in (
        ("loss", losses, batch.targets != IGNORE),
        ("loss_masked", losses, batch.masked),
        ("margin", losses - chance, batch.masked),
    ):
        sums, numbers = np.where(positions, values, 0).sum(axis=1), positions.sum(axis=1)
        without = [sums[blocks != b].sum() / numbers[blocks != b].sum() for b in np.unique(blocks)]
        count = len(without)
        assert count == run.meta["validation"]["blocks"] > 100
        error = math.sqrt((count - 1) / count * ((without - np.mean(without)) ** 2).sum())
        last = run.evals.iloc[-1]
        assert last[f"{column}_se"] == pytest.approx(error, rel=0.03)
        mean = sums.sum() / numbers.sum()
        logged = last["loss_masked"] - last["unigram_loss"] if column == "margin" else last[column]
        assert logged == pytest.approx(mean, rel=1e-4)
    assert run.meta["validation"]["sequences"] == 400
    assert run.columns["columns"]["margin_se"]["unit"] == "nats"
    shown = f"step 30  validation loss {last['loss']:.4g} ± {last['loss_se']:.2g}  loss_masked "
    assert shown in run.folder.log_path.read_text()


def test_seeds_and_depths_share_the_references(tmp_path: Path) -> None:
    runs = [
        deepstack.train(small(seed=seed, model__depth=depth, train__steps=1), out=tmp_path)
        for seed, depth in ((0, 1), (1, 1), (0, 2))
    ]
    levels = {run.evals["unigram_loss"].iloc[-1] for run in runs}
    assert len(levels) == 1
    for run in runs:
        assert run.meta["references"]["unigram_entropy"] == pytest.approx(*levels, rel=1e-6)


# --- resumed, extended and earlier runs ----------------------------------------------------


@pytest.mark.slow(turn=57)
def test_an_extended_run_keeps_the_validation_set_of_its_parent(tmp_path: Path) -> None:
    """Without intermediate evaluations more steps would make the set larger."""
    config = small(
        train__eval_every=0, train__eval_batches="auto", train__schedule="constant",
        train__batch_size=64, runtime__keep_optimizer=True, model__depth=1,
    )  # fmt: skip
    run = deepstack.train(config, out=tmp_path)
    parent = parent_of(run.path, 20)
    longer = deepstack.train(parent.config, out=tmp_path, parent=parent)
    assert longer.meta["validation"] == run.meta["validation"]
    assert not longer.meta["extends"]["exact"]  # trained at once it has another set
    alone = deepstack.train(parent.config, out=tmp_path / "alone")
    assert alone.meta["validation"]["sequences"] > run.meta["validation"]["sequences"]


def test_a_run_of_an_earlier_version_is_not_continued(tmp_path: Path) -> None:
    folder = interrupted(small(runtime__checkpoint_seconds=0), tmp_path)
    meta = folder.read_meta()
    earlier = {key: value for key, value in meta.items() if key != "validation"}
    folder.write_meta(earlier)
    with pytest.raises(ConfigError, match="the validation set has changed since the checkpoint"):
        deepstack.train(small(runtime__checkpoint_seconds=0), study="runs", out=tmp_path)
    earlier |= {"data": {k: v for k, v in meta["data"].items() if k != "held_out"}}
    folder.write_meta(earlier)
    with pytest.raises(ConfigError, match="the held-out part of cpython-topics has changed since"):
        deepstack.train(small(runtime__checkpoint_seconds=0), study="runs", out=tmp_path)
    assert data_identity(earlier["data"]) == meta["data"]["sha256"] != data_identity(meta["data"])


def with_meta(run: Path, **more: object) -> Run:
    folder = Run(run).folder
    folder.write_meta(folder.read_meta() | {"data": {"name": "a"}} | more)
    return Run(run)


@pytest.mark.slow(turn=34)
@needs("answer", "report")
def test_runs_of_earlier_versions_are_not_compared_with_newer_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = tmp_path / "study"
    for seed in range(3):
        with_meta(make_run(study, scheme="pre_ln", seed=seed, masked=2.0))
    new = [
        with_meta(make_run(study, seed=seed, masked=2.5), validation={"blocks": 9}).name
        for seed in range(3)
    ]
    kept, lines = of_one_validation(Runs.below(study))
    assert [run.name for run in kept] == new and len(lines) == 1
    assert lines[0].startswith("left out: 3 runs of an earlier version of deepstack, which valid")
    studies, notes = find_studies([study])
    assert [run.name for run in studies[study]] == new and notes == lines
    draw_only(monkeypatch)
    for command in ("compare", "answer", "report"):
        done = typed(command, study)
        assert lines[0] in done.stderr and "Pre-LN" not in done.stdout
    assert lines[0] in typed("plot", "loss_vs_step", study).stderr
    # Alone they are readable.
    old = typed("compare", study, "--where", "scheme=pre_ln")
    assert "Pre-LN" in old.stdout and "left out" not in old.stderr
    assert of_one_validation(kept) == (kept, [])
