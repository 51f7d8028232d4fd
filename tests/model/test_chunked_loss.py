"""The loss in chunks of positions equals the loss of all logits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.small_runs import small

import deepstack
from deepstack.config import Config, memory_terms, sizes
from deepstack.model.chunked_loss import ChunkedLoss
from deepstack.model.loss import mean_loss
from deepstack.tasks import IGNORE

VOCAB = 11


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of three positions, from 45 logits on."""
    monkeypatch.setattr(sizes, "MOST_LOGITS", 44)
    monkeypatch.setattr(sizes, "CHUNK_OF_LOGITS", 3 * VOCAB)


@pytest.mark.parametrize(
    ("head", "smoothing", "divisor"),
    [("tied", 0.0, None), ("separate", 0.2, None), ("bert", 0.0, 3.0), ("tied", 0.2, 3.0)],
)
@pytest.mark.parametrize("half", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_loss_and_gradients_equal_the_plain_head(
    head: str, smoothing: float, divisor: float | None, half: bool, chunks: None
) -> None:
    config = small(model__head=head, model__depth=1, model__scheme="depth_mup")
    model = deepstack.build_model(config, vocab_size=VOCAB).model
    tokens = torch.arange(32).view(2, 16) % VOCAB
    targets = torch.where(tokens % 3 == 1, IGNORE, (tokens * 5 + 1) % VOCAB)
    parameters = [p for p in model.parameters() if p.requires_grad]

    def plain() -> torch.Tensor:
        logits = model(tokens).flatten(0, 1).float()
        values = -torch.log_softmax(logits, dim=1)
        wanted = values.gather(1, targets.flatten().clamp(min=0)[:, None])[:, 0]
        each = (1 - smoothing) * wanted + smoothing * values.mean(dim=1)
        is_predicted = targets.flatten() != IGNORE
        return each[is_predicted].sum() / (divisor or is_predicted.sum())

    def chunked() -> torch.Tensor:
        def loss(logits: torch.Tensor, of: torch.Tensor, count: Any) -> torch.Tensor:
            assert logits.shape[1] <= 3, "the logits of more than a chunk"
            return mean_loss(logits, of, count, smoothing=smoothing)

        return model(tokens, ChunkedLoss(loss, targets, divisor))

    tolerance = {"rtol": 2e-2, "atol": 2e-2} if half else {"rtol": 1e-4, "atol": 1e-6}
    values, gradients = [], []
    for function in (plain, chunked):
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            value = function()
        (2 * value).backward()
        values.append(value.detach())
        gradients.append([p.grad.clone() for p in parameters if p.grad is not None])
        model.zero_grad(set_to_none=False)
    torch.testing.assert_close(*values, **tolerance)
    torch.testing.assert_close(*gradients, **tolerance)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=half):
        torch.testing.assert_close(chunked(), values[1])


@pytest.mark.slow
def test_a_run_in_chunks_equals_a_run_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def losses(replay: Any, out: Path) -> torch.Tensor:
        config = small(train__steps=12, model__depth=1, runtime__replay=replay, seed=2)
        run = deepstack.train(config, out=out)
        return torch.tensor([*run.steps.loss, *run.steps.grad_norm, *run.evals.loss])

    plain = losses(False, tmp_path / "plain")
    monkeypatch.setattr(sizes, "MOST_LOGITS", 5000)
    monkeypatch.setattr("deepstack.config.MOST_LOGITS", 5000)
    monkeypatch.setattr(sizes, "CHUNK_OF_LOGITS", 257 * 10)
    eager, replayed = (losses(r, tmp_path / str(r)) for r in (False, "python"))
    torch.testing.assert_close(eager, plain, rtol=1e-5, atol=0)
    assert not torch.equal(eager, plain), "no chunk was computed"
    assert torch.equal(eager, replayed)
    native = losses("native", tmp_path / "native")
    torch.testing.assert_close(native, plain, rtol=1e-4, atol=0)


def test_the_rule_leaves_small_vocabularies_alone_and_bounds_the_estimate() -> None:
    assert sizes.chunk_rows(2**27 // 50_257, 50_257) is None
    assert sizes.chunk_rows(16_384, 50_257) == 2**21 // 50_257
    large = Config()
    head = memory_terms(
        large.model_copy(update={"train": large.train.model_copy(update={"batch_size": 256})}),
        50_257,
    )["logits, their softmax and their gradient"]
    assert head < 400e6 < 3 * 256 * 64 * 50_257 * 4
