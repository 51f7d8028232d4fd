"""Initial signals, the loss without a layer, and single diagnostics."""

import json
import math
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from helpers.command_line import TINY, succeed
from helpers.sampling import some
from helpers.snapshots import ToyModel
from torch import Tensor
from torch.autograd.functional import jacobian
from torch.utils._pytree import tree_leaves, tree_map_only

import deepstack
from deepstack.config import Config, with_overrides
from deepstack.diagnostics import DIAGNOSTICS
from deepstack.diagnostics import stream as stream_module
from deepstack.diagnostics.jacobian import jacobian_norms
from deepstack.diagnostics.skipped_layers import divide_evenly
from deepstack.diagnostics.spectral import spectral_norms
from deepstack.records import Run
from deepstack.runs.quantities import growth
from deepstack.schemes import SCHEMES
from deepstack.tools.signal.signal import START, Signals

# --- initial signals -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scheme", "options"),
    [
        *some([(name, {}) for name in SCHEMES.names()], 6, 1),
        ("attn_res", {"blocks": 1}),  # x is a function of the tensor beside it
        ("dense_former", {"period": 2}),  # x is also an item of the outputs beside it
    ],
)
def test_gradients_by_the_stream_are_exact(scheme: str, options: dict[str, int]) -> None:
    """By leaves in the place of a layer's output, where the computation is cut."""
    for family in SCHEMES[scheme].families:
        toy = ToyModel(model__scheme=scheme, model__scheme_options=options, model__family=family)
        measured = toy.values()["stream_grad"].tolist()
        for value, layer in zip(measured, toy.model.layers, strict=True):
            leaves: dict[Tensor, Tensor] = {}

            def cut(module: Any, args: Any, out: Any, leaves: dict[Tensor, Tensor] = leaves) -> Any:
                stream = out if isinstance(out, tuple) else (out,)
                past = tree_leaves(args)
                for y in stream:
                    is_alike = isinstance(y, Tensor) and y.shape[-3:] == stream[0].shape
                    if is_alike and not any(y is one for one in past):
                        leaves[y] = y.detach().requires_grad_()
                return tree_map_only(Tensor, lambda y: leaves.get(y, y), out)

            hook = layer.register_forward_hook(cut)
            loss = toy.loss(toy.model(toy.tokens))
            hook.remove()
            gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
            norm = math.hypot(*(g.norm().item() for g in gradients if g is not None))
            assert value == pytest.approx(norm, rel=1e-5, abs=1e-9), family


def test_growth_is_the_slope_of_the_logarithm() -> None:
    layers = np.arange(1.0, 8.0)
    collapsed = np.array([8.0, 4, 2, 0, 0, 0, 1])  # the layers before the first 0 count
    values = np.stack([3 * np.exp(-0.2 * layers), layers, collapsed, 0 * layers, layers - 3])
    slope = np.polyfit(layers, np.log(layers), 1)[0]
    assert growth(values)[:3] == pytest.approx([-0.2, slope, -math.log(2)])
    assert np.isnan(growth(values)[3:]).all() and np.isnan(growth(values[:, :1])).all()


@pytest.fixture(scope="module")
def signals(tmp_path_factory: pytest.TempPathFactory) -> Signals:
    """Runs made in this process, as `deepstack.signal` makes them in others."""
    shape = {
        "model.d_model": 64, "model.d_ff": 64, "task.name": "markov", "task.seq_len": 8,
        "log.probe_sequences": 8, "runtime.threads": 1,
    }  # fmt: skip
    out, base = tmp_path_factory.mktemp("signals"), with_overrides(Config(), shape | START)
    cells = [
        *product(["post_ln"], [8], range(8)), *product(["post_ln", "deepnorm"], [24], range(2)),
        *product(["pre_ln"], [24], range(3)),
    ]  # fmt: skip
    keys = ("model.scheme", "model.depth", "seed")
    configs = [with_overrides(base, dict(zip(keys, cell, strict=True))) for cell in cells]
    return Signals([deepstack.train(config, out=out) for config in configs])


