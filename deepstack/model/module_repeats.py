"""Whether a model that deepstack did not build is a function of its weights and its batch alone."""

import random
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from deepstack.base.errors import ConfigError
from deepstack.model.module_calls import fully_sharded, plain_name, undisturbed
from deepstack.model.module_state import ParameterWrites

ROUNDING = 1e-2
"""Largest difference over max |F| that kernels without a fixed order of additions may make."""


def set_seeds(number: int) -> None:
    """Seed the generators of torch, of Python and of NumPy."""
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def written_parameters(
    model: nn.Module, run: Callable[[], Any], *values: Any
) -> list[nn.Parameter]:
    """Return the parameters that a forward pass in evaluation mode writes into, as it is restored.

    run: the pass.
    values: that it reads, such as the batch.
    """
    if fully_sharded(model):  # gathered parameters are forgotten after a pass
        return []
    writes = ParameterWrites(model.parameters())
    try:
        with undisturbed(model, *values), writes:
            run()
    finally:
        writes.restore()
    return list(writes.kept)


def refuse_noise(model: nn.Module, run: Callable[[], Tensor]) -> None:
    """Raise ConfigError unless a pass gives the same tensor under two random seeds.

    run: the pass, with the state of the model restored after it.
    """

    def seeded(seed: int) -> Tensor:
        with undisturbed(model):
            set_seeds(seed)
            return run()

    one, two = seeded(0), seeded(1)
    by_seed = difference(one, two)
    is_sharded = bool(fully_sharded(model))  # all processes must make as many passes
    if by_seed == 0 and not is_sharded:
        return
    repeated = difference(seeded(1), two)
    if 10 * repeated < by_seed:
        name = type(model).__name__ if is_sharded else drawing_module(model, seeded)
        raise ConfigError(
            f"model: {name} draws random numbers in evaluation mode, so "
            "that two passes differ; draw them `if self.training`, as in "
            "dropout_p=p if self.training else 0.0"
        )
    if repeated > ROUNDING:
        raise ConfigError(
            "model: two passes in evaluation mode differ, although its modules hold the same: it "
            "reads a state outside of them, or a random generator; allowed a function of weights "
            "and batch"
        )


def difference(one: Tensor, two: Tensor) -> float:
    """Return max |one − two| / max |two| of real tensors; inf if their shapes or NaNs differ."""
    if one.shape != two.shape or not torch.equal(one.isfinite(), two.isfinite()):
        return float("inf")
    known = one.isfinite()
    apart, sizes = (one - two)[known].abs(), two[known].abs()
    return 0.0 if not apart.any() else float(apart.max() / sizes.max())


class Visit(NamedTuple):
    """One call of a module: its name, and sums of all numbers that it takes and returns."""

    module: str
    inputs: list[str]
    outputs: list[str]


def drawing_module(model: nn.Module, run: Callable[[int], Any]) -> str:
    """Return name and class of the innermost module that makes two outputs of one input.

    run: the pass under a random seed.
    """
    pairs = zip(*(visits_of(model, partial(run, seed)) for seed in (0, 1)), strict=False)
    for one, two in pairs:
        if one[:2] == two[:2] and one.outputs != two.outputs:
            return one.module
    return type(model).__name__


def visits_of(model: nn.Module, run: Callable[[], Any]) -> list[Visit]:
    """Return the calls of all modules in a pass, in the order in which they return."""
    visits: list[Visit] = []
    entered: dict[nn.Module, list[str]] = {}

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        entered[module] = sums_of((args, kwargs))

    def leave(name: str, module: nn.Module, args: Any, output: Any) -> None:
        text = f"{plain_name(name)} ({type(module).__name__})" if name else type(module).__name__
        visits.append(Visit(text, entered.get(module, []), sums_of(output)))

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            hooks.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(partial(leave, name)).remove)
        run()
    return visits


def sums_of(values: Any) -> list[str]:
    """Return the sum and the sum of moduli of each tensor among nested values, as text."""
    sums = []
    for x in tree_leaves(values):
        if isinstance(x, Tensor) and x.layout is torch.strided and not x.is_nested:
            numbers = (torch.view_as_real(x) if x.is_complex() else x).detach().double()
            sums.append(f"{numbers.sum().item()} {numbers.abs().sum().item()}")
    return sums
