"""`deepstack calibrate`: exponents of roles in depth, and the config that follows."""

import json
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from helpers import small_runs
from helpers.command_line import typed
from helpers.extensions import known, needs

import deepstack
from deepstack.config import load_config, with_overrides
from deepstack.model import build_model
from deepstack.schemes.deepnorm import ADAM_GROWTH
from deepstack.tools.calibrate.calibrate import calibrate
from deepstack.tools.calibrate.exponents import interpolated_factors, role_exponents

MATRICES = ("q", "k", "v", "o", "w1", "w2")
# Learning rates and updates need neither evaluations nor records of layers.
small = partial(small_runs.small, train__eval_every=0, log__layers_every=0)


@pytest.fixture(autouse=True)
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepstack.tools.calibrate.calibrate.sweep", small_runs.sweep_here)


measures_parts = needs("attribution")  # by which calibrate measures


def exponents_of(rows: list[Any], step: int) -> dict[str, float]:
    return {row.role: row.exponent for row in rows if row.step == step and row.exponent is not None}


@measures_parts
@pytest.mark.slow
def test_deepnorm_under_adam_has_the_exponents_of_its_derivation(tmp_path: Path) -> None:
    """See `deepnorm_rates`: 1/2 for matrices, 3/4 for biases, 1 for norms, 0 for tables."""
    config = small(model__d_model=32)
    measured = calibrate(config, depths=(6, 24), seeds=4, steps=(1,), out=tmp_path)
    before, after = exponents_of(measured.rows, 1), exponents_of(measured.rows_after, 1)
    predicted = {"v": 0.5, "o": 0.5, "w1": 0.5, "w2": 0.5, "bias": 0.75}
    predicted |= {"norm_gain": 1.0, "norm_bias": 1.0, "embedding": 0.0}
    for role, growth in predicted.items():
        near = 0.06 if growth in (0.0, 1.0) else 0.1
        assert before[role] == pytest.approx(growth, abs=near), role
        assert ADAM_GROWTH.get(role, 0.0) == growth
    # With corrected rates the update is independent of depth.
    assert before["together"] > 0.4 and abs(after["together"]) < 0.1
    assert all(abs(after[role]) < 0.02 for role in MATRICES)
    # The update is linear in the rate.
    values = [row.linearity for row in measured.rows if row.exponent is not None]
    assert values == pytest.approx([0.5] * len(values), abs=0.02)


@measures_parts
@pytest.mark.slow
def test_rezero_s_matrices_are_calibrated_once_its_gates_have_moved(tmp_path: Path) -> None:
    config = small(model__scheme="rezero", model__d_model=32, train__lr=0.01)
    measured = calibrate(config, depths=(4, 16), seeds=1, steps=(1, 3), out=tmp_path)
    second = {row.role for row in measured.rows if row.origin == "current" and row.exponent}
    assert second >= {*MATRICES, "bias"} and not second & {"scheme", "embedding"}
    assert {row.origin for row in measured.rows if row.role == "head"} == {"initial"}
    before, after = exponents_of(measured.rows, 3), exponents_of(measured.rows_after, 3)
    assert all(before[role] > 0.05 for role in MATRICES)
    assert all(abs(after[role]) < 0.06 for role in (*MATRICES, "scheme"))
    assert {row.origin for row in measured.rows_after} == {"current"}
    assert not measured.unmoved
    factors, base = measured.interpolated(16).train.lr_factors, config.train.base_depth
    assert {*MATRICES, "bias"} < {*factors}
    for role, power in measured.exponents.items():  # between two depths: the power itself
        assert factors[role] == pytest.approx((base / 16) ** power, rel=1e-4), role


@measures_parts
def test_roles_that_move_nothing_but_rounding_are_named(tmp_path: Path) -> None:
    config = small(model__scheme="layer_scale", model__scheme_options={"start": 1e-7})
    measured = calibrate(config, depths=(4, 8), seeds=1, steps=(1,), check=False, out=tmp_path)
    assert not measured.second
    assert "w1" in measured.unmoved and "scheme" not in measured.unmoved


