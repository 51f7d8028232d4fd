"""Learning-rate schedules: pure functions of the step, so that a resumed run needs no state."""

from __future__ import annotations

from deepstack import config as conf


def learning_rate(train: conf.Train, step: int) -> float:
    """lr(t) = lr * min(1, t/w) * decay(t), t = 1..T steps, w warm-up steps.

    decay: constant 1; linear (T + 1 - t)/(T + 1 - w) after the warm-up, which would reach 0 one
    step after the last; inverse_sqrt sqrt(w/t) after the warm-up (Vaswani et al. 2017,
    arXiv:1706.03762, section 5.3, written for a peak of lr).
    """
    warmup = max(train.warmup_steps, 1)
    if step < warmup:
        return train.lr * step / warmup
    if train.schedule == "linear":
        return train.lr * (train.steps + 1 - step) / max(train.steps + 1 - warmup, 1)
    if train.schedule == "inverse_sqrt":
        return train.lr * (warmup / step) ** 0.5
    return train.lr
