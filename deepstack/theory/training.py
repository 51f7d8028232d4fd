"""Claims about training, by short runs from the same random numbers."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from deepstack.theory.claim import Curves, Finding, Line, Part, at_least, at_most, claim
from deepstack.theory.claim_stack import started
from deepstack.theory.draws import F64, seeds
from deepstack.theory.sources import ADD_AND_NORM, LAYER_CAKE
from deepstack.theory.statistics import exponents

PLAIN = {"model.scheme": "skip_init", "model.scheme_options": {"start": 1.0}}  # x <- x + G(x)


def late(losses: list[float] | Tensor, steps: int = 10) -> float:
    """Return the mean of the last losses."""
    return float(torch.as_tensor(losses, dtype=F64)[-steps:].mean())


@claim("C45", LAYER_CAKE)
def fan_in_trains(seed: int) -> Finding:
    """Var W = 1/n_in trains better than Xavier's 2/(n_in + n_out).

    DeepNorm stacks that differ in W_1 and W_2 alone, from the same random numbers, at two rates.
    """
    repetitions, steps, blocks = seeds(seed, 8), 30, 2
    parts, lines = [], []
    for rate in (1e-3, 3e-3):
        keys = {"model.scheme": "deepnorm", "model.depth": 3, "train.lr": rate}
        runs = {
            fan: [started(s, {**keys, "model.init.fan": fan}).run(steps) for s in repetitions]
            for fan in ("in", "in_out")
        }
        less = torch.tensor(runs["in"], dtype=F64) - torch.tensor(runs["in_out"], dtype=F64)
        halves = less.view(len(less), blocks, -1).mean(dim=2)
        for at in range(blocks):
            first, last = at * steps // blocks + 1, (at + 1) * steps // blocks
            quantity = f"loss less Xavier's, lr {rate:g}, steps {first} to {last}"
            parts.append(at_most(quantity, 0.0, halves[:, at]))
        lines.append(Line.mean(f"lr {rate:g}", range(1, steps + 1), less, measured=False))
    note = (
        f"3 layers, d = 32, {len(repetitions)} seeds, task text, AdamW.  The larger W_1 and the "
        "smaller W_2 train faster; at the larger rate the difference fades soon.  Runs of this "
        "length do not show who ends lower."
    )
    return Finding(parts, note, Curves("step", "loss, 1/n_in less Xavier", lines))


@claim("C41", ADD_AND_NORM)
def larger_rates(seed: int) -> Finding:
    """Normalisation allows larger learning rates and converges faster.

    Post-LN and Pre-LN beside the same stack without norms, x ← x + G(x), over a grid of rates of
    Adam.  A rate trains if the last losses are below that of an even guess.  Beside it T-Fixup,
    which has no norms either, and a start that makes up for them.
    """
    repetitions, steps, rates = seeds(seed, 6), 24, (1e-3, 3e-3, 1e-2, 1e-1)
    schemes: dict[str, dict[str, Any]] = {
        "Post-LN": {"model.scheme": "post_ln"},
        "Pre-LN": {"model.scheme": "pre_ln"},
        "no norms": PLAIN,
        "T-Fixup": {"model.scheme": "t_fixup"},
    }

    def ends(scheme: dict[str, Any], rate: float) -> Tensor:
        """Return the last losses and whether they are below an even guess's, (seeds, 2)."""
        keys = {**scheme, "model.depth": 3, "train.lr": rate, "train.optimizer": "adam"}
        stacks = [started(s, keys) for s in repetitions]
        even = math.log(stacks[0].task.vocab_size)
        ends = [late(stack.run(steps)) for stack in stacks]
        return torch.tensor([[loss, loss < even] for loss in ends], dtype=F64)

    drawn = {
        label: torch.stack([ends(keys, rate) for rate in rates], dim=1)
        for label, keys in schemes.items()
    }
    best_step = {
        label: (ends[:, :, 1] * torch.tensor(rates, dtype=F64)).amax(dim=1)
        for label, ends in drawn.items()
    }
    parts = []
    for label in ("Post-LN", "Pre-LN"):
        ratio = best_step[label] / best_step["no norms"]
        parts.append(at_least(f"{label}: largest rate that trains, over that without norms", 2.0,
                              ratio))  # fmt: skip
        for at, rate in enumerate(rates[:2]):
            less = drawn[label][:, at, 0] - drawn["no norms"][:, at, 0]
            parts.append(at_most(f"{label}: loss less that without norms, lr {rate:g}", 0.0, less))
    parts.append(
        at_least("Pre-LN: largest rate that trains, over T-Fixup's", 2.0,
                 best_step["Pre-LN"] / best_step["T-Fixup"], stated=False)
    )  # fmt: skip
    lines = [Line.mean(label, rates, ends[:, :, 0]) for label, ends in drawn.items()]
    note = (
        f"3 layers, d = 32, task text, {len(repetitions)} seeds, {steps} steps; the loss is the "
        "mean of the last ten.  Without norms 0.1 diverges, and so it does under T-Fixup, "
        "whose start makes up for the norms."
    )
    return Finding(
        parts, note, Curves("learning rate", "loss after 24 steps", lines, log_x=True, log_y=True)
    )


