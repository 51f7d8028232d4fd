"""Every diagnostic against values taken from the model's entry forward and backward pass.

Hooks and a torch function mode record one `model(tokens)`: arguments and results of sublayers,
norms and layers, the q and k of every softmax, and the matrix of every product.
"""

import math
from itertools import combinations
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.extensions import has, needs
from helpers.products import Products
from helpers.sampling import some
from helpers.snapshots import ToyModel
from scipy.stats import kurtosis
from torch import Tensor
from torch.autograd.functional import jacobian

from deepstack.base.errors import ConfigError
from deepstack.diagnostics import DIAGNOSTICS, evaluate, take
from deepstack.diagnostics.jacobian import DRAWS, jacobian_norms
from deepstack.diagnostics.snapshot import stream_states
from deepstack.diagnostics.stream import kurtosis as stream_kurtosis
from deepstack.diagnostics.streams import stream_mixing
from deepstack.diagnostics.sublayer_statistics import norm_slope
from deepstack.schemes import SCHEMES, LayerNorm, Scheme

QK_NORM = {"model__qk_norm": True, "model__gated": True, "model__activation": "silu"}
ROTARY = QK_NORM | {"model__positions": "rotary"}
BOTH = {"model__family": "encoder_decoder"}
FAMILIES: dict[str, dict[str, Any]] = {
    "encoder": ROTARY,
    "decoder": ROTARY | {"model__family": "decoder"},
    "encoder_decoder": ROTARY | BOTH,
    "merged": QK_NORM | BOTH | {"model__decoder_attention": "merged"},
}
OTHERS = {
    "ntk": QK_NORM | {"model__init": {"distribution": "ntk"}},
    "rms": QK_NORM | {"model__norm__kind": "rms"},
}
# every entry of every parameter moves by this much, since θ_0 and in the last step
SINCE_START, LAST_STEP = 0.02, 0.01
WIRINGS = ("post_ln", "deepnorm", "pre_ln")
UNDEFINED = ("deepnorm", "merged")  # its coefficients count three sublayers


def record_pass(toy: ToyModel) -> list[dict[str, Any]]:
    """One pass forward and backward; a record of every layer, with records of its sublayers.

    The tensors keep their gradient.  x, y: input and output of a layer; input, G: of a sublayer's
    branch.  sum: the input of a sublayer's norm; z: a view of it that only the norm reads; normed:
    the norm's output.
    """
    layers, handles, products = [], [], Products()
    for layer in toy.model.layers:
        scaled = toy.config.model.init.distribution == "ntk"
        entry: dict[str, Any] = {"layer": layer, "sublayers": [], "scaled": scaled}
        layers.append(entry)
        handles.append(layer.register_forward_hook(keep(entry, "x", "y")))
        for name in layer.names:
            norm, branch = getattr(layer.scheme, f"{name}_norms")[0], getattr(layer, name)
            record: dict[str, Any] = {"name": name, "norm": norm, "scaled": scaled}
            entry["sublayers"].append(record)
            handles.append(branch.register_forward_hook(keep(record, "input", "G", products)))
            handles.append(norm.register_forward_pre_hook(give_a_view(record)))
            handles.append(norm.register_forward_hook(keep(record, "z", "normed")))
    with products:
        loss = toy.loss(toy.model(toy.tokens))
    loss.backward()
    for handle in handles:
        handle.remove()
    entropies, largest = iter(products.entropies), iter(products.largest)
    for entry in layers:
        for record in entry["sublayers"]:
            if record["name"] != "feed_forward":
                record["entropy"], record["largest_logit"] = next(entropies), next(largest)
    return layers


def keep(record: dict[str, Any], given: str, result: str, products: Products | None = None) -> Any:
    """A forward hook that records the first argument, the result and the matrices in between."""

    def hook(module: Any, args: Any, out: Any) -> None:
        args[0].retain_grad()
        out.retain_grad()
        record.update({given: args[0], result: out})
        if products:
            record["matrices"], products.matrices = products.matrices, []

    return hook


def give_a_view(record: dict[str, Any]) -> Any:
    def hook(module: Any, args: Any) -> tuple[Tensor]:
        args[0].retain_grad()
        record["sum"] = args[0]
        return (args[0].view_as(args[0]),)

    return hook


def matrices_of(record: dict[str, Any]) -> dict[str, Tensor]:
    """Role -> matrix, from the products of a sublayer in the order of its forward pass."""
    *inner, outer = record["matrices"]
    if record["name"] == "feed_forward":
        return dict(zip(("w1", "w3", "w2"), (*inner[0].chunk(2), outer), strict=True))
    if record["name"] == "cross_attention":
        rows = (inner[1], *inner[0].chunk(2), outer)
        return dict(zip(("cross_q", "cross_k", "cross_v", "cross_o"), rows, strict=True))
    rows = inner[0].chunk(3) if len(inner) == 1 else (inner[3], inner[0], inner[1])
    return dict(zip("qkvo", (*rows, outer), strict=True))


