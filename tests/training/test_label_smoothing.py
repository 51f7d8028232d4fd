"""Label smoothing: in the training loss alone, with the literal formula."""

from pathlib import Path

import pytest
import torch
from helpers.small_runs import small

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


def test_evaluation_stays_plain_and_shards_are_equal(tmp_path: Path) -> None:
    plain, smooth, sharded = (
        deepstack.train(small(train__label_smoothing=smoothing, train__shards=shards), out=tmp_path)
        for smoothing, shards in ((0.0, 1), (0.2, 1), (0.2, 2))
    )
    assert sharded.steps["loss"].to_numpy() == pytest.approx(smooth.steps["loss"].to_numpy(), 1e-3)
    assert plain.evals["loss"].iloc[0] == smooth.evals["loss"].iloc[0]
    assert plain.steps["loss"].iloc[0] != smooth.steps["loss"].iloc[0]