@pytest.mark.slow
@measures_parts
def test_roles_can_be_trained_alone_for_several_steps(tmp_path: Path) -> None:
    config = small(model__scheme="post_ln", train__trainable=["v", "w2"], train__lr=0.1)
    steps = (2, 3, 4)  # no step divides all others
    measured = calibrate(
        config, depths=(2, 4), seeds=1, steps=steps, lr=0.01, alone=True, check=False, out=tmp_path
    )
    assert {row.role for row in measured.rows} == {"v", "w2", "together"}
    assert [row.step for row in measured.rows if row.role == "together"] == [2, 3, 4]
    assert not measured.unmoved and not measured.second
    assert len(measured.alone) == 2 * len(measured.before)
    alone = [run for run in measured.alone if run.get("train.lr") == 0.01]
    rows = [row for row in measured.rows if row.role in ("v", "w2")]
    assert {(row.role, row.step) for row in rows} == {*product(("v", "w2"), steps)}
    for row in rows:
        runs = [run for run in alone if run.get("train.trainable") == [row.role]]
        sizes = sorted(run.steps.set_index("step").model_update[row.step] for run in runs)
        assert [row.smallest, row.largest] == pytest.approx(sizes)
        assert row.origin == "alone"


@measures_parts
def test_settings_of_the_log_do_not_count_and_factors_of_the_user_stay(tmp_path: Path) -> None:
    logs = {"log.layers_every": 1, "log.attribution_from": "current"}
    logs |= known({"log.noise_scale": True})
    config = with_overrides(small(train__lr_factors={"head": 2.0, "q": 0.5}), logs)
    measured = calibrate(config, depths=(2, 4), seeds=1, steps=(1,), check=False, out=tmp_path)
    assert {run.get("log.attribution_from") for run in measured.before} == {"initial"}
    assert {row.origin for row in measured.rows} == {"initial"}
    factors = measured.interpolated(6).train.lr_factors
    assert (factors["head"], factors["q"]) == (2.0, 0.5)  # 6 is the base


@measures_parts
@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon"])
def test_the_first_part_of_a_role_is_its_update_when_trained_alone(
    tmp_path: Path, optimizer: str
) -> None:
    together = small(
        train__optimizer=optimizer, train__steps=1, train__clip=None, train__warmup_steps=0,
        log__attribution_every=1,
    )  # fmt: skip
    parts = deepstack.train(together, out=tmp_path).attribution
    for role in ("v", "w2", "norm_gain"):
        run = deepstack.train(with_overrides(together, {"train.trainable": [role]}), out=tmp_path)
        alone = run.steps["model_update"].iloc[0]
        assert parts[role].iloc[0] == pytest.approx(alone, rel=1e-4), role


def test_exponents_multiply_the_factors_of_user_and_scheme() -> None:
    config = small(
        model__scheme="deepnorm_rates", model__depth=24, train__lr_factors={"v": 3.0},
        train__lr_exponents={"v": 0.5}, train__eps_exponent=1.0,
        train__decay_by_depth="constant",
    )  # fmt: skip
    factors = build_model(config, vocab_size=257, device="meta").optim("v")
    assert factors.lr == pytest.approx((6 / 24) ** 0.5 * (6 / 24) ** 0.5)
    assert factors.eps == pytest.approx(6 / 24)
    assert factors.lr * factors.weight_decay == pytest.approx((6 / 24) ** 0.5)  # the scheme's alone


def updates(value: Any) -> pd.DataFrame:
    rows = [
        {"depth": n, "seed": s, "lr": lr, "step": 1, "role": "v", "value": value(n, s) * lr}
        for n in (6, 12, 48)
        for s in (0, 1, 2)
        for lr in (1.0, 0.5)
    ]
    return pd.DataFrame(rows)