def applied(record: dict[str, Any], W: Tensor) -> Tensor:
    """The matrix by which a sublayer multiplies: over √n_in under the NTK parameterisation."""
    return W / math.sqrt(W.shape[1]) if record["scaled"] else W


def of_sublayer(record: dict[str, Any], x: Tensor, total: Tensor, post: bool) -> dict[str, float]:
    """Diagnostics of one sublayer.  x: the stream that enters; total: the residual sum."""
    z, G = record["z"].detach().double(), record["G"].detach().double()
    record["alpha"] = math.nan
    if post:
        columns = torch.stack([x.detach().double().flatten(), G.flatten()], dim=1)
        record["alpha"], one = torch.linalg.lstsq(columns, z.flatten()).solution.tolist()
        assert one == pytest.approx(1.0, rel=1e-4)
    tokens = z.float().flatten(0, 1)  # of the sum over tokens each has its entry Jacobian
    jacobians = jacobian(lambda t: record["norm"](t).sum(0), tokens).transpose(0, 1)
    result = {
        "branch_ratio": (norms(G) / norms(x)).mean().item(),
        "ln_input": norms(z).mean().item(),
        "ln_input_variance": z.var(dim=-1, correction=0).mean().item(),
        "ln_jacobian": torch.linalg.matrix_norm(jacobians.double(), ord=2).mean().item(),
        "beta_ln": size(record["z"].grad) / size(record["normed"].grad),
        "beta_rc": size(x.grad) / size(total.grad),
        "beta_ln_predicted":
            (record["alpha"] ** 2 + G.var(dim=-1, correction=0).mean().item()) ** -0.5,
    }  # fmt: skip
    if "entropy" in record:
        result["attention_entropy"] = record["entropy"]
        result["largest_logit"] = record["largest_logit"]
    return result


def of_theorem(record: dict[str, Any], merged: bool) -> dict[str, float]:
    """Terms of Theorem 4.2, NaN for the decoder of merged attention."""
    matrices = list(matrices_of(record).values())
    attends = record["name"] != "feed_forward"
    inner, outer = matrices[2 if attends else 0], matrices[-1]
    w2, v2 = (W.shape[1] * W.var(correction=0).item() for W in (inner, outer))
    w2 *= 1.0 if attends else 0.5
    alpha = math.nan if merged else record["alpha"]
    moved = SINCE_START * math.sqrt(inner.numel() + outer.numel())
    powers = [W.shape[1] * applied(record, W).square().mean().item() for W in (inner, outer)]
    record["vw"] = powers[0] * powers[1] * (1.0 if attends else 0.5)
    return {
        "bound": math.sqrt(v2 + w2) / alpha * moved,
        "effective_gain": math.sqrt(v2 * w2) / alpha,
    }


def of_layer(entry: dict[str, Any]) -> dict[str, float]:
    """Diagnostics of one layer as a whole."""
    layer, x, y = entry["layer"], *(entry[key].detach().double() for key in "xy")
    parameters = list(layer.parameters())
    trained = [p for p in parameters if p.grad is not None]
    count = math.sqrt(sum(p.numel() for p in parameters))
    flat = y.flatten(0, 1)
    sigma = torch.linalg.svdvals(flat - flat.mean(dim=0))
    p = sigma[sigma > 1e-12] / sigma.sum()
    cosine = F.cosine_similarity(x, y, dim=-1)
    pairs = combinations(y.unbind(dim=1), 2)
    cosines = [F.cosine_similarity(*pair, dim=-1).mean().item() for pair in pairs]
    rest = y - y.mean(dim=1, keepdim=True)
    result = {
        "grad_norm": math.hypot(*(size(p.grad) for p in trained)),
        "matrix_grad_norm": math.hypot(*(size(p.grad) for p in trained if p.ndim == 2)),
        "param_norm": math.hypot(*(size(p) for p in parameters)),
        "param_update_norm": LAST_STEP * count,
        "stream_norm": norms(y).mean().item(),
        "stream_variance": y.var(dim=-1, correction=0).mean().item(),
        "kurtosis": fmean(kurtosis(token.numpy(), fisher=False) for token in flat),
        "token_distance": 1 - fmean(cosines),
        "stream_grad": size(entry["y"].grad),
        "stream_update": 0.25 * norms(y).mean().item(),
        "angular_distance": (cosine.acos() / math.pi).mean().item(),
        "effective_rank": math.exp(-(p * p.log()).sum().item()),
        "rank_collapse": (composite(rest) / composite(y)).mean().item(),
    }
    result["update_to_weight"] = result["param_update_norm"] / result["param_norm"]
    matrices = {r: W for record in entry["sublayers"] for r, W in matrices_of(record).items()}
    applied_ = {r: applied(entry, W) for r, W in matrices.items()}
    lengths = {r: torch.linalg.matrix_norm(W, ord=2).item() for r, W in applied_.items()}
    result["spectral_log_product"] = sum(map(math.log, lengths.values()))
    for role, W in applied_.items():
        sigma = torch.linalg.svdvals(W)
        result[f"stable_rank_{role}"] = (sigma.square().sum() / sigma[0] ** 2).item()
    return result | {f"spectral_norm_{role}": length for role, length in lengths.items()}


