"""‖ΔF‖ has one mean over tokens: another one in its place changes every measure of a move."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.extensions import needs
from helpers.small_runs import small
from torch import Tensor, nn

import deepstack
from deepstack.diagnostics import update
from deepstack.records import Run

MEASURES = {
    "model update": lambda runs: runs["run"].steps["model_update"].iloc[-1],
    "move of a step": lambda runs: runs["run"].steps["model_update_step"].iloc[-1],
    "stream": lambda runs: runs["run"].layers("stream_update")[-1].max(),
    "attribution": lambda runs: runs["run"].log("attribution")["whole"].iloc[-1],
    "saturation line": lambda runs: runs["run"].columns["f0_norm"],
    "probe": lambda runs: runs["probe"].steps["model_update"].iloc[-1],
    "attribution of a probe": lambda runs: runs["probe"].log("attribution")["whole"].iloc[-1],
}


def measured(out: Path) -> dict[str, float]:
    """Every measure of a move, from a run, a probe and a statement of the ledger."""
    from deepstack_lab.ledger.claims import statements

    config = small(
        log__layers_every=6, log__stream_update=True, log__attribution_every=6, model__depth=2
    )
    runs: dict[str, Run] = {"run": deepstack.train(config, out=out)}
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 8), nn.Linear(8, 8), nn.LayerNorm(8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    tokens = torch.arange(14).view(2, 7) % 7
    with deepstack.probe(
        model, tokens, optimizer, out=out / "probe", layers=(), attribution_every=1
    ) as probe:
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(tokens).sin().sum()
            loss.backward()
            optimizer.step()
            probe.step(loss)
    runs["probe"] = Run(out / "probe")
    values = {name: float(value(runs)) for name, value in MEASURES.items()}
    return values | {"ledger": statements.vanishing(0, steps=2)["lag"]}


def median_distance(change: Tensor, kept: int = 0) -> Tensor:
    """In place of the mean: three times the median, so that no value stays by chance."""
    return 3 * change.norm(dim=-1).flatten(kept).median(dim=-1).values


@pytest.mark.slow(turn=54)
@needs("attribution", "probe", "ledger")
def test_another_distance_changes_every_measure_of_a_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = measured(tmp_path / "mean")
    monkeypatch.setattr(update.token_distance, "__code__", median_distance.__code__)
    after = measured(tmp_path / "median")
    same = [name for name, value in before.items() if math.isclose(after[name], value)]
    assert same == []


def test_the_distance_is_the_mean_length_of_the_rows() -> None:
    change = torch.randn(3, 2, 5, 4, generator=torch.Generator().manual_seed(1)).double()
    rows: Any = change.tolist()
    lengths = [[math.dist(row, [0.0] * 4) for part in one for row in part] for one in rows]
    expected = torch.tensor([sum(one) / len(one) for one in lengths])
    torch.testing.assert_close(update.token_distance(change, kept=1).float(), expected.float())
    torch.testing.assert_close(update.token_distance(change).float(), expected.float().mean())