@pytest.mark.slow
def test_exponents_agree_with_mean_field_theory(signals: Signals) -> None:
    """Once tokens are nearly equal, uniform attention of power a adds the same to all of them.

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


def whole_jacobians(toy: ToyModel) -> Tensor:
    """‖∂F/∂x_l‖_F²/dim F of every layer by a backward pass from each value of F."""
    outputs: list[Tensor] = []
    hooks = [
        layer.register_forward_hook(lambda module, args, out: outputs.append(out))
        for layer in toy.model.layers
    ]
    with toy.model.unfused():
        F = toy.model.hidden(toy.tokens).flatten()
    for hook in hooks:
        hook.remove()
    rows = [torch.autograd.grad(value, outputs, retain_graph=True) for value in F]
    squares = torch.tensor([[g.double().square().sum().item() for g in row] for row in rows])
    return squares.mean(dim=0)


@pytest.mark.parametrize("family", ["encoder", "encoder_decoder"])
def test_the_jacobian_of_few_values_is_exact(family: str) -> None:
    toy = ToyModel(
        model__scheme="post_ln", model__family=family, model__d_model=4, model__n_heads=1,
        task__seq_len=2, log__probe_sequences=3,
    )  # fmt: skip
    measured = jacobian_norms(toy.model.eval(), toy.tokens, seed=0)
    value, error = (torch.cat([both[i][1:] for both in measured.values()]) for i in (0, 1))
    assert value.tolist() == pytest.approx(whole_jacobians(toy).tolist(), rel=1e-5)
    assert error.count_nonzero() == 0 and value[-1] == pytest.approx(1)  # of Post-LN F = x_N


def test_random_jacobians_agree_with_whole_ones_within_their_error() -> None:
    """Tokens of 16 layers of Post-LN are nearly equal, so that few directions carry the norm."""
    toy = ToyModel(model__scheme="post_ln", model__depth=16)
    exact, seeds = whole_jacobians(toy)[:-1], range(12)
    draws = [jacobian_norms(toy.model.eval(), toy.tokens, seed)["encoder"] for seed in seeds]
    values, errors = (torch.stack([one[i][1:-1] for one in draws]).double() for i in (0, 1))
    z = (values - exact) / errors
    assert 0.6 < z.square().mean().sqrt() < 1.8 and abs(z.mean()) < 0.8
    assert ((values.mean(dim=0) - exact).abs() < 0.15 * exact).all()
    # 32 draws leave at most √(2/32) of the value, where one direction carries all
    assert (errors < 0.4 * values).all() and (values.std(dim=0) < 0.3 * exact).all()
    assert len({round(float(value), 9) for value in values[:, 0]}) == len(seeds)


@pytest.mark.slow(turn=31)
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
    succeed("verify", run.path.parent)
    axes = ("--x", "depth", "--y", "scheme", "--value", "stream_grad", "--layers", "growth")
    succeed("plot", "map", run.path.parent, *axes, "--to", tmp_path, "--format", "csv")
    (file,) = tmp_path.glob("*.csv")
    assert file.name == "map_stream_grad_over_depth_and_scheme_layers_growth.csv"
    cells = pd.read_csv(file).set_index(["y", "x"])["value"]
    row = next(r for r in signals.rows if r["setting"] == "Post-LN" and r["depth"] == 24)
    assert cells["Post-LN", 24] == pytest.approx(-row["gradient_exponent"])


@pytest.mark.slow
def test_the_command_prints_rows_and_draws_the_chart(tmp_path: Path) -> None:
    words = ["signal", "quick", *TINY[1:], "model.scheme=post_ln,pre_ln", "runtime.threads=1"]
    printed = succeed(*words, "--out", tmp_path, "--depths", "3", "--seeds", "0,1", "--json")
    rows = json.loads(printed)["rows"]
    found = [(row["setting"], row["depth"], row["seeds"]) for row in rows]
    assert found == [("Post-LN", 3, 2), ("Pre-LN", 3, 2)]
    study = tmp_path / "quick_signal"
    drawn = pd.read_csv(study / "figures" / "signal_by_layer.csv")
    last = drawn[(drawn["panel"] == "N = 3: variance") & (drawn["series"] == "Pre-LN")]
    assert last["x"].tolist() == pytest.approx([1 / 3, 2 / 3, 1])
    runs = map(Run, study.glob("pre_ln-d3-*"))
    ends = [run.layers("stream_variance")[1][0, -1] for run in runs]
    assert last["y"].iloc[-1] == pytest.approx(np.exp(np.log(ends).mean()))


# -- the loss without a layer ---------------------------------------------------------------------


def passed_by(layer: Any) -> dict[Any, Callable[..., Any]]:
    """Forward functions of modules with which a layer passes on the stream that it reads."""
    if layer.scheme.name in ("dlcl", "dense_former", "mudd"):  # later layers read its output too
        return dict.fromkeys((layer.attention, layer.feed_forward), lambda x, **_: x * 0)
    if layer.scheme.name != "attn_res":
        return {layer: lambda x, memory=None: x}

    def weigh(stream: Any, memory: Any = None) -> Any:  # of the layers below alone
        _, part, done = stream
        assert part is None
        values = torch.stack(done)
        keys = values / (values.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        weights = (keys @ layer.scheme.feed_forward_query).softmax(0)
        return (weights[..., None] * values).sum(0), None, done

    return {layer: weigh}


@pytest.mark.parametrize(
    ("scheme", "family"),
    [
        ("deepnorm", "encoder"),
        ("pre_ln", "encoder_decoder"),
        ("residual", "decoder"),
        ("real_former", "encoder"),
        ("dlcl", "encoder"),
        ("hyper_connections", "encoder"),
        ("mhc", "encoder"),
        ("dense_former", "decoder"),
        ("mudd", "decoder"),
        ("attn_res", "decoder"),
    ],
)
def test_the_loss_without_a_layer(scheme: str, family: str) -> None:
    toy = ToyModel(model__scheme=scheme, model__family=family, skipped=16)
    found = toy.values()
    with torch.no_grad():
        whole = toy.loss(toy.model(toy.tokens)).item()
        for index, layer in enumerate(toy.model.layers):
            changed = passed_by(layer)
            for module, forward in changed.items():
                module.forward = forward
            wanted = toy.loss(toy.model(toy.tokens)).item()
            for module in changed:
                del module.forward
            assert found["skip_loss"][index].item() == pytest.approx(wanted, rel=1e-5)
            increase = found["skip_loss_increase"][index].item()
            assert increase == pytest.approx(wanted - whole, abs=1e-5)
            assert abs(increase) > 1e-4  # a layer that does something
    assert toy.loss(toy.model(toy.tokens)).item() == whole


def test_layers_are_spread_over_the_depth() -> None:
    for total, count in product((1, 2, 6, 17, 100, 1000), range(1, 17)):
        chosen = divide_evenly(total, count)
        assert len(set(chosen)) == min(count, total) and chosen[-1] == total - 1
        gaps = np.diff(chosen)
        if 1 < count < total:
            assert chosen[0] == 0 and 0 < gaps.min() and gaps.max() - gaps.min() <= 1


# --- single diagnostics ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["layer", "rms", "batch", "dynamic_tanh"])
def test_ln_jacobian_of_unequal_gains_is_an_upper_bound(kind: str) -> None:
    toy = ToyModel(model__norm={"kind": kind})
    with torch.no_grad():
        for scheme in toy.model.schemes:
            for (norm,) in scheme.norm_functions:
                norm.gain.uniform_(0.5, 1.5)
    values = toy.values()
    layer, x = toy.model.layers[0], toy.model.embed(toy.tokens)
    for name in layer.names:
        (norm,) = getattr(layer.scheme, f"{name}_norms")
        z = layer.scheme.coefficient * x + getattr(layer, name)(x)
        x, value = norm(z), values[f"ln_jacobian_{name}"][0].item()
        if kind in ("batch", "dynamic_tanh"):
            assert math.isnan(value)
            continue
        jacobians = [jacobian(norm, token).double() for token in z.detach().flatten(0, 1)]
        mean = torch.linalg.matrix_norm(torch.stack(jacobians), ord=2).mean().item()
        gains = norm.gain.detach().abs().sort().values
        assert value * (gains[-3] / gains[-1]).item() < mean < value * (1 + 1e-6)


def test_the_list_of_diagnostics_keeps_the_former_key_in_json_alone() -> None:
    rows = json.loads(succeed("list", "diagnostics", "--json"))
    assert all(row["beat"] == row["interval"] for row in rows)
    header = succeed("list", "diagnostics", "--markdown").splitlines()[0]
    assert "interval" in header and "beat" not in header


def test_the_stream_of_known_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    (snapshot,) = ToyModel(model__depth=7, task__seq_len=16).snapshots()
    snapshot.states = torch.ones(8, 3, 16, 16)  # tokens alike
    for name in ("effective_rank", "rank_collapse"):
        assert DIAGNOSTICS[name](snapshot).tolist() == [0.0] * 7
    # a turn by t radians at every layer, down to where cos t is 1 in fp32
    for t in (1.0, 1e-2, 1e-5):
        angles = torch.arange(8.0, dtype=torch.float64) * t
        plane = torch.stack([angles.cos(), angles.sin()], dim=-1)[:, None, None, :]
        snapshot.states = plane.expand(8, 3, 16, 2)
        turns = DIAGNOSTICS["angular_distance"](snapshot).tolist()
        assert turns == pytest.approx([t / math.pi] * 7, rel=1e-6)
    # in small parts: the same numbers; values that are not finite stay with their layer
    bad_layers = {"angular_distance": [3, 4], "effective_rank": [3], "rank_collapse": [3]}
    for name, layers in bad_layers.items():
        snapshot.states = torch.randn(8, 3, 16, 16)
        whole = DIAGNOSTICS[name](snapshot)
        with monkeypatch.context() as patch:
            patch.setattr(stream_module, "AT_ONCE", 3 * 3 * 16 * 16)
            assert torch.equal(DIAGNOSTICS[name](snapshot), whole)
            snapshot.states[4, 0, 0, 0] = math.inf
            assert DIAGNOSTICS[name](snapshot).isnan().nonzero().flatten().tolist() == layers


def test_power_iteration_is_as_exact_as_it_says() -> None:
    random = torch.Generator().manual_seed(1)
    for shape in ((1000, 32, 32), (1000, 16, 64), (2, 520, 520)):
        W = torch.randn(*shape, generator=random)
        exact = torch.linalg.matrix_norm(W.double(), ord=2)
        for matrices in (W, W.transpose(1, 2), 1e-6 * W):
            short = 1 - spectral_norms(matrices) / exact / (matrices.norm() / W.norm())
            assert short.min() > -1e-5 and short.mean() < 1e-5 and short.max() < 5e-4
    assert spectral_norms(torch.zeros(2, 4, 4)).tolist() == [0.0, 0.0]
    assert spectral_norms(torch.full((1, 4, 4), torch.nan)).isnan().all()
    assert torch.equal(spectral_norms(W), spectral_norms(W))


@pytest.mark.parametrize(
    ("values", "rate"), [([1, math.e], 1), ([1, math.e, 0], 1), ([1, math.e**3, 0, 0], 3)]
)
def test_two_layers_have_a_growth(values: list[float], rate: float) -> None:
    assert growth(np.array([values], dtype=float)) == pytest.approx([rate])
