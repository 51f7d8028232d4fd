"""The probe on models whose forward pass changes more than its result: restored, or refused."""

import copy
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.extensions import needs
from helpers.stateful_models import KINDS, NOISY, Plain, Stack, draw, held, losses_of

import deepstack
from deepstack.base.errors import ConfigError

STEPS = 5


def trained_alone(kind: str) -> tuple[list[float], Any, list[float]]:
    """Losses, the end of training, and ‖F_t − F_0‖ of copies of the model, without a probe."""
    model = Stack(KINDS[kind])
    F_0, losses, moved = evaluated(model), [], []
    for _, _, loss in losses_of(model, STEPS):
        losses.append(loss.item())
        moved.append((evaluated(model) - F_0).norm(dim=-1).mean().item())
    return losses, held(model), moved


def evaluated(model: Stack) -> Any:
    """F of a copy in evaluation mode, whose draws do not count."""
    plain, numbers = random.getstate(), np.random.get_state()
    with torch.no_grad(), torch.random.fork_rng():
        F = copy.deepcopy(model).eval()(draw(0)).double()
    random.setstate(plain)
    np.random.set_state(numbers)
    return F


@pytest.mark.parametrize("kind", KINDS)
def test_training_and_the_model_stay_as_without_the_probe(kind: str, tmp_path: Path) -> None:
    wanted, end, moved = trained_alone(kind)
    model, losses = Stack(KINDS[kind]).train(), []
    before = held(model)
    training = losses_of(model, STEPS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)  # of the folder's description
    with deepstack.probe(
        model, draw(0), optimizer, out=tmp_path / "run", layers_every=1, attribution_every=1
    ) as probe:
        assert held(model) == before
        for _, _, loss in training:
            losses.append(loss.item())
            probe.step(loss)
    assert losses == wanted
    assert held(model) == end
    assert probe.run.steps["model_update"].tolist() == pytest.approx(moved, rel=1e-4)
    in_one = probe.run.log("attribution")["whole"].tolist()
    assert in_one == pytest.approx(moved, rel=1e-4)


@needs("calibrate")
@pytest.mark.parametrize("kind", KINDS)
def test_a_calibration_trains_as_without_the_probe(kind: str, tmp_path: Path) -> None:
    losses: dict[float, list[float]] = {}

    def build(depth: int, seed: int) -> Any:
        model = Stack(KINDS[kind])
        training = losses_of(model, 3)
        mine = losses.setdefault(len(losses), [])

        def loss(step: int) -> Any:
            mine.append(next(training)[2].item())  # a step by another optimizer
            model.zero_grad()
            return 0.0 * model.norm.weight.sum()

        return model, draw(0), loss

    deepstack.calibrate_model(
        build, groups={"all": "*"}, depths=(1, 2), lr=0.1, out=tmp_path / "c", seeds=1, steps=(3,),
        check=False, hidden="norm", optimizer=torch.optim.SGD,
    )  # fmt: skip
    alone = [loss.item() for _, _, loss in losses_of(Stack(KINDS[kind]), 3)]
    assert list(losses.values()) == [alone] * 4


@pytest.mark.parametrize("kind", NOISY)
def test_noise_in_evaluation_mode_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    block, name = NOISY[kind]
    model = Stack(block)
    states = [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]
    with pytest.raises(ConfigError, match=rf"model: {name} draws random numbers in evaluation"):
        deepstack.probe(model, draw(0), torch.optim.SGD(model.parameters()), out=tmp_path / "run")
    after = [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]
    assert states == after and not (tmp_path / "run").exists()


CALLS: list[int] = []


class OutsideState(Plain):
    """Reads the length of a list that belongs to no module."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        CALLS.append(len(CALLS))
        return super().forward(x + len(CALLS))


def test_a_state_outside_of_the_modules_is_refused(tmp_path: Path) -> None:
    model = Stack(OutsideState)
    with pytest.raises(ConfigError, match="reads a state outside of them"):
        deepstack.probe(model, draw(0), torch.optim.SGD(model.parameters()), out=tmp_path / "run")
