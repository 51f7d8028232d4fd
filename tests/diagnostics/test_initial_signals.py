"""Initial signals: gradients by the stream, ‖∂F/∂x_l‖, and growth rates with a known value."""

import json
import math
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from helpers.command_line import TINY, typed
from helpers.sampling import some
from helpers.snapshots import ToyModel
from torch import Tensor

import deepstack
from deepstack.analysis.quantities import growth
from deepstack.config import Config, with_overrides
from deepstack.records import Run
from deepstack.schemes import SCHEMES
from deepstack.sweeps.initial_signals import START, Signals


@pytest.mark.parametrize("scheme", some(SCHEMES.names(), 6, 1))
def test_the_gradient_by_the_stream_is_that_of_all_its_tensors(scheme: str) -> None:
    """Of views of those of the shape of x, which only the next layer reads."""
    for family in SCHEMES[scheme].families:
        toy = ToyModel(model__scheme=scheme, model__family=family)
        measured, views = toy.values()["stream_grad"].tolist(), []

        def keep(module: Any, args: Any, out: Any, views: list[Any] = views) -> Any:
            stream = out if isinstance(out, tuple) else (out,)
            given = [y.view_as(y) if isinstance(y, Tensor) else y for y in stream]
            known = set(map(id, args[0] if stream is out else ()))  # what is carried on unchanged
            own = [v for v, y in zip(given, stream, strict=True) if id(y) not in known]
            shape = given[0].shape
            views.append([y for y in own if isinstance(y, Tensor) and y.shape[-3:] == shape])
            return tuple(given) if isinstance(out, tuple) else given[0]

        for layer in toy.model.layers:
            layer.register_forward_hook(keep)
        loss = toy.loss(toy.model(toy.tokens))
        for value, tensors in zip(measured, views, strict=True):
            gradients = torch.autograd.grad(loss, tensors, retain_graph=True, allow_unused=True)
            norm = math.hypot(*(g.norm().item() for g in gradients if g is not None))
            assert value == pytest.approx(norm, rel=1e-3, abs=1e-8), family


def test_growth_is_the_slope_of_the_logarithm() -> None:
    layers = np.arange(1.0, 8.0)
    collapsed = np.array([8.0, 4, 2, 0, 0, 0, 1])  # the layers before the first 0 count
    values = np.stack([3 * np.exp(-0.2 * layers), layers, collapsed, 0 * layers, layers - 3])
    slope = np.polyfit(layers, np.log(layers), 1)[0]
    assert growth(values)[:3] == pytest.approx([-0.2, slope, -math.log(2)])
    assert np.isnan(growth(values)[3:]).all() and np.isnan(growth(values[:, :1])).all()