def test_a_power_law_is_fitted_with_the_error_of_its_seeds() -> None:
    slopes = {0: 0.4, 1: 0.5, 2: 0.6}
    (row,) = role_exponents(updates(lambda n, s: n ** slopes[s]))
    assert row.exponent == pytest.approx(0.5)
    assert row.error == pytest.approx(0.1 / np.sqrt(3))
    assert row.high == pytest.approx(0.5 + 4.3027 * 0.1 / np.sqrt(3), rel=1e-4)  # t, 2 degrees
    assert row.curvature == pytest.approx(0, abs=1e-9)
    assert row.linearity == pytest.approx(0.5)


def test_movements_within_rounding_say_nothing_on_linearity() -> None:
    table = updates(lambda n, s: n**0.5)
    table.loc[(table["seed"] == 1) & (table["lr"] == 0.5), "value"] = 0.0
    (row,) = role_exponents(table)
    assert row.linearity == pytest.approx(0.5)
    table.loc[table["lr"] == 0.5, "value"] = 0.0
    (row,) = role_exponents(table)
    assert row.linearity is None


def test_two_seeds_have_an_exponent_without_an_interval() -> None:
    table = updates(lambda n, s: n ** (0.4 + 0.1 * s))
    (row,) = role_exponents(table[table["seed"] < 2])
    assert row.exponent == pytest.approx(0.45) and row.low is None and row.high is None


def test_a_role_that_does_not_move_f_has_no_exponent() -> None:
    table = updates(lambda n, s: 0.0 if s == 2 else n**0.5)
    (row,) = role_exponents(table[(table["seed"] < 2) | (table["depth"] < 48)])
    assert row.exponent is None


def test_a_bend_shows_as_curvature_and_is_followed_by_interpolation() -> None:
    table = updates(lambda n, s: np.exp(0.3 * np.log(n) ** 2))
    (row,) = role_exponents(table)
    assert row.curvature == pytest.approx(0.3)
    for seed, power in ((0, 1), (1, -1)):  # a mean over seeds of logarithms stays
        table.loc[table["seed"] == seed, "value"] *= table["depth"].astype(float) ** power
    factors = interpolated_factors(table, step=1, depth=48, base=6)
    assert factors["v"] == pytest.approx(np.exp(0.3 * (np.log(6) ** 2 - np.log(48) ** 2)))


@measures_parts
@pytest.mark.parametrize("in_processes", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_command_writes_a_config_that_trains_and_prints_rows(
    in_processes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if in_processes:
        monkeypatch.setattr("deepstack.tools.calibrate.calibrate.sweep", deepstack.sweep)
    words = ["configs/quick.yaml", "model.d_model=16", "model.n_heads=1", "task.seq_len=8"]
    options = ["--depths", "2,4", "--seeds", "0,1", "--steps", "1", "--out", str(tmp_path)]
    result = typed("calibrate", *words, *options, "--json")
    assert result.exit_code == 0, result.stderr
    depth = load_config("configs/quick.yaml").model.depth
    assert "train.lr 0.002 counts at N = 6 (train.base_depth)" in result.stderr
    assert depth == 6 or f"repeat this with train.base_depth={depth}" in result.stderr
    assert "N = 6 lies outside the measured depths, 2 to 4: its factors are extr" in result.stderr
    rows = json.loads(result.stdout)["rows"]
    assert {"role", "exponent", "error", "after"} <= rows[0].keys()
    written = load_config(tmp_path / "quick_calibration.yaml")
    exponents = {row["role"]: row["exponent"] for row in rows if row["exponent"] is not None}
    assert written.train.lr_exponents["v"] == pytest.approx(exponents["v"], abs=1e-3)
    assert (tmp_path / "quick_calibration_before").is_dir()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--depths", "6"], "--depths: found [6]; allowed two depths or more"),
        (["--depths", "6,x"], "--depths: found '6,x'; allowed whole numbers"),
        (["--steps", "0,1"], "--steps: found [0, 1]; allowed steps from 1 on"),
    ],
)
def test_wrong_options_are_refused(tmp_path: Path, options: list[str], message: str) -> None:
    words = ["calibrate", "configs/quick.yaml", *options, "--out", str(tmp_path)]
    result = typed(*words)
    assert result.exit_code == 2 and message in result.stderr
    assert not list(tmp_path.iterdir())
