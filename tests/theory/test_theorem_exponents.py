"""The theorem behind DeepNorm, as its proof has it: one small SGD step on the weight matrices.

‖ΔF‖ of DeepNorm does not depend on depth, Post-LN's grows faster than depth.
Wang et al. 2022, arXiv:2203.00555, Theorem 4.2 and section 4.3.  Under Adam, and with all
parameters trained, it does depend on depth, unless learning rates fall as `deepnorm_rates` has it.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import numpy as np
import pytest

from deepstack.diagnostics import ModelUpdate
from deepstack.theory.claim_stack import Trial

DEPTHS = (6, 18, 50, 100, 200)
# Small enough that half of it gives half of ‖ΔF‖ (tested below), large enough that what moves is
# far above the rounding of fp32; in between, an exponent does not depend on it.
LR = {"deepnorm": 1e-4, "post_ln": 1e-6}
MATRICES = ("q", "k", "v", "o", "w1", "w2")


@cache
def update_after_one_step(
    scheme: str,
    depth: int,
    seed: int,
    lr: float,
    optimizer: str = "sgd",
    trained: str | tuple[str, ...] = MATRICES,
) -> float:
    roles = trained if trained == "all" else list(trained)
    trial = Trial(
        seed, scheme=scheme, depth=depth, optimizer=optimizer, lr=lr, clip=None, trainable=roles
    )
    update = ModelUpdate(trial.model, trial.probe)
    trial.run(1)
    return update.measure()["model_update"].item()


def exponent(scheme: str, depths: tuple[int, ...] = DEPTHS, seeds: int = 5, **more: Any) -> float:
    """Slope of log mean ‖ΔF‖ over log depth."""
    step = partial(update_after_one_step, scheme, lr=more.pop("lr", LR.get(scheme)), **more)
    means = [np.mean([step(depth=N, seed=seed) for seed in range(seeds)]) for N in depths]
    return float(np.polyfit(np.log(depths), np.log(means), 1)[0])


@pytest.mark.parametrize("scheme", ["deepnorm", "post_ln"])
@pytest.mark.parametrize("depth", [6, 200])
def test_the_step_is_small_enough_to_be_linear(scheme: str, depth: int) -> None:
    whole = update_after_one_step(scheme, depth, 0, LR[scheme])
    half = update_after_one_step(scheme, depth, 0, LR[scheme] / 2)
    assert whole / half == pytest.approx(2.0, rel=0.05)


def test_deepnorms_update_does_not_depend_on_depth() -> None:
    assert abs(exponent("deepnorm")) < 0.15


def test_post_lns_update_grows_faster_than_depth() -> None:
    assert exponent("post_ln") > 1.0


ADAM: dict[str, Any] = {"optimizer": "adam", "lr": 1e-5, "depths": (6, 24, 96), "seeds": 2}


def test_rates_by_depth_make_one_step_of_adam_the_same_at_every_depth() -> None:
    assert exponent("deepnorm", trained="all", **ADAM) > 0.6
    assert abs(exponent("deepnorm_rates", trained="all", **ADAM)) < 0.1
    alike = [update_after_one_step(name, 6, 0, 1e-5, "adam", "all") for name in
             ("deepnorm", "deepnorm_rates")]  # fmt: skip
    assert alike[0] == alike[1]  # at the base depth nothing is changed
