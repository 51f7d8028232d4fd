"""Sets of runs, and the keys of their settings."""

from pathlib import Path

import pandas as pd
import pytest
from helpers.plot_runs import make_run, make_runs, without_layout

import deepstack
from deepstack.base.errors import ConfigError, NothingMatchedError
from deepstack.config.key import Key
from deepstack.plots import CHARTS, Options
from deepstack.records import find_runs
from deepstack.runs import Runs
from deepstack.runs.studies import find_studies


def test_runs_compute_series_and_settings_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_runs(tmp_path, scheme=("deepnorm", "pre_ln"), depth=(6, 18), lr=(1e-3, 2e-3))
    counted: list[int] = []
    real = deepstack.runs.runs.split_series
    monkeypatch.setattr(
        "deepstack.runs.runs.split_series", lambda *words: counted.append(1) or real(*words)
    )
    runs = Runs.below(tmp_path)
    assert runs.series() is runs.series() and runs.varying is runs.varying
    assert [s.label for s in runs.series(but=["train.lr"])] == ["DeepNorm", "Pre-LN"]
    assert len(counted) == 2 and len(runs.series()) == 4
    with without_layout():
        for name in ("update_vs_step", "loss_vs_step"):
            CHARTS[name](runs, options=Options())
    assert len(counted) == 3 and runs.at_best_rates is runs.at_best_rates


def test_runs_are_an_immutable_sequence(tmp_path: Path) -> None:
    make_runs(tmp_path, depth=(6, 18))
    found = find_runs(tmp_path)
    runs = Runs(found)
    assert list(runs) == found and runs[0] is found[0] and len(runs[:1]) == 1
    assert Runs(runs) is runs and runs.keep(lambda run: True) is runs
    with pytest.raises(TypeError):
        runs[0] = found[1]  # type: ignore[index]
    with pytest.raises(NothingMatchedError, match="no deep run"):
        runs.keep(lambda run: run.get("model.depth") > 18, "no deep run")


def test_runs_select_as_load_runs_does(tmp_path: Path) -> None:
    for lr, masked in ((1e-3, 2.5), (2e-3, 2.0)):
        make_run(tmp_path / "study", lr=lr, masked=masked)
        make_run(tmp_path / "study", lr=lr, masked=masked, depth=18)
    runs = Runs.below(tmp_path)
    for where, best in (("depth=18", ()), ((), "lr"), ("lr<0.0015", ())):
        table = deepstack.load_runs(tmp_path, where=where, best=best)
        pd.testing.assert_frame_equal(runs.select(where, best=best).table, table)
    assert [run.get("train.lr") for run in runs.select(best="lr")] == [2e-3, 2e-3]


def test_a_tidy_table_is_the_callers_own(tmp_path: Path) -> None:
    make_runs(tmp_path, depth=(6, 18))
    runs = Runs.below(tmp_path)
    changed = runs.tidy("loss")
    changed["value"] = 0.0
    assert (runs.tidy("loss")["value"] > 3).all() and len(runs.tidy("loss")) == 10


KEYS = ["model.scheme", "model.depth", "model.d_model", "train.lr", "task.name", "val_loss"]


def test_a_word_names_one_key(tmp_path: Path) -> None:
    assert [Key.look_up(word, KEYS, "where") for word in ("lr", "dep", "task", "val_loss")] == [
        "train.lr", "model.depth", "task.name", "val_loss"
    ]  # fmt: skip
    assert Key.look_up("d", KEYS, "x", prefer=["model.depth"]) == "model.depth"
    for word, message in (("d", "can mean model.depth, model.d_model"), ("dpeth", "'model.depth'")):
        with pytest.raises(ConfigError, match=f"^where: .*{message}"):
            Key.look_up(word, KEYS, "where")
    assert Key.nearest("lrr", KEYS) == "train.lr" and Key.nearest("zzzzzz", KEYS) is None


@pytest.mark.parametrize(
    ("key", "short", "words"),
    [
        ("train.lr", "lr", "learning rate"),
        ("model.depth", "depth", "depth N (layers)"),
        ("model.norm.kind", "norm kind", "norm kind"),
        ("model.scheme_options.streams", "streams", "streams"),
        ("task.name", "task", "task"),
        ("seed", "seed", "seed"),
        ("param_norm", "param_norm", "parameter norm"),
        ("ln_input_feed_forward", "ln_input_feed_forward", "LN input, feed-forward"),
    ],
)
def test_a_key_has_a_short_form_and_words(key: str, short: str, words: str) -> None:
    assert (Key(key).short, Key(key).words) == (short, words)


@pytest.mark.parametrize("order", [["first", "second"], ["second", "first"]])
def test_of_equal_runs_in_several_folders_the_ended_one_counts(
    order: list[str], tmp_path: Path
) -> None:
    for seed in range(3):
        make_run(tmp_path / "first", seed=seed, state="done" if seed else "interrupted")
        make_run(tmp_path / "second", seed=seed)
    studies, lines = find_studies([tmp_path / name for name in order])
    (runs,) = studies.values()
    assert [run.state for run in runs] == ["done"] * 3 and len(lines) == 3
    assert any(f"{tmp_path / 'first'}" in line.split(" is left out")[0] for line in lines)
