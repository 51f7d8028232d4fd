"""Claims about generalisation: norms and penalties on few texts, and fine-tuning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deepstack.config import with_overrides
from deepstack.tasks import task_of
from deepstack.theory.add_and_norm import layer_by_layer
from deepstack.theory.claim import Finding, at_least, at_most, beside, claim
from deepstack.theory.claim_stack import CPU, POST_LN, Trial, started
from deepstack.theory.draws import F64, seeds
from deepstack.theory.sources import ADD_AND_NORM, READING_NOTES
from deepstack.theory.statistics import exponents, gather
from deepstack.theory.training import PLAIN, late
from deepstack.training import to_device

TASKS = ("text", "markov")


class SmallText(Trial):
    """A trial that trains on two batches again and again."""

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return the batch of step 1 or 2, in turn."""
        return super().batch(1 + (step - 1) % 2)


@torch.no_grad()
def losses(stack: Trial) -> tuple[float, float]:
    """Return the mean losses of two batches of training and of validation."""
    held_out = [to_device(stack.task.validation_batch(i, 32), CPU) for i in range(2)]
    stack.model.eval()
    seen, unseen = (
        sum(stack.loss(*batch).item() for batch in batches) / 2
        for batches in ([stack.batch(1), stack.batch(2)], held_out)
    )
    stack.model.train()
    return seen, unseen


def small_text(seed: int, task: str, keys: Mapping[str, Any], steps: int) -> tuple[float, float]:
    """Return losses of training and validation after these steps on two batches."""
    changes = {**POST_LN, "model.depth": 2, "train.lr": 3e-3, "train.optimizer": "adam"}
    stack = SmallText(seed, {**changes, "task.name": task, **keys})
    stack.run(steps)
    return losses(stack)


@claim("C42", ADD_AND_NORM)
def against_overfitting(seed: int) -> Finding:
    """Normalisation resists overfitting: a smaller validation loss less training loss.

    Two batches, again and again, until every stack knows them: LN and BN beside the same stack
    without norms, x ← x + G(x), and T-Fixup, which has none either.
    """
    repetitions, steps = seeds(seed, 8), 30
    stacks: dict[str, dict[str, Any]] = {
        "Post-LN": {"model.scheme": "post_ln"},
        "Pre-LN": {"model.scheme": "pre_ln"},
        "Post-BN": {"model.scheme": "post_ln", "model.norm.kind": "batch"},
        "no norms": PLAIN,
        "T-Fixup": {"model.scheme": "t_fixup"},
    }
    parts = []
    for task in TASKS:
        drawn = {
            label: torch.tensor([small_text(s, task, keys, steps) for s in repetitions], dtype=F64)
            for label, keys in stacks.items()
        }
        gaps = {label: pairs[:, 1] - pairs[:, 0] for label, pairs in drawn.items()}
        for label in ("Post-LN", "Pre-LN", "Post-BN"):
            over = gaps[label] / gaps["no norms"]
            parts.append(at_most(f"{task}: gap of {label} over that without norms", 1.0, over))
        over = gaps["Pre-LN"] / gaps["T-Fixup"]
        parts.append(at_most(f"{task}: gap of Pre-LN over T-Fixup's", 1.0, over))
        over = gaps["Post-BN"] / gaps["Post-LN"]
        parts.append(at_least(f"{task}: gap of BN over LN's", 1.0, over, stated=False))
        known = drawn["Pre-LN"][:, 0]
        parts.append(at_most(f"{task}: training loss of Pre-LN", 0.5, known, stated=False))
    note = (
        f"2 layers, d = 32, {len(repetitions)} seeds, {steps} steps of Adam at 0.003 on two "
        "batches of 8 sequences.  Without norms the last hidden state grows, and with it the "
        "certainty of wrong predictions.  BN, which trains on statistics of a batch, overfits more "
        "than LN here."
    )
    return Finding(parts, note)


