"""`deepstack calibrate`: exponents of roles in depth, and learning rates without them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from helpers.command_line import typed
from helpers.sampling import some

import deepstack
from deepstack.analysis.calibration import interpolated_factors, role_exponents
from deepstack.config import Config, load_config, with_overrides
from deepstack.model import build_model
from deepstack.records import Run
from deepstack.schemes.post_norm import ADAM_GROWTH
from deepstack.sweeps import Calibration, calibrate, sweep
from tests.helpers.small_runs import data_of, small

MATRICES = ("q", "k", "v", "o", "w1", "w2")


def in_this_process(
    config: Config, grid: dict[str, Any], *, study: str, out: Path, **_: Any
) -> list[Run]:
    """The runs of a sweep, without its processes, which import torch anew."""
    cells = [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]
    return [deepstack.train(with_overrides(config, c), study=study, out=out) for c in cells]


@pytest.fixture(scope="module", autouse=True)
def no_processes() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deepstack.sweeps.calibration.sweep", in_this_process)
        yield


@pytest.fixture(scope="module")
def deepnorm(tmp_path_factory: pytest.TempPathFactory) -> Calibration:
    out = tmp_path_factory.mktemp("deepnorm")
    return calibrate(small(model__d_model=32), depths=(6, 24), seeds=3, steps=(1, 4), out=out)


def exponent_of(measured: Calibration, role: str, step: int = 1) -> float:
    (value,) = [row.exponent for row in measured.rows if (row.role, row.step) == (role, step)]
    assert value is not None
    return value


def test_deepnorm_under_adam_has_the_exponents_of_its_derivation(deepnorm: Calibration) -> None:
    """See `deepnorm_rates`: 1/2 for matrices, 3/4 for biases, 1 for norms, 0 for tables."""
    predicted = {"v": 0.5, "o": 0.5, "w1": 0.5, "w2": 0.5, "bias": 0.75}
    predicted |= {"norm_gain": 1.0, "norm_bias": 1.0, "embedding": 0.0}
    for role, growth in predicted.items():
        near = 0.06 if growth in (0.0, 1.0) else 0.1
        assert exponent_of(deepnorm, role) == pytest.approx(growth, abs=near), role
        assert ADAM_GROWTH.get(role, 0.0) == growth


def test_corrected_rates_make_the_update_independent_of_depth(deepnorm: Calibration) -> None:
    before = exponent_of(deepnorm, "together")
    after = {(row.role, row.step): row.exponent for row in deepnorm.rows_after}
    assert before > 0.4
    assert abs(after["together", 1] or 1) < 0.1
    assert all(abs(after[role, 1] or 0) < 0.02 for role in MATRICES)


def test_the_update_is_linear_in_the_rate(deepnorm: Calibration) -> None:
    values = [row.linearity for row in deepnorm.rows if row.exponent is not None]
    assert values == pytest.approx([0.5] * len(values), abs=0.02)


def test_rezero_s_matrices_are_calibrated_once_its_gates_have_moved(tmp_path: Path) -> None:
    config = small(model__scheme="rezero", model__d_model=32, train__lr=0.01)
    measured = calibrate(config, depths=(4, 16), seeds=2, steps=(1, 3), out=tmp_path)
    second = {row.role for row in measured.rows if row.origin == "current" and row.exponent}
    assert second >= {*MATRICES, "bias"} and not second & {"scheme", "embedding"}
    assert {row.origin for row in measured.rows if row.role == "head"} == {"initial"}
    assert all(exponent_of(measured, role, step=3) > 0.05 for role in MATRICES)
    after = {(row.role, row.step): row.exponent for row in measured.rows_after}
    assert all(abs(after[role, 3] or 1) < 0.06 for role in (*MATRICES, "scheme"))
    assert {row.origin for row in measured.rows_after} == {"current"}
    assert not measured.unmoved


@pytest.mark.parametrize("scheme", ["rezero", "layer_scale"])
def test_roles_that_move_nothing_but_rounding_are_named(tmp_path: Path, scheme: str) -> None:
    options = {"start": 1e-7} if scheme == "layer_scale" else {}
    config = small(model__scheme=scheme, model__scheme_options=options)
    measured = calibrate(config, depths=(4, 8), seeds=2, steps=(1,), check=False, out=tmp_path)
    assert not measured.second
    assert "w1" in measured.unmoved and "scheme" not in measured.unmoved


def test_roles_can_be_trained_alone_for_several_steps(tmp_path: Path) -> None:
    config = small(model__scheme="post_ln", train__trainable=["v", "w2"], train__lr=0.1)
    measured = calibrate(
        config, depths=(2, 4), seeds=1, steps=(1, 3), lr=0.01, alone=True, check=False, out=tmp_path
    )
    assert len(measured.alone) == 2 * len(measured.before)
    parts = {run.get("model.depth"): run for run in measured.before if run.get("train.lr") == 0.01}
    for row in measured.rows:
        if row.role in ("v", "w2"):
            sizes = [
                run.steps.set_index("step")["model_update"][row.step]
                for run in measured.alone
                if run.get("train.trainable") == [row.role] and run.get("train.lr") == 0.01
            ]
            assert (row.smallest, row.largest) == pytest.approx((min(sizes), max(sizes)))
            assert row.origin == "alone"
    joint = parts[2].attribution.set_index("step")["v"]
    (alone,) = [row for row in measured.rows if (row.role, row.step) == ("v", 3)]
    assert joint[3] not in (pytest.approx(alone.smallest), pytest.approx(alone.largest))


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon"])
def test_after_one_step_a_role_s_part_is_its_update_when_trained_alone(
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


@pytest.mark.parametrize(
    ("scheme", "optimizer"), some(product(["deepnorm", "depth_mup"], ["adamw", "sgd", "muon"]), 2)
)
def test_exponents_are_factors_at_each_depth(tmp_path: Path, scheme: str, optimizer: str) -> None:
    """(8/2)^(-1/2) = 1/2 and (8/2)^(1) = 4."""
    base = small(model__depth=8, model__scheme=scheme, train__optimizer=optimizer)
    powers = {"train.base_depth": 2, "train.lr_exponents": {"v": 0.5, "norm_gain": -1.0}}
    factors = {"train.lr_factors": {"v": 0.5, "norm_gain": 4.0}}
    runs = [deepstack.train(with_overrides(base, one), out=tmp_path) for one in (powers, factors)]
    assert data_of(runs[0]) == data_of(runs[1])
    assert data_of(runs[0]) != data_of(deepstack.train(base, out=tmp_path))


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


def test_a_bend_shows_as_curvature_and_is_followed_by_interpolation() -> None:
    table = updates(lambda n, s: np.exp(0.3 * np.log(n) ** 2))
    (row,) = role_exponents(table)
    assert row.curvature == pytest.approx(0.3)
    factors = interpolated_factors(table, step=1, depth=48, base=6)
    assert factors["v"] == pytest.approx(np.exp(0.3 * (np.log(6) ** 2 - np.log(48) ** 2)))


def test_the_command_writes_a_config_that_trains_and_prints_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deepstack.sweeps.calibration.sweep", sweep)
    words = ["configs/quick.yaml", "model.d_model=16", "model.n_heads=1", "task.seq_len=8"]
    options = ["--depths", "2,4", "--seeds", "2", "--steps", "1", "--out", str(tmp_path)]
    result = typed("calibrate", *words, *options, "--json", "--quiet")
    assert result.exit_code == 0, result.stderr
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
    assert result.exit_code == 2
    assert message in result.stderr
    assert not list(tmp_path.iterdir())
