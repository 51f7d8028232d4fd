"""The spectral norm as a regulariser."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.small_runs import small

import deepstack
from deepstack.model import build_model
from deepstack.training.penalty import SpectralPenalty

config = partial(
    small, model__depth=3, task__name="markov", task__seq_len=8, train__steps=8,
    train__batch_size=2, train__eval_every=0, train__eval_batches=1,
)  # fmt: skip


def made(strength: float, size: int = 1, **changes: Any) -> tuple[Any, Any]:
    """A model and its penalty, as in a run of `size` processes."""
    chosen = config(train__spectral_penalty=strength, **changes)
    built = build_model(chosen, vocab_size=20)
    return built, SpectralPenalty(chosen, built, SimpleNamespace(size=size))  # type: ignore[arg-type]


def apart(built: Any) -> None:
    """Gap matrices: the top singular value made half as large again, so that v is well defined."""
    with torch.no_grad():
        for bank in built.banks:
            if bank.in_layers and bank.start == "matrix":
                for _, tensors in bank.by_role():
                    for rows in tensors:
                        U, S, V = torch.linalg.svd(rows, full_matrices=False)
                        S[:, 0] *= 1.5
                        rows.copy_(U @ torch.diag_embed(S) @ V)


@pytest.mark.parametrize("family", ["encoder", "encoder_decoder"])
@pytest.mark.parametrize("distribution", ["xavier_normal", "ntk"])
@pytest.mark.parametrize("banks", [True, False])
def test_the_gradient_is_that_of_the_sum_of_squared_norms(
    family: str, distribution: str, banks: bool
) -> None:
    built, penalty = made(
        0.3, model__family=family, model__init={"distribution": distribution}, runtime__banks=banks
    )
    apart(built)
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


def test_it_is_nothing_where_it_is_off_and_a_share_where_it_is_shared() -> None:
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


def test_a_run_with_it_has_smaller_norms_and_logs_the_tasks_loss(tmp_path: Path) -> None:
    plain = deepstack.train(config(), out=tmp_path / "a")
    held = deepstack.train(config(train__spectral_penalty=1.0), out=tmp_path / "c")
    assert held.name != plain.name
    assert held.steps["loss"][0] == plain.steps["loss"][0]
    assert held.steps["grad_norm"][0] > plain.steps["grad_norm"][0]
    for role in ("v", "o", "w1"):
        penalised, free = (run.layers(f"spectral_norm_{role}")[1][-1] for run in (held, plain))
        assert penalised.mean() < 0.97 * free.mean()