@claim("C46", READING_NOTES)
def penalties(seed: int) -> Finding:
    """L2 and spectral-norm penalties generalise better: a lower validation loss.

    Pre-LN stacks on two batches, again and again, with and without λ‖W‖_F² (Adam) and
    λ/2 Σ‖W‖₂² in the loss.
    """
    repetitions, steps = seeds(seed, 8), 32
    kinds: dict[str, dict[str, Any]] = {
        "none": {},
        "L2, λ = 0.1": {"train.weight_decay": 0.1},
        "spectral, λ = 1": {"train.spectral_penalty": 1.0},
    }
    parts = []
    for task in TASKS:
        drawn = {
            label: torch.tensor(
                [small_text(s, task, {"model.scheme": "pre_ln", **keys}, steps)
                 for s in repetitions], dtype=F64)
            for label, keys in kinds.items()
        }  # fmt: skip
        for label in list(kinds)[1:]:
            less = drawn[label] - drawn["none"]
            parts.append(at_most(f"{task}: validation loss less that without, {label}", 0.0,
                                 less[:, 1]))  # fmt: skip
            parts.append(at_least(f"{task}: the same, training loss", 0.0, less[:, 0],
                                  stated=False))  # fmt: skip
    note = (
        f"2 layers, d = 32, {len(repetitions)} seeds, {steps} steps of Adam at 0.003 on two "
        "batches of 8 sequences, which both penalties keep from being learnt by heart.  It shows "
        "less overfitting; whether they help where texts are many, it does not."
    )
    return Finding(parts, note)


@claim("C47", READING_NOTES)
def fine_tuning(seed: int) -> Finding:
    """Post-LN fine-tunes better than Pre-LN; BN biases residual blocks to the identity.

    Stacks trained on one Markov chain, then on another; 'better' is read as a loss lower by 0.03
    nats, one in a hundred.  BN: the share ‖x_{l+1} − x_l‖/‖x_{l+1}‖ of
    layer l at the start falls with l under x ← x + G(BN(x)), and does not under x ← x + G(x).
    """
    repetitions, depth = seeds(seed, 10), 3
    tuned = {
        scheme: torch.tensor([tune(s, scheme, depth) for s in repetitions], dtype=F64)
        for scheme in ("post_ln", "pre_ln")
    }
    less = tuned["post_ln"] - tuned["pre_ln"]
    parts = [
        at_most("second chain: loss of Post-LN less Pre-LN's, last 10 steps", -0.03, less[:, 1]),
        beside("first chain: the same", 0.0, less[:, 0], tolerance=0.1),
    ]
    layers, first, quantity = 32, 8, "exponent of layer l's share in l"
    at = [float(layer) for layer in range(first + 1, layers + 1)]

    def falls(keys: Mapping[str, Any]) -> Tensor:
        drawn = gather(layer_by_layer(s, keys, layers) for s in repetitions)
        return exponents(at, drawn["contribution"][:, first:])

    batch = falls({"model.scheme": "pre_ln", "model.norm.kind": "batch"})
    parts.append(at_most(f"BN: {quantity}", 0.0, batch))
    parts.append(beside(f"no norms: {quantity}", 0.0, falls(PLAIN), tolerance=0.1))
    note = (
        f"{depth} layers, d = 32, {len(repetitions)} seeds, 60 steps of Adam at 0.003 on the first "
        "chain and 30 on the second; the share in stacks of 32 layers, d = 64, exponents over the "
        "upper three quarters.  Post-LN ends level with Pre-LN on the second chain.  "
        "experiments/fine_tuning has 12 layers and longer runs."
    )
    return Finding(parts, note)


def tune(seed: int, scheme: str, depth: int) -> list[float]:
    """Return the last losses on the first chain and on the second."""
    keys = {"model.scheme": scheme, "model.depth": depth, "task.name": "markov", "train.lr": 3e-3}
    stack = started(seed, {**keys, "train.optimizer": "adam"})
    before = late(stack.run(60))
    stack.task = task_of(with_overrides(stack.config, {"seed": seed + 500}))
    return [before, late(stack.run(30))]
