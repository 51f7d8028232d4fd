"""Every optimizer of the registry keeps what its class declares."""

from pathlib import Path

import pytest
import torch
from helpers.small_runs import data_of, interrupted, small
from torch import Tensor

import deepstack
from deepstack.config import Train, with_overrides
from deepstack.training.optimizers import OPTIMIZERS, Groups

RATE = 0.01
LAYERS, SHAPE = 3, (1, 8, 6)  # the matrices of a parameter's row, and their rows and columns
SIZE = 48
every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS.names())


class Moved:
    """A parameter and its optimizer, which follows the gradients that it is given."""

    def __init__(self, name: str, start: Tensor) -> None:
        self.parameter = torch.nn.Parameter(start.clone())
        group = {"params": [self.parameter], "factor": 1.0, "weight_decay": 0.0}
        train = Train(optimizer=name, lr=RATE)
        of_matrices = Groups([], [{**group, "shape": SHAPE}], train, {})
        takes_matrices = OPTIMIZERS[name].takes_matrices
        groups = of_matrices if takes_matrices else Groups([group], [], train, {})
        self.optimizer = OPTIMIZERS[name]().make(groups)

    def by(self, *gradients: Tensor) -> Tensor:
        """Return the parameter after a step by each gradient."""
        for gradient in gradients:
            self.parameter.grad = gradient.clone()
            self.optimizer.step()
        return self.parameter.detach().clone()


def drawn(seed: int) -> Tensor:
    return torch.randn((LAYERS, SIZE), generator=torch.Generator().manual_seed(seed))


@every_optimizer
def test_an_optimizer_comes_near_the_least_value_of_a_quadratic(name: str) -> None:
    aim, moved = drawn(0), Moved(name, torch.zeros(LAYERS, SIZE))
    for _ in range(600):
        moved.by(moved.parameter.detach() - aim)
    assert (moved.parameter - aim).norm() < 0.3 * aim.norm()


@every_optimizer
def test_a_step_has_the_size_of_the_rate_if_the_optimizer_is_adaptive(name: str) -> None:
    sizes = [
        float(Moved(name, torch.zeros(LAYERS, SIZE)).by(scale * drawn(1)).square().mean().sqrt())
        / RATE
        for scale in (1e-3, 1.0, 1e3)
    ]
    assert OPTIMIZERS[name].adaptive == all(0.1 < size < 2 for size in sizes), sizes


@every_optimizer
def test_parts_of_a_parameter_move_like_the_whole_if_the_optimizer_is_elementwise(
    name: str,
) -> None:
    gradients = [drawn(2), drawn(3), drawn(4)]
    others_differ = [torch.cat([g[:, :8], 2 * g[:, 8:]], dim=1) for g in gradients]
    start = drawn(5)
    whole, other = (Moved(name, start).by(*given)[:, :8] for given in (gradients, others_differ))
    assert OPTIMIZERS[name].elementwise == torch.equal(whole, other)


@every_optimizer
def test_replayed_steps_and_continued_ones_give_the_same_bytes(name: str, tmp_path: Path) -> None:
    config = small(train__optimizer=name, train__weight_decay=0.1, model__depth=2)
    plain = with_overrides(config, {"runtime.replay": False})
    replayed = with_overrides(config, {"runtime.replay": "python"})
    whole = deepstack.train(replayed if OPTIMIZERS[name].static else plain, out=tmp_path / "a")
    interrupted(plain, tmp_path / "b", 5)
    continued = deepstack.train(plain, out=tmp_path / "b")
    assert continued.meta["resumed"] and data_of(continued) == data_of(whole)
