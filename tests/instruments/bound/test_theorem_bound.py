"""The right-hand side of Theorem 4.2, and the schemes to which it applies."""

import math
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from helpers.configs import config_with
from helpers.papers import PAPERS
from helpers.plot_runs import make_chart, make_run, rows, words
from helpers.small_runs import small

import deepstack
from deepstack.base.errors import NothingMatchedError
from deepstack.config import with_overrides
from deepstack.instruments.bound.chart import right_hand_side
from deepstack.instruments.bound.measure import alphas
from deepstack.model import build_model
from deepstack.records import Run
from deepstack.schemes import SCHEMES, Scheme

N = 3


def measured_alphas(name: str, **changes: Any) -> list[list[float]]:
    """The measured α of every sublayer of every layer."""
    keys = {"model.scheme": name, "model.depth": N, "model.d_model": 8, "task.seq_len": 4}
    built = build_model(config_with(keys, **changes), vocab_size=7)
    return [alphas(scheme, 8, torch.device("cpu")) for scheme in built.model.schemes]


# By the papers' equations: N layers, 2N sublayers.
KNOWN = {
    **{name: paper.post(N) for name, paper in PAPERS.items() if paper.post},
    "branch_norm": math.inf,  # before the first step its branch has the coefficient 0
    "admin": 1.0,  # where its vector starts in the closed form 'linear'
}


@pytest.mark.parametrize("name", SCHEMES.names())
def test_alpha_equals_the_papers_and_is_nan_for_other_forms(name: str) -> None:
    options = {"model__scheme_options": {"start": "linear"}} if name == "admin" else {}
    for values in measured_alphas(name, **options):
        if name in KNOWN:
            assert values == pytest.approx([KNOWN[name]] * 2, rel=1e-6)
        elif name == "b2t":  # its attention is Post-LN's, its feed-forward reads two streams more
            assert values == [pytest.approx(1.0), pytest.approx(math.nan, nan_ok=True)]
        else:
            assert all(map(math.isnan, values)), values


@pytest.mark.parametrize(
    ("residual", "expected"),
    [
        (lambda self, x, G, norm: norm(3 * x + 2 * G(x)), 1.5),
        (lambda self, x, G, norm: norm(x + G(0.5 * x)), math.nan),
        (lambda self, x, G, norm: norm(x + G(x)) + x, math.nan),
        (lambda self, x, G, norm: norm(x + G(x) * G(x)), math.nan),
        (lambda self, x, G, norm: norm(x * x + G(x)), math.nan),
        (lambda self, x, G, norm: x + G(norm(x)), math.nan),
        (lambda self, x, G, norm: norm(norm(x) + G(x)), math.nan),
    ],
)
def test_alpha_of_an_unknown_scheme_is_measured(residual: Any, expected: float) -> None:
    body = {"residual": residual, "__doc__": "x <- ?.  A test's."}
    type("Unknown", (Scheme,), body, name="unknown", label="?", paper="none")
    for values in measured_alphas("unknown"):
        assert values == pytest.approx([expected] * 2, nan_ok=True)


@pytest.mark.parametrize("family", ["encoder", "decoder", "encoder_decoder"])
@pytest.mark.parametrize("scheme", ["deepnorm", "post_ln"])
def test_the_right_hand_side_is_a_sum(family: str, scheme: str, tmp_path: Path) -> None:
    task = "text" if family == "encoder" else "markov"
    config = small(
        model__family=family, model__scheme=scheme, train__steps=3, model__depth=2, task__name=task
    )
    run = deepstack.train(config, out=tmp_path)
    found: Any = right_hand_side(run)
    assert list(found["step"]) == [1, 2, 3]
    row = found.iloc[-1]
    names = [name for name in run.layer_names() if name.startswith("bound_")]
    terms = np.nansum([run.layers(name)[1][-1] for name in names], axis=0)  # (layers,)
    encoder, decoder = terms[:2].sum(), terms[2:].sum()
    if family == "encoder_decoder":
        encoder *= run.layers("effective_gain_cross_attention")[1][-1][2:].sum()
    assert row["bound"] == pytest.approx(encoder + decoder, rel=1e-4)
    assert row["ratio"] == row["bound"] / run.steps["model_update"].iloc[-1]


