"""The theorem behind DeepNorm, as its proof has it: one small SGD step on the weight matrices.

‖ΔF‖ of DeepNorm does not depend on depth, Post-LN's grows faster than depth.
Wang et al. 2022, arXiv:2203.00555, Theorem 4.2 and section 4.3.  Under Adam, and with all
parameters trained, it does depend on depth, unless learning rates fall as `deepnorm_rates` has it.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from helpers.sampling import some

from deepstack.diagnostics import ModelUpdate
from deepstack_lab.ledger.claim_stack import Trial

DEPTHS = (6, 18, 50, 100, 200)
# Small enough that half of it gives half of ‖ΔF‖ (tested below), large enough that what moves is
# far above the rounding of fp32; in between, an exponent does not depend on it.
LR = {"deepnorm": 1e-4, "post_ln": 1e-6}
MATRICES = ("q", "k", "v", "o", "w1", "w2")
ADAM = {"optimizer": "adam", "lr": 1e-5, "trainable": "all"}


@cache
def update_after_one_step(scheme: str, depth: int, seed: int, **more: Any) -> float:
    sgd = {"optimizer": "sgd", "lr": LR.get(scheme), "trainable": list(MATRICES)}
    trial = Trial(seed, scheme=scheme, depth=depth, clip=None, **sgd | more)
    update = ModelUpdate(trial.model, trial.probe)
    trial.run(1)
    return update.measure()["model_update"].item()


def exponent(scheme: str, depths: Sequence[int] = DEPTHS, seeds: int = 5, **more: Any) -> float:
    """Slope of log mean ‖ΔF‖ over log depth."""
    means = [
        np.mean([update_after_one_step(scheme, N, seed, **more) for seed in range(seeds)])
        for N in depths
    ]
    return float(np.polyfit(np.log(depths), np.log(means), 1)[0])


@pytest.mark.parametrize("scheme", LR)
@pytest.mark.parametrize("depth", some([DEPTHS[-1], DEPTHS[0]], 2))
def test_the_step_is_small_enough_to_be_linear(scheme: str, depth: int) -> None:
    whole = update_after_one_step(scheme, depth, 0)
    half = update_after_one_step(scheme, depth, 0, lr=LR[scheme] / 2)
    assert whole / half == pytest.approx(2.0, rel=0.05)


@pytest.mark.slow
def test_deepnorms_update_does_not_depend_on_depth_and_post_lns_grows_faster() -> None:
    assert abs(exponent("deepnorm")) < 0.15
    assert exponent("post_ln") > 1.0


def test_rates_by_depth_make_one_step_of_adam_the_same_at_every_depth() -> None:
    assert exponent("deepnorm", (6, 24, 96), 2, **ADAM) > 0.6
    assert abs(exponent("deepnorm_rates", (6, 24, 96), 2, **ADAM)) < 0.1
    of_6 = [update_after_one_step(name, 6, 0, **ADAM) for name in ("deepnorm", "deepnorm_rates")]
    assert of_6[0] == of_6[1]  # at the base depth nothing is changed
