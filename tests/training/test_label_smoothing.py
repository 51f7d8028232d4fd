"""Label smoothing: in the training loss alone, with the literal formula."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.small_runs import data_of, small

import deepstack
from deepstack.tasks import IGNORE
from deepstack.training import mean_loss


@pytest.mark.parametrize("count", [None, 7.0])
def test_it_is_its_formula_over_predicted_positions(count: float | None) -> None:
    logits, targets = torch.randn(2, 3, 5), torch.tensor([[1, IGNORE, 4], [0, 2, IGNORE]])
    total = 0.0
    for row, target in zip(logits.flatten(0, 1), targets.flatten(), strict=True):
        if target != IGNORE:
            p = row.exp() / row.exp().sum()
            total += -0.9 * p[target].log() - 0.1 * p.log().sum() / 5
    wanted = total / (count or 4)
    torch.testing.assert_close(mean_loss(logits, targets, count, smoothing=0.1), wanted)


def test_evaluation_stays_plain_and_every_path_is_equal(tmp_path: Path) -> None:
    settings = {"train__label_smoothing": 0.2, "train__steps": 55, "train__batch_size": 4}
    runs = [
        deepstack.train(small(**settings | more), out=tmp_path / str(i))
        for i, more in enumerate(({}, {"runtime__replay": False, "runtime__banks": False}))
    ]
    assert data_of(runs[0]) == data_of(runs[1])
    sharded = deepstack.train(small(**settings, train__shards=2), out=tmp_path / "shards")
    assert sharded.steps["loss"].to_numpy() == pytest.approx(runs[0].steps["loss"].to_numpy(), 1e-3)
    plain = deepstack.train(small(**settings | {"train__label_smoothing": 0.0}), out=tmp_path)
    assert plain.evals["loss"].iloc[0] == runs[0].evals["loss"].iloc[0]
    assert plain.steps["loss"].iloc[0] != runs[0].steps["loss"].iloc[0]