@pytest.mark.parametrize(
    "changes",
    [
        {"model.scheme": "pre_ln"},
        {"model.activation": "gelu"},
        {"model.norm.kind": "batch"},
        {"model.init.distribution": "ntk"},
    ],
    ids=str,
)
def test_terms_are_nan_for_other_models(changes: dict[str, Any], tmp_path: Path) -> None:
    run = deepstack.train(with_overrides(small(train__steps=2), changes), out=tmp_path)
    for part in ("attention", "feed_forward"):
        for name in ("bound", "effective_gain"):
            assert np.isnan(run.layers(f"{name}_{part}")[1]).all()
    predicted = run.layers("grad_norm_predicted")[1]
    if "model.init.distribution" in changes:  # of which its formula knows
        assert np.isfinite(predicted).all()
    else:
        assert np.isnan(predicted[:, :-1]).all()
    assert right_hand_side(run) is None
    for name in ("bound_vs_measured", "bound_vs_depth"):
        with pytest.raises(NothingMatchedError, match=r"speaks of x <- LN\(alpha x"):
            make_chart(name, tmp_path)


@pytest.mark.parametrize(("optimizer", "exponent"), [("sgd", 0.0), ("adam", 0.5)])
def test_the_theorem_on_one_step(optimizer: str, exponent: float, tmp_path: Path) -> None:
    """DeepNorm's two sides: neither grows under SGD, both grow as the root of N under Adam.

    The right-hand side is an estimate of the other: about as large, and in the same proportion at
    every depth.
    """
    depths = [4, 12, 36]
    both = pd.DataFrame()
    for depth in depths:
        config = small(
            model__depth=depth, train__steps=1, train__optimizer=optimizer, train__clip=None,
            train__lr=1e-4 if optimizer == "sgd" else 1e-6, train__warmup_steps=0,
            train__trainable=["q", "k", "v", "o", "w1", "w2"], log__layers_every=1,
        )  # fmt: skip
        both = pd.concat([both, right_hand_side(deepstack.train(config, out=tmp_path))])
    for side in ("bound", "measured"):
        slope = np.polyfit(np.log(depths), np.log(both[side]), 1)[0]
        assert slope == pytest.approx(exponent, abs=0.1), side
    least, most = both["ratio"].min(), both["ratio"].max()
    assert 0.5 < least and most < 2 and most < 1.25 * least


def bound_run(
    root: Path, depth: int, last: float = 2.0, steps: tuple[int, int] = (1, 2), **more: Any
) -> None:
    """A run whose terms add up to depth^1 / 100 at the first and `last` times that at the last."""
    path = make_run(root, depth=depth, **more)
    run = Run(path)
    run.folder.write_columns(run.columns | {"stacks": {"encoder": depth}})
    terms = np.array([[0.0], [1.0], [last]]) * np.full((3, depth), 0.005)
    sides = {f"bound_{part}": terms for part in ("attention", "feed_forward")}
    run.folder.write_layers(sides, [0, *steps])


def test_the_charts_show_both_sides_and_their_ratio(tmp_path: Path) -> None:
    """make_run's measured update is 0.01 N^0.5 t."""
    for depth, seed in product((6, 48, 100), (0, 1)):
        bound_run(tmp_path / "study", depth, seed=seed)
    chart = make_chart("bound_vs_depth", tmp_path)
    fits = rows(chart, kind="fit").set_index("panel")["exponent"].to_dict()
    assert fits == pytest.approx(
        {"measured": 0.5, "right-hand side": 1.0, "right-hand side / measured": 0.5}
    )
    ratio = rows(chart, kind="point", panel="right-hand side / measured")
    assert ratio["y"].tolist() == pytest.approx([math.sqrt(d) for d in (6, 48, 100)], rel=1e-6)
    assert any("both, step 2" in text for text in words(chart))
    against_step = make_chart("bound_vs_measured", tmp_path)
    points = rows(against_step, kind="line", series="DeepNorm, N = 48")
    assert points["x"].tolist() == [1, 2]
    assert points["y"].tolist() == pytest.approx([math.sqrt(48)] * 2, rel=1e-6)
    assert rows(against_step, kind="level")["y"].tolist() == [1.0]


def test_a_run_outside_of_the_theorem_does_not_hide_the_others(tmp_path: Path) -> None:
    for depth in (6, 18, 48):
        bound_run(tmp_path, depth, last=math.nan if depth == 18 else 2.0)
    chart = make_chart("bound_vs_depth", tmp_path)
    assert rows(chart, kind="point", panel="measured")["x"].tolist() == [6, 48]
    text = " ".join(words(chart))
    assert "both, step 2" in text and "no value at step 2: DeepNorm, N = 18" in text
    assert "not of the theorem's form" not in text and "last snapshot" not in text


def test_the_last_snapshot_is_one_of_all_runs(tmp_path: Path) -> None:
    for depth, last_step in ((6, 4), (18, 3)):
        bound_run(tmp_path, depth, steps=(2, last_step))
    chart = make_chart("bound_vs_depth", tmp_path)
    assert rows(chart, kind="point", panel="measured")["x"].tolist() == [6, 18]
    assert "step 2 is the last snapshot that all share" in " ".join(words(chart))
