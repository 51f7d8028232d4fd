"""Analyses of models whose forward pass changes more than its result: restored, or refused."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.stateful_models import BATCH, DEPTH, KINDS, NOISY, SEQ, Stack, draw, held
from torch import nn

import deepstack
from deepstack.base.errors import ConfigError

VOCABULARY = 11
TARGETS = torch.randint(0, VOCABULARY, (BATCH, SEQ), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def loss_without(model: Stack, layer: int | None) -> float:
    """The loss of a copy in evaluation mode in which a layer is the identity."""
    alone: Any = copy.deepcopy(model).eval()
    if layer is not None:
        alone.blocks[layer] = nn.Identity()
    return F.cross_entropy(alone(draw(0)).flatten(0, 1), TARGETS.flatten()).item()


@pytest.mark.parametrize("kind", KINDS)
def test_analyses_leave_the_model_as_it_is_and_are_right(kind: str) -> None:
    model = Stack(KINDS[kind], VOCABULARY).train()
    before, batch = held(model), draw(0)
    results = deepstack.analyze_model(
        model, batch, ["lens", "effects"], layers="blocks", targets=TARGETS
    )
    assert held(model) == before and torch.equal(batch, draw(0))
    wanted = [loss_without(model, layer) for layer in range(DEPTH)]
    assert results["effects"].arrays["loss_without"] == pytest.approx(wanted, rel=1e-4)
    final = loss_without(model, None)
    assert results["lens"].scalars["final_loss"] == pytest.approx(final, rel=1e-4)


@pytest.mark.parametrize("kind", NOISY)
def test_noise_in_evaluation_mode_is_refused_by_name(kind: str) -> None:
    block, name = NOISY[kind]
    model = Stack(block, VOCABULARY)
    with pytest.raises(ConfigError, match=rf"model: {name} draws random numbers in evaluation"):
        deepstack.analyze_model(model, draw(0), ["lens"], layers="blocks")
