"""Muon: each update as its equation has it, matrix by matrix, and all layers' at once."""

from typing import Any

import pytest
import torch
from helpers.configs import config_with
from helpers.small_runs import step_of
from torch import Tensor

from deepstack.config import Config, with_overrides
from deepstack.model import build_model
from deepstack.training import make_optimizer, muon
from deepstack.training.muon import Muon

TOKENS = torch.arange(24).view(2, 12) % 17


def quintic(singular: Tensor, steps: int = 5) -> Tensor:
    """What the polynomial makes of singular values, one by one."""
    for _ in range(steps):
        singular = 3.4445 * singular - 4.7750 * singular**3 + 2.0315 * singular**5
    return singular


def updates(**changes: Any) -> tuple[Any, dict[str, Tensor], list[dict[str, Tensor]]]:
    """Three steps of a small model: it, its weights before, each step's gradients, clipped."""
    sizes = {"model.depth": 3, "model.d_model": 12, "model.d_ff": 40, "train.optimizer": "muon"}
    config = config_with(sizes, **changes)
    built = build_model(config, vocab_size=17)
    start = {key: value.double() for key, value in built.banks.state().items()}
    step = step_of(built, config)
    seen: list[dict[str, Tensor]] = []
    for t in range(3):
        norm = step((TOKENS + t) % 17, TOKENS, 0.01).grad_norm
        scale = 1.0 if config.train.clip is None else min(1.0, config.train.clip / norm.item())
        gradients = {bank.key: bank.gradients().clone() for bank in built.trained}
        seen.append({key: scale * gradient for key, gradient in gradients.items()})
    return built, start, seen


@pytest.mark.parametrize("shape", [(1, 8, 8), (5, 24, 8), (3, 8, 24), (2, 1, 7)])
def test_singular_values_go_through_the_polynomial(shape: tuple[int, int, int]) -> None:
    matrices = torch.randn(shape, dtype=torch.float64)
    u, s, vt = torch.linalg.svd(matrices, full_matrices=False)
    s = quintic(s / torch.linalg.vector_norm(s, dim=-1, keepdim=True))
    expected = u @ torch.diag_embed(s) @ vt
    torch.testing.assert_close(muon.orthogonalised(matrices), expected)
    torch.testing.assert_close(
        muon.orthogonalised(matrices.float()), expected.float(), rtol=1e-3, atol=1e-4
    )


@pytest.mark.parametrize("size", [1e-15, 1e-6, 1e12])
def test_only_the_direction_of_a_gradient_counts(size: float) -> None:
    matrices = torch.randn(4, 6, 9)
    torch.testing.assert_close(
        muon.orthogonalised(size * matrices), muon.orthogonalised(matrices), rtol=1e-4, atol=1e-5
    )
    assert muon.orthogonalised(torch.zeros(1, 3, 3)).eq(0).all()
    assert muon.orthogonalised(1e-30 * matrices).isfinite().all()


@pytest.mark.parametrize("adjust_lr", ["match_rms_adamw", "original"])
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("banks", [True, False])
def test_updates_are_those_of_the_equation(
    adjust_lr: str, clip: float | None, banks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(muon, "BATCH_SIZE", 2 * 3 * 12 * 12)  # one layer or two at a time
    settings = {
        "train__muon": {"adjust_lr": adjust_lr, "momentum": 0.9}, "train__clip": clip,
        "train__weight_decay": 0.1, "runtime__banks": banks, "train__lr_factors": {"w1": 0.5},
    }  # fmt: skip
    built, start, seen = updates(**settings)
    matrices = [bank for bank in built.trained if bank.in_layers and bank.start == "matrix"]
    assert [len(bank.roles) for bank in matrices] == [3, 1, 1, 1]  # q k v, o, w1, w2
    for bank in matrices:
        for layer in range(3):
            w = start[bank.key][layer]
            n_out, n_in = w.shape[0] // len(bank.roles), w.shape[1]
            s = 0.2 * max(n_out, n_in) ** 0.5
            if adjust_lr == "original":
                s = max(1, n_out / n_in) ** 0.5
            rate = 0.01 * (0.5 if "w1" in bank.roles else 1.0)
            momentum = torch.zeros_like(w)
            for gradients in seen:
                g = gradients[bank.key][layer].double()
                momentum = 0.9 * momentum + 0.1 * g
                parts = (0.1 * g + 0.9 * momentum).view(-1, n_out, n_in)
                w = (1 - rate * 0.1) * w - rate * s * muon.orthogonalised(parts).flatten(0, 1)
            found = built.banks.state()[bank.key][layer].double()
            torch.testing.assert_close(found, w, rtol=1e-3, atol=1e-4)


def test_torchs_muon_takes_the_same_steps() -> None:
    """But for rounding to bf16, which it always does."""
    matrices = torch.nn.Parameter(torch.randn(5, 24 * 8))
    each = [torch.nn.Parameter(row.view(24, 8).clone()) for row in matrices.detach()]
    shape = {"params": [matrices], "shape": (1, 24, 8), "weight_decay": 0.1}
    ours = Muon([shape], None, lr=0.02, dtype=torch.bfloat16)
    theirs = torch.optim.Muon(
        each, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw", momentum=0.95
    )
    for _ in range(4):
        matrices.grad = torch.randn(5, 24 * 8)
        for p, row in zip(each, matrices.grad, strict=True):
            p.grad = row.view(24, 8).clone()
        before = matrices.detach().clone()
        ours.step()
        theirs.step()
        apart = matrices.detach() - torch.stack([p.detach().flatten() for p in each])
        assert apart.norm() < 0.02 * (matrices.detach() - before).norm()


def test_only_norms_trained_is_adamw() -> None:
    config = with_overrides(
        Config(), {"train.optimizer": "muon", "train.trainable": ["norm_gain", "embedding"]}
    )
    built = build_model(config, vocab_size=17)
    assert type(make_optimizer(config.train, built)) is torch.optim.AdamW