@claim("C40", LAYER_CAKE)
def power_of_alpha(seed: int) -> Finding:
    """‖Δθ‖ = O(η‖θ‖/α): too small an α and θ leaves its start, too large a one and convergence is
    slow; α = (2N)^¼ balances.

    α = (2N)^p, β = α/√(4N) for p = 0, ¼, ½.  Gradient descent on the matrices that β starts, and
    beside it at a larger rate.  'Balances' is read as a lower loss than at either end.
    """
    repetitions, steps, depth, powers = seeds(seed, 12), 20, 8, (0.0, 0.25, 0.5)
    alphas = [(2 * depth) ** power for power in powers]

    def sample(draw_seed: int, rate: float, power: float) -> list[float]:
        """Return ‖Δθ‖/‖θ_0‖ at the end and the mean loss of the last ten steps."""
        roles = ["v", "o", "w1", "w2"]
        stack = started(draw_seed, {
            "model.scheme": "deepnorm_power", "model.scheme_options": {"power": power},
            "model.depth": depth, "task.name": "markov", "train.batch_size": 4, "train.lr": rate,
            "train.optimizer": "sgd", "train.clip": None, "train.trainable": roles,
        })  # fmt: skip
        start = torch.cat([stack.matrices()[role].flatten().clone() for role in roles])
        loss = late(stack.run(steps))
        end = torch.cat([stack.matrices()[role].flatten() for role in roles])
        return [((end - start).norm() / start.norm()).item(), loss]

    def sizes(rate: float) -> tuple[Tensor, Tensor]:
        """Return ‖Δθ‖/‖θ_0‖ and the loss, (seeds, powers)."""
        rows = [[sample(s, rate, power) for power in powers] for s in repetitions]
        moved, loss = torch.tensor(rows, dtype=F64).unbind(dim=-1)
        return moved, loss

    (moved, loss), (far, other) = sizes(0.1), sizes(1.0)
    parts = [
        Part.mean("exponent of ‖Δθ‖/‖θ_0‖ in α, lr 0.1", -1.0, exponents(alphas, moved),
                  tolerance=0.1),
        at_least("p = ½: loss less that at ¼, lr 0.1", 0.0, loss[:, 2] - loss[:, 1]),
        at_least("p = 0: loss less that at ¼, lr 0.1", 0.0, loss[:, 0] - loss[:, 1]),
        at_least("p = 0: loss less that at ¼, lr 1", 0.0, other[:, 0] - other[:, 1], stated=False),
        at_most("p = ½: loss less that at ¼, lr 1", 0.0, other[:, 2] - other[:, 1], stated=False),
    ]  # fmt: skip
    lines = [Line.mean("lr 0.1", alphas, moved), Line.mean("lr 1", alphas, far)]
    note = (
        f"{depth} layers, d = 32, {len(repetitions)} seeds, {steps} steps of SGD, task markov.  θ "
        "leaves its start as 1/α and a large α is slow.  But ¼ does not balance: which power ends "
        "lowest depends on the rate, p = 0 at 0.1 and not at 1.  A thousand layers may "
        "need other powers."
    )
    return Finding(parts, note, Curves("α", "‖Δθ‖/‖θ_0‖", lines, log_x=True, log_y=True))


@claim("C44", ADD_AND_NORM)
def warm_up(seed: int) -> Finding:
    """Pre-LN needs no warm-up, converges faster and ends worse than Post-LN where both train.

    Adam in stacks of 12 layers with and without a warm-up.  Stacks of 3 layers, which both train,
    run down to a rate of 0.  'Worse' is read as a loss higher by 0.03 nats, one in a hundred.
    """
    repetitions, steps, end = seeds(seed, 8), 24, 100
    labels = {"post_ln": "Post-LN", "pre_ln": "Pre-LN"}

    def run(draw_seed: int, scheme: str, depth: int, **train: Any) -> list[float]:
        keys = {"model.scheme": scheme, "model.depth": depth, "train.optimizer": "adam"}
        more = {f"train.{key}": value for key, value in train.items()}
        stack = started(draw_seed, {**keys, "train.lr": 3e-3, **more})
        return stack.run(train.get("steps", steps))

    def last(scheme: str, warmup: int) -> Tensor:
        shared = {"warmup_steps": warmup, "batch_size": 4}
        return torch.tensor([late(run(s, scheme, 12, **shared)) for s in repetitions], dtype=F64)

    without, with_it = ({s: last(s, warmup) for s in labels} for warmup in (0, 8))
    long = {
        scheme: torch.tensor(
            [run(s, scheme, 3, steps=end, schedule="linear") for s in seeds(seed, 10)], dtype=F64
        )
        for scheme in labels
    }
    less = long["pre_ln"] - long["post_ln"]
    gains = {scheme: without[scheme] - with_it[scheme] for scheme in labels}
    parts = [
        at_most("Pre-LN, 12 layers: loss without a warm-up less with one", 0.0, gains["pre_ln"]),
        at_least("Post-LN, 12 layers: the same", 0.0, gains["post_ln"]),
        at_most("3 layers: loss of Pre-LN less Post-LN's, steps 11 to 30", 0.0,
                less[:, 10:30].mean(dim=1)),
        at_least("the same, the last 20 steps", 0.03, less[:, -20:].mean(dim=1)),
    ]  # fmt: skip
    note = (
        f"d = 32, lr 0.003, task text; {len(repetitions)} seeds of {steps} steps, of which 8 are a "
        f"warm-up, at depth 12, and {len(less)} of {end} steps at depth 3.  Post-LN needs none "
        "either here, at twelve layers: its trouble begins deeper (C35, experiments/who_diverges). "
        "Nor does Pre-LN end worse, but these runs are short."
    )
    return Finding(parts, note)
