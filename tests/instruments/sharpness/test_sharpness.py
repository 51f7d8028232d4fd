"""The largest eigenvalue of the Hessian, against dense Hessians, and the thresholds beside it."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.papers import PAPERS
from helpers.sampling import some
from helpers.small_runs import interrupted, logs_of, small
from helpers.snapshots import ToyModel
from torch import Tensor
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

import deepstack
from deepstack.config import Train
from deepstack.instruments.sharpness import measure as sharpness_module
from deepstack.instruments.sharpness.measure import (
    Hessian,
    largest_eigenvalue,
    sharpness,
    tied_parameters,
    twice_differentiable,
)
from deepstack.instruments.sharpness.optimizer import preconditioner_scales, stability_threshold
from deepstack.model.loop import Loop
from deepstack.schemes import SCHEMES
from deepstack.training.optimizer import make_optimizer

TINY = {"model__d_model": 4, "model__depth": 2, "model__n_heads": 2, "model__d_ff": 6}
ADAM = Train(optimizer="adamw", lr=1e-2, betas=(0.9, 0.98), eps=1e-6, lr_factors={"w1": 0.25})
CASES: list[dict[str, Any]] = [
    {"model__scheme": "post_ln"},
    {"model__family": "encoder_decoder", "model__positions": "rotary", "runtime__banks": False},
    {"model__depth": 4, "model__unique_layers": 2},
    {
        "model__depth": 4,
        "model__unique_layers": 1,
        "model__prelude_layers": 1,
        "model__coda_layers": 1,
    },
    {"train__trainable": ["v", "w1", "norm_gain"]},
]


def dense(toy: ToyModel, names: list[str], loop: Loop | None) -> Tensor:
    """Return the Hessian by these parameters, (entries, entries), in double precision."""
    model = copy.deepcopy(toy.model).double()
    named = dict(model.named_parameters())
    sizes = [named[name].numel() for name in names]

    def loss(flat: Tensor) -> Tensor:
        parts = flat.split(sizes)
        values = {n: p.view_as(named[n]) for n, p in zip(names, parts, strict=True)}
        for name in named:
            words = name.split(".")
            if loop and "layers" in words:
                at = words.index("layers") + 1
                layer = int(words[at]) - loop.before
                if 0 <= layer < len(model.layers) - loop.before - loop.after:
                    words[at] = str(loop.before + layer % loop.length)
                if (first := ".".join(words)) in values:
                    values[name] = values[first]
        return entropy(functional_call(model, values, (toy.tokens,)), toy.targets)

    start = torch.cat([named[name].detach().flatten() for name in names])
    with sdpa_kernel(SDPBackend.MATH):
        return torch.autograd.functional.hessian(loss, start, vectorize=True)


def entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The loss in double precision."""
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def top(H: Tensor) -> float:
    return torch.linalg.eigvalsh((H + H.T) / 2)[-1].item()


@pytest.mark.parametrize("changes", some(CASES, 2))
def test_both_eigenvalues_equal_the_dense_hessians(changes: dict[str, Any]) -> None:
    toy = ToyModel(**TINY | changes)
    toy.built.banks.tie()
    optimizer, loop = make_optimizer(ADAM, toy.built), toy.built.banks.loop
    for _ in range(3):
        toy.built.banks.zero_gradients()
        toy.loss(toy.model(toy.tokens)).backward()
        toy.built.banks.sum_repeats()
        optimizer.step()
    scales = preconditioner_scales(optimizer, toy.built.trained)
    plain, own = sharpness(toy.built, toy.tokens, toy.loss, scales)

    names_by_id = {id(p): name for name, p in toy.model.named_parameters()}
    names = [names_by_id[id(copies[0])] for copies in tied_parameters(toy.built)]
    H = dense(toy, names, loop)
    assert plain.value == pytest.approx(top(H), rel=1e-3)

    rows = []  # P literally, of each parameter
    for bank in toy.built.trained:
        v = bank.shaped(torch.cat([optimizer.state[p]["exp_avg_sq"] for p in bank.parameters]))
        factor = 0.25 if "w1" in bank.roles else 1.0
        P = (1 - 0.9**3) * ((v / (1 - 0.98**3)).sqrt() + 1e-6) / factor
        P = torch.where(v > 0, P, math.inf)
        if loop and bank.in_layers:
            P = torch.cat([P[: loop.before + loop.length], P[len(P) - loop.after :]])
        rows.append(P.flatten().double())
    S = torch.cat(rows) ** -0.5
    assert own.value == pytest.approx(top(S[:, None] * H * S), rel=1e-3)
    assert own.value > 2 * plain.value and own.residual < 2e-3 * own.value


