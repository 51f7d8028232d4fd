"""`deepstack.calibrate_model`: rates by depth for the parameter groups of any PyTorch model."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deepstack.base import ConfigError
from deepstack.records import Run
from deepstack.tools.calibrate.exponents import DepthExponents
from deepstack.tools.probe import ExternalModel, Groups, Hidden, Probe, names_by_group

Loss = Callable[[int], Tensor]
"""The training loss of the model at step t = 1, 2, …, with its graph."""
Build = Callable[[int, int], tuple[nn.Module, Any, Loss]]
"""(depth, seed) -> a fresh model, its probe batch, and its training loss."""


@dataclass(frozen=True, kw_only=True)
class ModelCalibration(DepthExponents):
    """Exponents in depth of each parameter group's part of ‖ΔF‖, and factors without them."""

    groups: Groups

    def factors(self, depth: int, *, interpolate: bool = False) -> dict[str, float]:
        """Return the factor on each group's rate at a depth; 1 at the smallest measured depth.

        (depth / smallest)^(-exponent), or interpolated between the measured depths, for groups
        whose update is not a power of depth.
        """
        base = self.depths[0]
        if interpolate:
            return self.factors_between(depth, base)
        return {name: (depth / base) ** -power for name, power in self.exponents.items()}

    def param_groups(
        self, model: nn.Module, depth: int, lr: float, *, interpolate: bool = False
    ) -> list[dict[str, Any]]:
        """Return the parameter groups of an optimizer, each with its name and its rate.

        lr: the rate at the smallest measured depth.
        """
        return grouped(model, self.groups, lr, self.factors(depth, interpolate=interpolate))


def calibrate_model(
    build: Build,
    *,
    groups: Groups,
    depths: Sequence[int],
    lr: float,
    out: str | Path,
    seeds: int = 3,
    steps: Sequence[int] = (1, 10),
    optimizer: Callable[[Iterable[dict[str, Any]]], torch.optim.Optimizer] = torch.optim.Adam,
    hidden: Hidden = None,
    check: bool = True,
) -> ModelCalibration:
    """Measure how each parameter group moves F at each depth, and derive rates that keep it equal.

    As `deepstack.calibrate`, for a model that deepstack did not build.  It trains a few small
    steps at every depth, measured by `deepstack.probe`.

    build: (depth, seed) -> model, probe batch and training loss, a function of the step.  It sets
        random seeds itself.
    groups: name -> patterns of parameter names ("*.self_attn.*"); parameters without a match are
        the group `rest`.
    lr: a small constant rate; half of it is measured too.
    out: the folder of the runs is <out>_before and <out>_after.
    optimizer: called with parameter groups that have a rate.
    hidden: see `deepstack.probe`; without it the model's output must be as wide as its layers.
    check: also measure with the factors.

    Raises ConfigError for fewer than two depths, for logits in place of F, and if the folder holds
    runs.
    """
    chosen, at = (tuple(sorted(set(numbers))) for numbers in (depths, steps))
    if len(chosen) < 2:
        raise ConfigError(f"depths: found {list(depths)}; allowed two depths or more")
    if not at or at[0] < 1:
        raise ConfigError(f"steps: found {list(steps)}; allowed steps from 1 on")

    def run(suffix: str, depth: int, seed: int, rate: float, factors: Mapping[str, float]) -> Run:
        model, batch, loss = build(depth, seed)
        if hidden is None:
            refuse_logits(model, batch)
        trainer = optimizer(grouped(model, groups, rate, factors))
        with Probe(
            model,
            batch,
            trainer,
            out=Path(f"{out}_{suffix}") / f"d{depth}-s{seed}-lr{rate:.3g}",
            hidden=hidden,
            layers=(),
            groups=groups,
            layers_every=0,
            attribution_every=math.gcd(*at),
            seed=seed,
            config={"model.depth": depth, "train.lr": rate},
        ) as probe:
            for step in range(1, at[-1] + 1):
                trainer.zero_grad()
                value = loss(step)
                value.backward()
                trainer.step()
                probe.step(value)
        return probe.run

    cells = [(depth, seed) for depth in chosen for seed in range(seeds)]
    before = [run("before", *cell, rate, {}) for rate in (lr, lr / 2) for cell in cells]
    measured = ModelCalibration(groups=groups, depths=chosen, steps=at, before=before)
    if not check:
        return measured
    factors = {depth: measured.factors(depth) for depth in chosen}
    after = [run("after", depth, seed, lr, factors[depth]) for depth, seed in cells]
    return replace(measured, after=after)


def refuse_logits(model: nn.Module, batch: Any) -> None:
    """Raise ConfigError unless the model returns a hidden state, as wide as its layers' stream."""
    try:
        ExternalModel(model, batch, None, None)
    except ConfigError as error:
        if not str(error).startswith("layers:"):
            raise
        raise ConfigError(
            "hidden: without layers that pass on one stream, the model's output may be logits; "
            "name the module whose output is F, as in hidden='norm', or give "
            "hidden=lambda model, batch: model(batch)"
        ) from error


def grouped(
    model: nn.Module, groups: Groups, lr: float, factors: Mapping[str, float]
) -> list[dict[str, Any]]:
    """Return a parameter group of an optimizer for each group of names, with its rate."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return [
        {"name": group, "params": [trained[n] for n in names], "lr": lr * factors.get(group, 1.0)}
        for group, names in names_by_group(list(trained), groups).items()
    ]
