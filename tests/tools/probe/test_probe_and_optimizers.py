"""The probe beside optimizers: inside of wrappers, inside of backward, and in another order."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import ROOT
from helpers.probe_models import adamw, batch_of, encoder, loop, probe_of
from torch import Tensor

import deepstack
from deepstack.base.errors import ConfigError

PAGE = (ROOT / "docs" / "tutorials" / "own_model.md").read_text(encoding="utf-8")


class AcceleratedOptimizer(torch.optim.Optimizer):
    """A wrapper that is an optimizer itself, as Accelerate's is."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


class Sharded:
    """A wrapper that keeps the optimizer under another name, as ZeRO's does."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optim, self.param_groups = optimizer, optimizer.param_groups


WRAPPERS: list[Callable[[Any], Any]] = [
    AcceleratedOptimizer,
    Sharded,
    lambda optimizer: AcceleratedOptimizer(AcceleratedOptimizer(optimizer)),
]


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_the_name_is_that_of_the_optimizer_inside(
    wrap: Callable[[Any], Any], tmp_path: Path
) -> None:
    model = encoder(1)
    probe = deepstack.probe(model, batch_of(0), wrap(adamw(model, 0.02)), out=tmp_path / "run")
    assert probe.config["train"] == {"optimizer": "adamw", "lr": 0.02, "weight_decay": 0.01}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the library
def test_accelerate_s_optimizer_has_the_name_of_the_one_inside(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = encoder(1)
    model, optimizer = accelerate.Accelerator(cpu=True).prepare(model, adamw(model))
    with deepstack.probe(model, batch_of(0), optimizer, out=tmp_path / "run") as probe:
        loop(model, optimizer, 3, probe.step)
    assert probe.run.get("train.optimizer") == "adamw" and len(probe.run.steps) == 3


def call_early(probe: Any) -> None:
    """Call the probe before each step of the optimizer."""
    with probe:
        for step in range(1, 4):
            probe.optimizer.zero_grad()
            loss = probe.model(batch_of(step)).square().mean()
            loss.backward()
            probe.step(loss)
            probe.optimizer.step()


@pytest.mark.parametrize("wrap", [lambda one: one, AcceleratedOptimizer])
def test_a_call_before_the_optimizer_s_step_is_refused(
    wrap: Callable[[Any], Any], tmp_path: Path
) -> None:
    model = encoder()
    optimizer = adamw(model)
    probe = deepstack.probe(model, batch_of(0), wrap(optimizer), out=tmp_path / "run")
    with pytest.raises(ConfigError, match=r"before optimizer\.step\(\).* on_optimizer_step of a"):
        call_early(probe)
    assert probe.at == 2
    assert not optimizer._optimizer_step_post_hooks


def test_loops_without_steps_of_this_optimizer_are_measured(tmp_path: Path) -> None:
    def by_hand(model: Any, optimizer: Any) -> None:
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.01 * p.grad

    def never(model: Any, optimizer: Any) -> None: ...

    def rate_0(model: Any, optimizer: Any) -> None:
        optimizer.param_groups[0]["lr"] = 0.0 if not optimizer.state else 0.01
        optimizer.step()

    def by_another_at_first(model: Any, optimizer: Any) -> None:
        if next(model.parameters()).grad is not None and not hasattr(model, "began"):
            model.began = True
            by_hand(model, optimizer)
        else:
            optimizer.step()

    for way in (by_hand, never, rate_0, by_another_at_first):
        with probe_of(tmp_path / way.__name__, encoder(dropout=0.0)) as probe:
            for step in range(1, 4):
                probe.optimizer.zero_grad()
                loss = probe.model(batch_of(step)).square().mean()
                loss.backward()
                way(probe.model, probe.optimizer)
                probe.step(loss)
        assert len(probe.run.steps) == 3


def test_steps_in_hooks_of_backward_are_measured_as_the_page_says(tmp_path: Path) -> None:
    (lines,) = re.findall(r"```python\n(for p in model\.parameters.*?)```", PAGE, re.DOTALL)
    set_hooks, of_a_step = lines[: lines.index("loss.backward")], lines[lines.index("loss.back") :]
    ends: list[list[Tensor]] = []
    for inside in (True, False):
        model = encoder(dropout=0.0)
        optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        names: dict[str, Any] = {"model": model, "optimizers": optimizers}
        if inside:
            exec(set_hooks, names)
        with deepstack.probe(model, batch_of(0), optimizer, out=tmp_path / str(inside)) as probe:
            for step in range(1, 4):
                names |= {"loss": model(batch_of(step)).square().mean(), "probe": probe}
                if inside:
                    exec(of_a_step, names)
                else:
                    names["loss"].backward()
                    optimizer.step()
                    probe.step(names["loss"])
                    optimizer.zero_grad()
        ends.append([p.detach() for p in model.parameters()])
        ends.append([torch.tensor(probe.run.steps[["model_update", "grad_norm"]].to_numpy())])
    assert all(map(torch.equal, ends[0], ends[2])) and torch.equal(ends[1][0], ends[3][0])


def test_a_loop_without_gradients_is_told_of_hooks(tmp_path: Path) -> None:
    probe = probe_of(tmp_path / "run")
    with pytest.raises(ConfigError, match="must leave the gradients to probe"), probe:
        probe.step(1.0)