@pytest.mark.parametrize("lowest", [-1.0, -50.0])
def test_a_quadratic_has_its_eigenvalues(lowest: float, monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.cat([torch.linspace(lowest, 8.0, 60), torch.tensor([9.5, 10.0])]).double()
    Q, _ = torch.linalg.qr(torch.randn(62, 62, generator=torch.Generator().manual_seed(1)))
    A = (Q.double() * values) @ Q.double().T
    theta = torch.randn(62, dtype=torch.float64).requires_grad_()
    H = Hessian(theta @ A @ theta / 2, [[theta]])
    start = torch.ones(62, dtype=torch.float64)
    measured = largest_eigenvalue(H, start)
    assert measured.value == pytest.approx(10.0, rel=1e-4)
    assert abs(measured.value - 10.0) <= measured.residual <= 1e-3 * 10.0
    monkeypatch.setattr(sharpness_module, "MOST_PRODUCTS", 5)
    early = largest_eigenvalue(H, start)  # states how far it is from an eigenvalue
    assert early.products == 5 and early.residual > 1e-2
    assert (values - early.value).abs().min() <= early.residual
    assert largest_eigenvalue(lambda v: -v, start) == (-1.0, pytest.approx(0.0, abs=1e-9), 1)


@pytest.mark.parametrize("scheme", some([n for n in SCHEMES if PAPERS[n].differentiable], 6, 1))
def test_products_are_differences_of_gradients_in_every_scheme(scheme: str) -> None:
    toy = ToyModel(**TINY | {"model__scheme": scheme})
    toy.model.double()
    tied = tied_parameters(toy.built)
    tensors = [copies[0] for copies in tied]

    def gradient_at(shift: float) -> Tensor:
        with torch.no_grad():
            torch._foreach_add_(tensors, parts, alpha=shift)
        loss = entropy(toy.model(toy.tokens), toy.targets)
        gradients = torch.autograd.grad(loss, tensors, materialize_grads=True)
        with torch.no_grad():
            torch._foreach_sub_(tensors, parts, alpha=shift)
        return torch.cat([g.flatten() for g in gradients])

    with twice_differentiable(toy.model):
        H = Hessian(entropy(toy.model(toy.tokens), toy.targets), tied)
        random = torch.Generator().manual_seed(0)
        v = torch.randn(H.entries, generator=random, dtype=torch.float64)
        flat = v.split([p.numel() for p in tensors])
        parts = [part.view_as(p) for part, p in zip(flat, tensors, strict=True)]
        product = H(v)
        difference = (gradient_at(1e-5) - gradient_at(-1e-5)) / 2e-5
        assert (difference - product).norm() < 1e-4 * difference.norm()


@pytest.mark.parametrize(("optimizer", "beta"), [("sgd", 0.0), ("sgd", 0.8), ("adam", 0.9)])
def test_a_quadratic_diverges_above_the_threshold_alone(optimizer: str, beta: float) -> None:
    momentum = {"momentum": beta} if optimizer == "sgd" else {"betas": (beta, 0.95)}
    train = Train(optimizer=optimizer, lr=0.1, schedule="constant", warmup_steps=0, **momentum)
    for factor in (0.98, 1.02):
        curvature = factor * stability_threshold(train, 7)
        theta = torch.full((), 1e-30, dtype=torch.float64).requires_grad_()
        if optimizer == "sgd":
            steps: Any = torch.optim.SGD([theta], lr=0.1, momentum=beta)
        else:  # epsilon is P: the second moment is far below it
            steps = torch.optim.Adam([theta], lr=0.1, betas=(beta, 0.95), eps=1.0)
        sizes = []
        for _ in range(800):
            theta.grad = curvature * theta.detach()
            steps.step()
            sizes.append(abs(theta.item()))
        assert (sizes[-1] > sizes[400]) is (factor > 1)  # after the bias correction of the start
    if optimizer == "adam":
        assert stability_threshold(train, 7) == pytest.approx(38 / 0.1)


@pytest.mark.slow(turn=49)
def test_a_run_records_the_sharpness_and_the_threshold(tmp_path: Path) -> None:
    config = small(
        log__sharpness_every=5, model__dropout=0.1, train__optimizer="sgd", train__lr=0.05,
        train__schedule="constant", train__warmup_steps=0,
    )  # fmt: skip
    run = deepstack.train(config, out=tmp_path / "a")
    sharpness = run.log("sharpness")
    assert list(sharpness["step"]) == [0, 5, 10, 12]
    assert (sharpness["stability_threshold"] == 40.0).all() and (sharpness["sharpness"] > 0).all()
    assert list(sharpness["sharpness"]) == list(sharpness["preconditioned_sharpness"])
    interrupted(config, tmp_path / "b", 7)
    assert logs_of(deepstack.train(config, out=tmp_path / "b")) == logs_of(run)
