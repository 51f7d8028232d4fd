"""The theorem behind DeepNorm, as its proof has it: one small SGD step on the weight matrices.

‖ΔF‖ of DeepNorm does not depend on depth, Post-LN's grows faster than depth.
Wang et al. 2022, arXiv:2203.00555, Theorem 4.2 and section 4.3.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch

from deepstack.config import Config, with_overrides
from deepstack.diagnostics import ModelUpdate
from deepstack.model import build_model
from deepstack.speed import make_step
from deepstack.tasks import build_task
from deepstack.training import make_optimizer, mean_loss, to_device

DEPTHS = (6, 18, 50, 100, 200)
SEEDS = range(5)
# Small enough that half of it gives half of ‖ΔF‖ (tested below), large enough that what moves is
# far above the rounding of fp32; in between, an exponent does not depend on it.
LR = {"deepnorm": 1e-4, "post_ln": 1e-6}


@cache
def update_after_one_step(scheme: str, depth: int, seed: int, lr: float) -> float:
    changes = {
        "model.scheme": scheme,
        "model.depth": depth,
        "model.d_model": 32,
        "seed": seed,
        "task.seq_len": 16,
        "train.batch_size": 4,
        "train.optimizer": "sgd",
        "train.trainable": ["q", "k", "v", "o", "w1", "w2"],
    }
    config = with_overrides(Config(), changes)
    task, cpu = build_task("text", {}, seq_len=16, seed=seed), torch.device("cpu")
    built = build_model(config, vocab_size=task.vocab_size)
    step = make_step(
        lambda x, y: mean_loss(built.model(x), y),
        built.banks,
        built.trained,
        make_optimizer(config.train, built.trained),
        clip=None,
        max_loss=100.0,
        alive=torch.ones(()),
    )
    update = ModelUpdate(built.model, to_device(task.probe_batch(4), cpu)[0])
    step(*to_device(task.train_batch(1, 4), cpu), lr)
    return update.measure()["model_update"].item()


def exponent(scheme: str) -> float:
    """Slope of log mean ‖ΔF‖ over log depth."""
    means = [
        np.mean([update_after_one_step(scheme, depth, seed, LR[scheme]) for seed in SEEDS])
        for depth in DEPTHS
    ]
    return float(np.polyfit(np.log(DEPTHS), np.log(means), 1)[0])


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
