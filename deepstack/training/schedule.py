"""Learning rates and the steps of snapshots: functions of the step alone, without state."""

import math

from deepstack import config as conf
from deepstack.config.instruments import specs


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


LOG_STEPS = [0, 1, 2]
"""The steps 0, 1, 2, 3, 5, 8, 13, …, each about 1.6 times the one before."""
while LOG_STEPS[-1] < 10**12:
    LOG_STEPS.append(sum(LOG_STEPS[-2:]))


def is_due(every: int | str, step: int, last: int | None = None) -> bool:
    """Return whether a snapshot is due: at step 0, at every so many steps, and at the last one.

    every: 'log' for `LOG_STEPS`; 0 for none.
    """
    if isinstance(every, str):
        return step in LOG_STEPS or step == last
    return every > 0 and (step % every == 0 or step == last)


def row_is_due(config: conf.Config, log: str, step: int) -> bool:
    """Return whether a run writes a row of this log, or a record of `layers`, after a step."""
    train = config.train
    if log == "evals":
        return is_due(train.eval_every or train.steps, step, train.steps)
    if log == "layers":
        return is_due(config.log.layers_every, step, train.steps)
    if spec := specs().get(log):
        return step >= spec.first_step and is_due(spec.interval(config.log), step, train.steps)
    return True
