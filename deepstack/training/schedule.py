"""Learning rates and the steps of snapshots: functions of the step alone, without state."""

from itertools import takewhile

from deepstack import config as conf
from deepstack.config.instruments import specs
from deepstack.training.schedules import SCHEDULES, AfterWarmup, Schedule


def learning_rate(train: conf.Train, step: int) -> float:
    """lr(t) = lr * t/w in a warm-up of w steps, then the schedule's rate, t = 1..T steps.

    The rate of a schedule that ends is e lr + (1 - e) rate, e = `train.final_lr_factor`.  No
    warm-up is one of a single step.
    """
    warmup = max(train.warmup_steps, 1)
    if step < warmup:
        return train.lr * step / warmup
    last = max(train.steps + 1 - warmup, 1)
    rate = schedule_of(train)().rate(AfterWarmup(train.lr, step - warmup, last, train))
    end = train.final_lr_factor
    return end * train.lr + (1 - end) * rate if end else rate


def schedule_of(train: conf.Train) -> type[Schedule]:
    """Return the schedule of a run with its options."""
    return SCHEDULES.configured(train.schedule, train.schedule_options)


def depends_on_steps(train: conf.Train) -> bool:
    """Return whether the rate at a step depends on the number of steps of the run."""
    return schedule_of(train).ends


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


def count_due(every: int | str, last: int) -> int:
    """Return the number of steps from 0 to the last one at which a snapshot is due."""
    if isinstance(every, str):
        return len({*takewhile(lambda step: step <= last, LOG_STEPS), last})
    return 1 + -(-last // every) if every > 0 else 0


def keeps_weights(train: conf.Train, step: int) -> bool:
    """Return whether a run keeps its weights after a step; its checkpoint has those of the last.

    A run of no steps has no checkpoint.
    """
    chosen = train.keep_weights
    if 0 < train.steps <= step:
        return False
    return step in chosen if isinstance(chosen, tuple) else is_due(chosen, step)


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
