"""Learning-rate schedules: pure functions of the step, so that a resumed run needs no state."""

from __future__ import annotations

import math

from deepstack import config as conf


def learning_rate(train: conf.Train, step: int) -> float:
    """lr(t) = lr * min(1, t/w) * decay(max(t - w, 0)), t = 1..T steps, w >= 1 warm-up steps.

    decay(s), s steps after the warm-up, of S = T + 1 - w, the last of which would come one step
    after the last of the run:

    | schedule     | decay(s)             | source                                                 |
    |--------------|----------------------|--------------------------------------------------------|
    | constant     | 1                    |                                                        |
    | linear       | 1 - s/S              |                                                        |
    | cosine       | (1 + cos(pi s/S))/2  | Loshchilov & Hutter 2017, arXiv:1608.03983, equation 5 |
    | inverse_sqrt | sqrt(P/(P + s))      | P = w, so sqrt(w/t): Vaswani et al. 2017, section 5.3, |
    |              |                      | arXiv:1706.03762; w = 1 and P = 4000: T-Fixup's code   |

    P is `train.decay_period`; no warm-up is one of a single step.
    """
    warmup = max(train.warmup_steps, 1)
    if step < warmup:
        return train.lr * step / warmup
    after, last = step - warmup, max(train.steps + 1 - warmup, 1)
    if train.schedule == "linear":
        return train.lr * (last - after) / last
    if train.schedule == "cosine":
        return train.lr * (1 + math.cos(math.pi * after / last)) / 2
    if train.schedule == "inverse_sqrt":
        period = train.decay_period or warmup
        return train.lr * (period / (period + after)) ** 0.5
    return train.lr


def depends_on_steps(train: conf.Train) -> bool:
    """Return whether the rate at a step depends on the number of steps of the run."""
    return train.schedule in ("linear", "cosine")
