"""A check of an optimizer's rule before a run: one update of a small parameter."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deepstack import config as conf
from deepstack.base.errors import PluginError
from deepstack.base.registry import place_of
from deepstack.training.optimizers import OPTIMIZERS, Optimizer

SHAPE = (2, 3)


def check_rule(config: conf.Config) -> None:
    """Raise PluginError unless the rule of the optimizer returns u and its state, number by number.

    An optimizer that makes a torch optimizer of its own has no rule to try.  Torch's random state
    is restored.
    """
    rule = OPTIMIZERS.of(config)
    if rule.make is not Optimizer.make:
        return
    owner = f"the optimizer {rule.name}: {place_of(rule.update)}update"
    random = torch.Generator().manual_seed(0)
    given = [torch.randn(SHAPE, generator=random) for _ in range(2)]
    given += [torch.zeros(SHAPE) for _ in rule.state]
    before = [one.clone() for one in given]
    found = update_once(rule, given)
    names = ["parameter", "gradient", *rule.state]
    for name, one, was in zip(names, given, before, strict=True):
        if not torch.equal(one, was):
            raise PluginError(f"{owner} changes {name} in place; allowed to return a new tensor")
    wanted = ", ".join(["u", *rule.state]) + "," * (not rule.state)
    if not isinstance(found, tuple) or len(found) != 1 + len(rule.state):
        shown = f"{len(found)} values" if isinstance(found, tuple) else type(found).__name__
        raise PluginError(f"{owner} gave {shown}; allowed the tuple ({wanted})")
    for name, one in zip(["u", *rule.state], found, strict=True):
        if not isinstance(one, Tensor) or one.shape != torch.Size(SHAPE):
            shown = f"a tensor {tuple(one.shape)}" if isinstance(one, Tensor) else repr(one)
            raise PluginError(
                f"{owner} gave {shown} for {name}; allowed a tensor like the parameter, {SHAPE}"
            )
    gradient = given[1].clone()
    gradient[0, 0] += 1.0
    u = update_once(rule, [given[0], gradient, *given[2:]])[0]
    differs = ~torch.isclose(u, found[0], rtol=0, atol=0, equal_nan=True)
    differs[0, 0] = False
    if rule.elementwise and differs.any():
        raise PluginError(
            f"{owner} lets one number of u depend on the gradient of others, and a parameter holds "
            "one role of all layers, padded; write make(self, groups) for a rule of whole matrices"
        )


def update_once(rule: type[Optimizer], given: Sequence[Tensor]) -> Any:
    """Return the update of a new rule; each call draws the same random numbers."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        return rule().update(given[0], given[1], *given[2:])
