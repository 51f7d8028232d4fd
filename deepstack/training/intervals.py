"""The steps at which snapshots are due."""

from __future__ import annotations

from collections.abc import Iterator

from deepstack import config as conf


def log_steps(a: int = 1, b: int = 2, last: int = 10**12) -> Iterator[int]:
    """Yield 0, 1, 2, 3, 5, 8, 13, …: each about 1.6 times the one before."""
    yield 0
    while a <= last:
        yield a
        a, b = b, a + b


LOG_STEPS = frozenset(log_steps())


def is_due(every: int | str, step: int, last: int | None = None) -> bool:
    """Return whether a snapshot is due: at step 0, at every so many steps, and at the last one.

    every: 'log' for `log_steps`; 0 for none.
    """
    if isinstance(every, str):
        return step in LOG_STEPS or step == last
    return every > 0 and (step % every == 0 or step == last)


def row_is_due(config: conf.Config, log: str, step: int) -> bool:
    """Return whether a run writes a row of this log, or a record of `layers`, after a step."""
    train, records = config.train, config.log
    every: dict[str, int | str] = {
        "evals": train.eval_every or train.steps,
        "layers": records.layers_every,
        "attribution": records.attribution_every,
        "first_order": records.attribution_every,
        "sharpness": records.sharpness_every,
    }
    if log in ("attribution", "first_order") and step == 0:
        return False  # nothing has moved yet
    return is_due(every.get(log, 1), step, train.steps)
