"""Label smoothing, the spectral penalty and Muon, against their literal equations."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.configs import config_with
from helpers.small_runs import small, step_of
from torch import Tensor

import deepstack
from deepstack.config import Config, with_overrides
from deepstack.model import build_model
from deepstack.tasks import IGNORE
from deepstack.training import make_optimizer, mean_loss, muon
from deepstack.training.muon import Muon
from deepstack.training.parts.penalty import SpectralPenalty

# --- label smoothing ---------------------------------------------------------------------------


@pytest.mark.parametrize("count", [None, 7.0])
def test_label_smoothing_is_its_formula_over_predicted_positions(count: float | None) -> None:
    logits, targets = torch.randn(2, 3, 5), torch.tensor([[1, IGNORE, 4], [0, 2, IGNORE]])
    total = 0.0
    for row, target in zip(logits.flatten(0, 1), targets.flatten(), strict=True):
        if target != IGNORE:
            p = row.exp() / row.exp().sum()
            total += -0.9 * p[target].log() - 0.1 * p.log().sum() / 5
    wanted = total / (count or 4)
    torch.testing.assert_close(mean_loss(logits, targets, count, smoothing=0.1), wanted)


@pytest.mark.parametrize("count", [None, 7.0])
def test_the_z_loss_is_its_formula_over_predicted_positions(count: float | None) -> None:
    logits, targets = torch.randn(2, 3, 5), torch.tensor([[1, IGNORE, 4], [0, 2, IGNORE]])
    total = 0.0
    for row, target in zip(logits.flatten(0, 1), targets.flatten(), strict=True):
        if target != IGNORE:
            Z = row.exp().sum()
            total += -row[target] + Z.log() + 0.3 * Z.log() ** 2
    wanted = total / (count or 4)
    torch.testing.assert_close(mean_loss(logits, targets, count, z_loss=0.3), wanted)


@pytest.mark.slow(turn=51)
def test_label_smoothing_leaves_evaluation_plain_and_shards_equal(tmp_path: Path) -> None:
    plain, smooth, sharded = (
        deepstack.train(
            small(train__label_smoothing=eps, train__z_loss=eps, train__shards=shards), out=tmp_path
        )
        for eps, shards in ((0.0, 1), (0.2, 1), (0.2, 2))
    )
    assert sharded.steps["loss"].to_numpy() == pytest.approx(smooth.steps["loss"].to_numpy(), 1e-3)
    assert plain.evals["loss"].iloc[0] == smooth.evals["loss"].iloc[0]
    assert plain.steps["loss"].iloc[0] != smooth.steps["loss"].iloc[0]


# --- the spectral penalty -------------------------------------------------------------------------


config = partial(
    small, model__depth=3, task__name="markov", task__seq_len=8, train__steps=8,
    train__batch_size=2, train__eval_every=0, train__eval_batches=1,
)  # fmt: skip


def made(strength: float, size: int = 1, **changes: Any) -> tuple[Any, Any]:
    """A model and its penalty, as in a run of `size` processes."""
    chosen = config(train__spectral_penalty=strength, **changes)
    built = build_model(chosen, vocab_size=20)
    return built, SpectralPenalty(chosen, built, SimpleNamespace(size=size))  # type: ignore[arg-type]


@pytest.mark.parametrize("family", ["encoder", "encoder_decoder"])
@pytest.mark.parametrize("distribution", ["xavier_normal", "ntk"])
@pytest.mark.parametrize("banks", [True, False])
def test_the_penaltys_gradient_equals_the_sum_of_squared_norms(
    family: str, distribution: str, banks: bool
) -> None:
    built, penalty = made(
        0.3, model__family=family, model__init={"distribution": distribution}, runtime__banks=banks
    )
    with torch.no_grad():  # the top singular value half as large again, so that v is well defined
        for bank in built.banks:
            if bank.in_layers and bank.start == "matrix":
                for _, tensors in bank.by_role():
                    for rows in tensors:
                        U, S, V = torch.linalg.svd(rows, full_matrices=False)
                        S[:, 0] *= 1.5
                        rows.copy_(U @ torch.diag_embed(S) @ V)
    before = torch.tensor(1.2345, requires_grad=True)
    value = penalty(before)
    assert torch.equal(value, before)  # the task's loss, bit for bit
    value.backward()
    assert before.grad is not None and before.grad.item() == 1.0
    total = 0.0
    for bank in built.banks:
        gradients = bank.gradients().double()
        if not (bank.in_layers and bank.start == "matrix"):
            assert not gradients.any()
            continue
        parts = gradients.chunk(len(bank.roles), dim=1)
        for part, (_, tensors) in zip(parts, bank.by_role(), strict=True):
            for W, found in zip(torch.cat(tensors).double(), part, strict=True):
                scale = 1 / W.shape[1] if distribution == "ntk" else 1.0
                U, S, V = torch.linalg.svd(W)
                wanted = 0.3 * scale * S[0] * torch.outer(U[:, 0], V[0])
                assert (found - wanted).norm() < 0.05 * wanted.norm()
                total += 0.3 / 2 * scale * S[0].item() ** 2
    assert 0.3 / 2 * penalty.squares().item() == pytest.approx(total, rel=1e-3)


def test_the_spectral_penalty_is_divided_among_ranks_and_absent_if_off() -> None:
    loss = torch.tensor(2.0, requires_grad=True)
    assert made(0.0)[1](loss) is loss
    one, half = (made(0.2, size=size) for size in (1, 2))
    for _, penalty in (one, half):
        penalty(loss).backward()
    for whole, part in zip(one[0].banks, half[0].banks, strict=True):
        assert torch.allclose(whole.gradients(), 2 * part.gradients(), rtol=1e-6)
    built, penalty = made(0.2, train__trainable=["w1", "bias"])
    penalty(loss).backward()
    moved = {bank.key for bank in built.banks if bank.gradients().any()}
    assert moved == {"encoder.layers.feed_forward.w1"}


def test_a_run_with_the_spectral_penalty_has_smaller_norms_and_logs_the_tasks_loss(
    tmp_path: Path,
) -> None:
    plain = deepstack.train(config(), out=tmp_path / "a")
    held = deepstack.train(config(train__spectral_penalty=1.0), out=tmp_path / "c")
    assert held.name != plain.name
    assert held.steps["loss"][0] == plain.steps["loss"][0]
    assert held.steps["grad_norm"][0] > plain.steps["grad_norm"][0]
    for role in ("v", "o", "w1"):
        penalised, free = (run.layers(f"spectral_norm_{role}")[1][-1] for run in (held, plain))
        assert penalised.mean() < 0.97 * free.mean()


# --- Muon: each update as its equation has it, matrix by matrix, and all layers' at once ----------


TOKENS = torch.arange(24).view(2, 12) % 17


@pytest.mark.parametrize("shape", [(1, 8, 8), (5, 24, 8), (3, 8, 24), (2, 1, 7)])
def test_singular_values_go_through_the_polynomial(shape: tuple[int, int, int]) -> None:
    matrices = torch.randn(shape, dtype=torch.float64)
    u, s, vt = torch.linalg.svd(matrices, full_matrices=False)
    s = s / torch.linalg.vector_norm(s, dim=-1, keepdim=True)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
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
def test_updates_follow_the_equation(
    adjust_lr: str, clip: float | None, banks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(muon, "BATCH_SIZE", 2 * 3 * 12 * 12)  # one layer or two at a time
    settings = {
        "model.depth": 3, "model.d_model": 12, "model.d_ff": 40, "train.optimizer": "muon",
        "train.muon": {"adjust_lr": adjust_lr, "momentum": 0.9}, "train.clip": clip,
        "train.weight_decay": 0.1, "runtime.banks": banks, "train.lr_factors": {"w1": 0.5},
    }  # fmt: skip
    config = config_with(settings)
    built = build_model(config, vocab_size=17)
    start = {key: value.double() for key, value in built.banks.state().items()}
    step = step_of(built, config)
    seen: list[dict[str, Tensor]] = []  # the clipped gradients of each step
    for t in range(3):
        norm = step((TOKENS + t) % 17, TOKENS, 0.01).grad_norm
        scale = 1.0 if clip is None else min(1.0, clip / norm.item())
        seen.append({bank.key: scale * bank.gradients() for bank in built.trained})
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
    """Apart from its rounding to bf16."""
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
