"""The external probe on unusual training loops: its values equal plain PyTorch's.

Kinds: parameters that start training later, precision scalers, gradients that are sparse, complex
parameters.
"""

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from helpers.probe_models import D, WithHead, adamw, batch_of, encoder, loop
from torch import Tensor, nn

import deepstack
from deepstack.base.errors import ConfigError


def size(tensors: Any) -> float:
    """The 2-norm of all numbers of dense tensors, in double precision."""
    return math.sqrt(sum(float(t.detach().abs().double().square().sum()) for t in tensors))


def moved(model: nn.Module, start: nn.Module, batch: Tensor) -> float:
    """Mean over tokens of ‖F − F_0‖₂ of two models."""
    with torch.no_grad():
        change = copy.deepcopy(model).eval()(batch) - copy.deepcopy(start).eval()(batch)
    return float(change.abs().square().sum(-1).sqrt().mean())


# -- parameters that start training later ----------------------------------------------------------


def freeze_layer(model: nn.TransformerEncoder) -> Any:
    return model.layers[1]


def freeze_norm(model: nn.TransformerEncoder) -> Any:
    return model.layers[0].norm1


def freeze_all_but_the_last(model: nn.TransformerEncoder) -> Any:
    return model.layers[:2]


@pytest.mark.parametrize("part", [freeze_layer, freeze_norm, freeze_all_but_the_last])
def test_shares_of_parameters_unfrozen_later_are_their_own(
    part: Callable[[Any], Any], tmp_path: Path
) -> None:
    model = encoder(dropout=0.0)
    frozen = part(model).requires_grad_(False)
    start = copy.deepcopy(model)
    optimizer = adamw(model)
    groups = {"attention": "*.self_attn.*", "bias": ["*linear?.bias", "*norm?.bias"]}
    with deepstack.probe(
        model,
        batch_of(0),
        optimizer,
        out=tmp_path / "run",
        groups=groups,
        attribution_every=1,
        layers_every=1,
    ) as probe:
        for step in range(4):
            if step == 2:
                frozen.requires_grad_(True)
            loop(model, optimizer, 1, probe.step)
    rows = pd.read_csv(probe.run.path / "attribution.csv")
    now, F_0 = dict(model.named_parameters()), start.eval()(batch_of(0)).detach()
    for name, members in probe.run.meta["groups"].items():
        mixed = copy.deepcopy(start)
        mixed.load_state_dict({n: now[n].detach() for n in members}, strict=False)
        wanted = (mixed.eval()(batch_of(0)).detach() - F_0).norm(dim=-1).mean().item()
        assert rows[name].iloc[-1] == pytest.approx(wanted, rel=1e-4), name
    assert rows["whole"].iloc[-1] == pytest.approx(moved(model, start, batch_of(0)), rel=1e-5)
    norms = [size(layer.parameters()) for layer in model.layers]
    frozen_at = probe.run.layers("param_norm")[1]
    assert frozen_at[-1].tolist() == pytest.approx(norms, rel=1e-5)
    assert frozen_at[0].tolist() == pytest.approx(
        [size(layer.parameters()) for layer in start.layers], rel=1e-5
    )


def test_a_group_that_does_not_train_has_no_share(tmp_path: Path) -> None:
    model = WithHead()
    model.embedding.requires_grad_(False)
    tokens = torch.arange(6).view(2, 3)
    optimizer = adamw(model)
    with deepstack.probe(
        model, tokens, optimizer, out=tmp_path / "run", hidden="encoder", attribution_every=1
    ) as probe:
        model(tokens).square().mean().backward()
        optimizer.step()
        probe.step(1.0)
    row = pd.read_csv(probe.run.path / "attribution.csv").iloc[0]
    assert row["embedding"] == 0 and row["self_attn"] > 0


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.register_parameter("late", nn.Parameter(torch.ones(D))),
        lambda model: setattr(model, "norm", nn.LayerNorm(2 * D)),
        lambda model: setattr(model, "norm", None),
    ],
    ids=["new", "reshaped", "removed"],
)
def test_other_parameters_than_at_the_start_are_refused(
    change: Callable[[Any], Any], tmp_path: Path
) -> None:
    model = encoder(first=True)
    hidden = lambda m, b: m.layers[0](b)  # noqa: E731
    with (
        pytest.raises(ConfigError, match=r"model: \S+ is new, missing or of another shape"),
        deepstack.probe(
            model, batch_of(0), adamw(model), out=tmp_path / "run", hidden=hidden, layers_every=0
        ) as probe,
    ):
        model(batch_of(1)).sum().backward()
        change(model)
        probe.step(1.0)


# -- precision scalers -----------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscales", [False, True])
def test_a_step_that_a_gradient_scaler_leaves_out_is_a_row(
    fused: bool, unscales: bool, tmp_path: Path
) -> None:
    model = encoder(dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    # (scale * loss) overflows fp32 at first, and then its gradients
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=100)
    norms: list[float] = []
    with deepstack.probe(model, batch_of(0), optimizer, out=tmp_path / "run") as probe:
        for step in range(1, 10):
            optimizer.zero_grad()
            loss = 100 * (model(batch_of(step)) - 3).square().mean()
            plain = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
            scaler.scale(loss).backward()
            if unscales:
                scaler.unscale_(optimizer)
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            norms.append(math.inf if scaler.get_scale() < before else size(plain))
            probe.step(loss)
    run = probe.run
    assert run.state == "done" and len(run.steps) == 9
    skipped = [math.isinf(n) for n in norms]
    assert any(skipped) and not all(skipped)
    for row, wanted in zip(run.steps.to_dict("records"), norms, strict=True):
        if math.isinf(wanted):
            assert not math.isfinite(row["grad_norm"]) and row["model_update_step"] == 0
        else:
            assert row["grad_norm"] == pytest.approx(wanted, rel=1e-4)
            assert row["model_update_step"] > 0