def size(x: Tensor) -> float:
    return x.detach().double().norm().item()


def norms(x: Tensor) -> Tensor:
    return x.detach().double().norm(dim=-1)


def composite(X: Tensor) -> Tensor:
    one, most = (torch.linalg.matrix_norm(X, ord=order) for order in (1, math.inf))
    return (one * most).sqrt()


def jacobian_rows(toy: ToyModel, rounds: int = DRAWS // 3) -> list[tuple[float, float]]:
    """Mean and standard error of ‖Rᵀ ∂F/∂x_l‖² of every layer over R of length 1, by sequence.

    Each of the 3 sequences has `rounds` of them.
    """
    outputs: list[Tensor] = []
    hooks = [
        layer.register_forward_hook(lambda module, args, out: outputs.append(out))
        for layer in toy.model.layers
    ]
    F = toy.model.hidden(toy.tokens)
    for hook in hooks:
        hook.remove()
    R = torch.randn(rounds, 3, F[0].numel(), generator=torch.Generator().manual_seed(7))
    R = (R / R.norm(dim=-1, keepdim=True)).reshape(rounds, *F.shape)
    values = torch.stack(
        [
            torch.stack([g.flatten(1).double().square().sum(dim=1) for g in gradients])
            for r in R
            for gradients in [torch.autograd.grad(F, outputs, r, retain_graph=True)]
        ],
        dim=1,
    )  # (layers, rounds, sequences)
    errors = (values.var(dim=1) / rounds).sum(dim=1).sqrt() / 3
    return list(zip(values.mean(dim=(1, 2)).tolist(), errors.tolist(), strict=True))


def expected_values(toy: ToyModel, post: bool) -> list[dict[str, float]]:
    """Layer by layer, file name of a diagnostic -> its value."""
    jacobians, layers = jacobian_rows(toy), record_pass(toy)
    rows: list[dict[str, float]] = []
    for entry, (share, error) in zip(layers, jacobians, strict=True):
        row = of_layer(entry)
        row |= {"jacobian": share, "jacobian_error": error}
        row |= {"gradient_variance": 3.0, "noise_scale": 1.5} if has("noise_scale") else {}
        merged = len(entry["sublayers"]) == 2 and entry["layer"].readers[0]
        sums = [record["sum"] for record in entry["sublayers"]]
        for record, following in zip(entry["sublayers"], [*sums[1:], entry["y"]], strict=True):
            about = (record["input"], record["sum"]) if post else (record["sum"], following)
            result = of_sublayer(record, *about, post) | of_theorem(record, merged)
            row |= {f"{name}_{record['name']}": value for name, value in result.items()}
        rows.append(row)
    for (first, row), second in zip(
        zip(layers, rows, strict=True), [*layers[1:], None], strict=True
    ):
        row["contribution_cosine"] = math.nan
        if second and second["layer"].scheme.place.side == first["layer"].scheme.place.side:
            added = [(one["y"] - one["x"]).detach().double() for one in (first, second)]
            product = (added[0] * added[1]).sum(dim=-1) / (norms(added[0]) * norms(added[1]))
            row["contribution_cosine"] = product.mean().item()
    ratio, side = 1.0, ""
    for entry, row in reversed(list(zip(layers, rows, strict=True))):
        if entry["layer"].scheme.place.side != side:
            side, ratio, last = entry["layer"].scheme.place.side, 1.0, row["matrix_grad_norm"]
        alone = len(entry["sublayers"]) == 2
        row["grad_norm_predicted"] = ratio * last if alone else math.nan
        for record in entry["sublayers"]:
            a2 = record["alpha"] ** 2
            ratio *= math.sqrt(max((a2 - record["vw"]) / (a2 + record["vw"]), 0.0))  # NaN stays NaN
    return rows


@needs("bound")
@pytest.mark.parametrize(
    ("scheme", "family"),
    [
        *((s, f) for f in FAMILIES for s in WIRINGS if (s, f) != UNDEFINED),
        *(("deepnorm", other) for other in OTHERS),
        ("admin", "encoder"),
        ("deepnorm_tight", "encoder"),
    ],
)
def test_every_diagnostic_equals_a_literal_forward_pass(scheme: str, family: str) -> None:
    toy = ToyModel(model__scheme=scheme, **(FAMILIES | OTHERS)[family])
    with torch.no_grad():  # with equal gains the norm of a norm's Jacobian is known exactly
        for layer, entry in enumerate(toy.model.schemes):
            for name in entry.sublayers:
                getattr(entry, f"{name}_norms")[0].gain.fill_(1.3)
            if scheme == "admin":  # of the theorem's form while each vector is one number
                for number, omega in enumerate(entry.each("omega")):
                    omega.fill_(1.5 + number + layer)
    values = [bank.values().clone() for bank in toy.banks]
    stream = stream_states(toy.model, toy.tokens)
    logged = evaluate(
        take(
            toy.model, toy.banks, toy.tokens, toy.loss,
            before=[v - LAST_STEP for v in values], initial=[v - SINCE_START for v in values],
            added={
                "mixing": stream_mixing(toy.model, toy.tokens),
                "jacobian": jacobian_norms(toy.model, toy.tokens, 7),
                "initial_states": {side: 0.75 * states for side, states in stream.items()},
                "gradient_noise": {
                    side: torch.tensor([[3.0], [2.0]]).expand(2, len(states) - 1)
                    for side, states in stream.items()
                },
            },
        )
    )  # fmt: skip
    # test_signals.py has the losses without a layer, test_streams.py several streams.
    missing = {name for name, one in DIAGNOSTICS.items() if not set(one.files) & set(logged)}
    of_streams = {"mixing_distance", "stream_share", "composite_gain"}
    assert missing == {"skip_loss", "skip_loss_increase"} | of_streams
    rows = expected_values(toy, post=scheme != "pre_ln")
    assert set().union(*rows) == set(logged)
    for name, measured in logged.items():
        wanted = [row.get(name, math.nan) for row in rows]
        assert measured.tolist() == pytest.approx(wanted, rel=1e-3, abs=1e-6, nan_ok=True), name


@pytest.mark.parametrize("scheme", some(SCHEMES.names(), 3, 1))
def test_attention_statistics_follow_the_logits_in_every_scheme(scheme: str) -> None:
    """Diagnostics of other kinds are finite, but for two streams that a sublayer joins at once."""
    kind = SCHEMES[scheme]
    for family, changes in FAMILIES.items():
        name = changes.get("model__family", "encoder")
        if name not in kind.families or (family == "merged" and not kind.merges):
            continue
        try:
            toy = ToyModel(model__scheme=scheme, **changes)
        except ConfigError as error:  # the scheme norms q and k itself
            assert "qk_norm" in str(error)
            toy = ToyModel(model__scheme=scheme, **changes | {"model__qk_norm": False})
        state, logged = torch.get_rng_state(), toy.values()
        assert torch.equal(torch.get_rng_state(), state)
        for file in ("grad_norm", "param_norm", "stream_norm", "effective_rank"):
            assert logged[file].isfinite().all(), file
        for file in ("branch_ratio_attention", "branch_ratio_feed_forward"):
            assert (logged[file].isnan() == (kind.residual is Scheme.residual)).all(), file
        with Products() as products, torch.no_grad():
            toy.model(toy.tokens)
        names = [(i, n) for i, layer in enumerate(toy.model.layers) for n in layer.names]
        attentions = [(i, n) for i, n in names if n != "feed_forward"]
        for (index, name), *wanted in zip(
            attentions, products.entropies, products.largest, strict=True
        ):
            files = (f"attention_entropy_{name}", f"largest_logit_{name}")
            values = [logged[file][index].item() for file in files]
            assert values == pytest.approx(wanted, rel=1e-4), (family, index, name)


def test_the_kurtosis_of_equal_coordinates_is_0() -> None:
    snapshot: Any = SimpleNamespace(states=torch.ones(3, 2, 1, 4))
    snapshot.states[2, 0, 0] = torch.tensor([1.0, -1.0, 1.0, -1.0])  # kurtosis 1, beside one of 0
    assert stream_kurtosis(snapshot).tolist() == [0.0, 0.5]


def test_the_slope_of_a_norm_includes_its_epsilon() -> None:
    norm = LayerNorm(4, eps=1e-5, gain=True, bias=False)
    norm.gain = torch.nn.Parameter(torch.ones(4))
    z = 1e-3 * torch.tensor([1.0, -1.0, 1.0, -1.0])
    slope = norm_slope(z[None, None], [norm]).item()
    assert slope == pytest.approx((1e-6 + 1e-5) ** -0.5, rel=1e-4)