SHAPE = {
    "model.d_model": 64, "model.d_ff": 64, "task.name": "markov", "task.seq_len": 8,
    "log.probe_sequences": 8, "runtime.threads": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def signals(tmp_path_factory: pytest.TempPathFactory) -> Signals:
    """Runs made in this process, as `deepstack.signal` makes them in others."""
    out, base = tmp_path_factory.mktemp("signals"), with_overrides(Config(), SHAPE | START)
    cells = [
        *product(["post_ln"], [8], range(8)), *product(["post_ln", "deepnorm"], [24], range(2)),
        *product(["pre_ln"], [24], range(3)),
    ]  # fmt: skip
    keys = ("model.scheme", "model.depth", "seed")
    configs = [with_overrides(base, dict(zip(keys, cell, strict=True))) for cell in cells]
    return Signals([deepstack.train(config, out=out) for config in configs])


def test_exponents_are_those_of_mean_field_theory(signals: Signals) -> None:
    """Once tokens are nearly alike, uniform attention of power a adds the same to all of them.

    LN(α x + G(x)) then divides their squared distance by 1 + a/α² in each layer, and adds nothing
    to it in the feed-forward: a ReLU network keeps small angles (Poole et al. 2016, a first-order
    statement).  The same factor divides the part of the gradient that differs between tokens.
    """
    rows = {(row["setting"], row["depth"]): row for row in signals.rows}
    deepnorm = rows["DeepNorm", 24]
    alpha, beta = 48**0.25, 192**-0.25
    predicted = -math.log1p(beta**4 / alpha**2)
    assert deepnorm["angle_exponent_predicted"] == pytest.approx(predicted, rel=0.1)
    assert deepnorm["angle_exponent"] == pytest.approx(predicted, abs=0.003)
    assert abs(deepnorm["gradient_exponent"]) < 0.003
    post = rows["Post-LN", 24]
    assert post["angle_exponent_predicted"] == pytest.approx(-math.log(2), abs=0.02)
    assert post["angle_exponent"] == pytest.approx(-math.log(2), abs=0.1)
    # the part of the gradient that is equal in all n = 8 tokens is not divided: 1/n of it at first
    layers = signals.layers[signals.layers["depth"] == 8]
    measured = layers.groupby("layer")["jacobian"].mean().to_numpy()[::-1][:4]
    shares = [1 / 8 + 7 / 8 * 2.0**-k for k in range(4)]
    assert measured == pytest.approx(np.array(shares), rel=0.25)
    assert rows["Post-LN", 8]["gradient_exponent"] < -0.05


def test_the_variance_of_pre_ln_grows_linearly(signals: Signals) -> None:
    """(1 + l/2) <= E x² <= (1 + 3l/2), Xiong et al. 2020, Lemma 2; Post-LN's is 1."""
    layers = signals.layers[signals.layers["depth"] == 24]
    means = layers.groupby(["setting", "layer"])["variance"].mean()
    pre, at = means["Pre-LN"].to_numpy(), np.arange(1, 25)
    assert (pre > 1 + at / 2).all() and (pre < 1 + 1.5 * at).all()
    assert means["Post-LN"].to_numpy() == pytest.approx(np.ones(24), abs=1e-3)


def test_a_run_without_steps_is_a_measurement(signals: Signals, tmp_path: Path) -> None:
    run = signals.runs[0]
    assert run.state == "done" and not len(run.steps) and len(run.evals) == 1
    assert not list(run.path.glob("checkpoint/*/weights.safetensors"))
    assert typed("verify", run.path.parent).exit_code == 0
    axes = ("--x", "depth", "--y", "scheme", "--value", "stream_grad", "--layers", "growth")
    drawn = typed("plot", "map", run.path.parent, *axes, "--to", tmp_path, "--format", "csv")
    assert drawn.exit_code == 0, drawn.output
    cells = pd.read_csv(tmp_path / "map.csv").set_index(["y", "x"])["value"]
    row = next(r for r in signals.rows if r["setting"] == "Post-LN" and r["depth"] == 24)
    assert cells["Post-LN", 24] == pytest.approx(-row["gradient_exponent"])


def test_the_command_prints_rows_and_draws_the_chart(tmp_path: Path) -> None:
    words = ["signal", "quick", *TINY[1:], "model.scheme=post_ln,pre_ln", "runtime.threads=1"]
    result = typed(*words, "--out", tmp_path, "--depths", "3", "--seeds", 2, "--json")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    found = [(row["setting"], row["depth"], row["seeds"]) for row in rows]
    assert found == [("Post-LN", 3, 2), ("Pre-LN", 3, 2)]
    study = tmp_path / "quick_signal"
    drawn = pd.read_csv(study / "figures" / "signal_by_layer.csv")
    last = drawn[(drawn["panel"] == "N = 3: variance") & (drawn["series"] == "Pre-LN")]
    assert last["x"].tolist() == pytest.approx([1 / 3, 2 / 3, 1])
    runs = map(Run, study.glob("pre_ln-d3-*"))
    ends = [run.layers("stream_variance")[1][0, -1] for run in runs]
    assert last["y"].iloc[-1] == pytest.approx(np.exp(np.log(ends).mean()))