@pytest.mark.parametrize("what", ["loss", "F"])
def test_a_loss_or_f_that_is_not_finite_is_a_divergence(what: str, tmp_path: Path) -> None:
    model = encoder()
    optimizer = adamw(model)
    with deepstack.probe(model, batch_of(0), optimizer, out=tmp_path / "run") as probe:
        for step in range(1, 4):
            model(batch_of(step)).sum().backward()
            if step == 2 and what == "F":
                next(model.parameters()).data.fill_(math.nan)
            probe.step(math.nan if step == 2 and what == "loss" else 1.0)
    assert probe.run.state == "diverged" and len(probe.run.steps) == 2
    assert probe.run.status["quantity"] == ("loss" if what == "loss" else "model_update")


# -- gradients that are sparse, and complex parameters ---------------------------------------------


class Tokens(nn.Module):
    """Token tables in front of an encoder; `bag` sums the rows of a sentence."""

    def __init__(self, bag: bool, depth: int = 1) -> None:
        super().__init__()
        self.table = (nn.EmbeddingBag if bag else nn.Embedding)(11, D, sparse=True)
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(depth))

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.table(tokens)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class InLayer(nn.Module):
    """A layer with a sparse table."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(11, D)
        self.layers = nn.ModuleList([Table(), Table()])

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.first(tokens)
        for layer in self.layers:
            x = layer(x, tokens)
        return x


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.map = nn.Embedding(11, D, sparse=True), nn.Linear(D, D)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        return x + self.map(x + self.table(tokens))


@pytest.mark.parametrize(
    "make", [lambda: Tokens(False), lambda: Tokens(True), InLayer], ids=["table", "bag", "layers"]
)
def test_norms_of_sparse_gradients_count_each_entry_once(
    make: Callable[[], Any], tmp_path: Path
) -> None:
    model = make()
    tokens = torch.tensor([[1, 1, 4], [4, 1, 9]])  # repeated, so that entries add up
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    with deepstack.probe(model, tokens, optimizer, out=tmp_path / "run", layers_every=1) as probe:
        for _ in range(3):
            optimizer.zero_grad()
            loss = (model(tokens) - 1).square().sum()
            loss.backward()
            dense = {n: p.grad.to_dense() for n, p in model.named_parameters()}
            optimizer.step()
            probe.step(loss)
            assert probe.run.steps["grad_norm"].iloc[-1] == pytest.approx(size(dense.values()))
    of_layers = [
        size(g for n, g in dense.items() if n.startswith(f"layers.{i}."))
        for i in range(len(model.layers))
    ]
    assert probe.run.layers("grad_norm")[1][-1].tolist() == pytest.approx(of_layers, rel=1e-5)
    assert probe.run.state == "done"


class Spectrum(nn.Module):
    """A layer with complex weights: in the stream, or on its Fourier transform."""

    def __init__(self, complex_stream: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.complex_stream = complex_stream
        n = D if complex_stream else D // 2 + 1
        self.weight = nn.Parameter(torch.randn(n, dtype=dtype) + 1j)
        self.scale = nn.Parameter(torch.tensor(0.5 + 0.5j, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        if self.complex_stream:
            return x + self.scale * x * self.weight
        return x + torch.fft.irfft(self.scale * self.weight * torch.fft.rfft(x), n=x.shape[-1])


@pytest.mark.parametrize("complex_stream", [False, True])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_norms_of_complex_numbers_use_their_moduli(
    complex_stream: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Spectrum(complex_stream, dtype) for _ in range(3)))
    start, batch = copy.deepcopy(model), batch_of(0)
    batch = batch.to(dtype) if complex_stream else batch
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with deepstack.probe(
        model, batch, optimizer, out=tmp_path / "run", layers=list(model), layers_every=1
    ) as probe:
        for _ in range(2):
            optimizer.zero_grad()
            before = copy.deepcopy(model)
            loss = model(batch).abs().square().mean()
            loss.backward()
            optimizer.step()
            probe.step(loss)
    last, run = probe.run.steps.iloc[-1], probe.run
    assert last["grad_norm"] == pytest.approx(size(p.grad for p in model.parameters()), rel=1e-5)
    assert last["model_update"] == pytest.approx(moved(model, start, batch), rel=1e-4)
    wanted: dict[str, list[float]] = {"param_norm": [], "param_update_norm": [], "stream_norm": []}
    x = batch
    for layer, old in zip(model, before, strict=True):
        x = layer(x).detach()
        pairs = zip(layer.parameters(), old.parameters(), strict=True)
        wanted["param_norm"].append(size(layer.parameters()))
        wanted["param_update_norm"].append(size(p - q for p, q in pairs))
        wanted["stream_norm"].append(float(x.abs().square().sum(-1).sqrt().mean()))
    for name, values in wanted.items():
        assert run.layers(name)[1][-1].tolist() == pytest.approx(values, rel=1e-3), name
    assert run.get("model.d_model") == D
