"""Values of runs: losses and reference levels, divergence, saturation, means over seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from deepstack.records import Run
from deepstack.runs import loss_text
from deepstack.runs.intervals import student
from deepstack.runs.loss_text import context_free_loss as context_free_loss
from deepstack.runs.settings import DATA, require, values_of

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

# Two unrelated states that end in a norm are about √2·‖F_0‖ apart; above this part of it a
# state is mostly lost, and an update can hardly grow further.
SATURATED = 0.3
SOME_DIVERGED = "some diverged"
ON_MASK = " on [MASK]"


def has_diverged(run: Run) -> bool:
    return run.state == "diverged"


def has_diverged_by(run: Run, step: int) -> bool:
    """Return whether a run had diverged by this step; its last row is the step of divergence."""
    return has_diverged(run) and int(run.steps["step"].iloc[-1]) <= step


def shared_step(
    steps: Mapping[Run, Collection[int]], at_step: int | None = None, where: str = ""
) -> tuple[int, list[Run]]:
    """Return `at_step`, by default the last step that all undiverged runs share, and its runs.

    steps: of the rows of each run.
    where: the end of the error's sentence.

    Raises NothingMatchedError if no step is shared, or no run has a row for `at_step`.
    """
    if at_step is None:
        finished = [run for run in steps if not has_diverged(run)] or list(steps)
        shared = set.intersection(*(set(steps[run]) for run in finished))
        at_step = int(max(require(shared, f"the runs share no step{where}")))
    used = [run for run in steps if at_step in steps[run]]
    return at_step, require(used, f"no run has a row for step {at_step}{where}")


def points_of(
    members: Mapping[float, Sequence[Run]],
    value: Callable[[Run], float | None],
    ceiling: Callable[[Run], float] = lambda _: math.inf,
    gone: Callable[[Run], bool] = has_diverged,
) -> pd.DataFrame:
    """Return a row (x, y, low, high, n, mark, by_seed) for the seeds at each x that are not `gone`.

    members: the runs at each x.  A point is marked if some seeds are gone, and saturated if it lies
        above `ceiling`.  If all are gone, it is marked diverged and shows the mean of the values
        that `value` returns for them.  A point without a finite value is left out.
    """
    import numpy as np
    import pandas as pd

    points = []
    for x, there in members.items():
        converged = [run for run in there if not gone(run)]
        every = {run: value(run) for run in converged or there}
        finite = {run: v for run, v in every.items() if v is not None and math.isfinite(v)}
        values = pd.Series(list(finite.values()), dtype=float)
        if values.empty:
            continue
        mean, deviation, mark = float(values.mean()), float(values.std()), ""
        if not converged:
            deviation, mark = math.nan, "diverged"
        elif len(converged) < len(there):
            mark = SOME_DIVERGED
        elif mean > float(np.mean([ceiling(run) for run in finite])):
            mark = "saturated"
        by_seed = {int(run.get("seed", 0)): v for run, v in finite.items()}
        points.append((x, mean, mean - deviation, mean + deviation, len(values), mark, by_seed))
    return pd.DataFrame(points, columns=["x", "y", "low", "high", "n", "mark", "by_seed"])


class Mean(NamedTuple):
    """The mean of n finite values: deviation, standard error and 95 % interval (Student's t).

    Of one value only the mean is known; the others are NaN.  There is no interval of two values.
    """

    value: float
    sd: float
    se: float
    low: float
    high: float
    n: int


def mean_of(values: Sequence[float | None]) -> Mean:
    """Return the mean of those values that are finite."""
    import pandas as pd

    finite = pd.Series([v for v in values if v is not None and math.isfinite(v)], dtype=float)
    mean, deviation, error = finite.agg(["mean", "std", "sem"]).tolist()
    half = student(len(finite)) * error
    return Mean(mean, deviation, error, mean - half, mean + half, len(finite))


def loss_of(values: Sequence[float | None]) -> Mean:
    """Return the mean of one setting's losses; without an interval if the seeds change nothing."""
    mean = mean_of(values)
    known = [value for value in values if value is not None and math.isfinite(value)]
    return mean._replace(low=math.nan, high=math.nan) if seeds_change_nothing([known]) else mean


def difference_of(pairs: Sequence[tuple[float | None, float | None]]) -> Mean:
    """Return the mean of first minus second over those pairs of seeds that have both.

    Without deviation and interval if the seeds change nothing.
    """
    known = [(a, b) for a, b in pairs if a is not None and b is not None and math.isfinite(a - b)]
    gap = mean_of([a - b for a, b in known])
    if seeds_change_nothing(zip(*known, strict=True)):
        return gap._replace(sd=math.nan, se=math.nan, low=math.nan, high=math.nan)
    return gap


def seeds_change_nothing(groups: Iterable[Collection[float]]) -> bool:
    """Return whether the values of each group, one for each seed, are all equal.

    Such seeds show no chance, with which a difference could be compared.
    """
    return all(len({*values}) == 1 for values in groups)


def finite_or_none(value: float) -> float | None:
    """Return a finite number, or None."""
    return float(value) if math.isfinite(value) else None


def seed_coefficient(wide: pd.DataFrame, degree: int = 1) -> Mean:
    """Fit a polynomial of log y in log x for each seed; return the mean of its first coefficients.

    wide: y, a row for each seed and a column for each x.  Seeds that lack a value are left out.

    n is 0 with too few columns for this degree, or if a value is not above 0.
    """
    import numpy as np

    complete = wide.dropna()
    if wide.shape[1] <= degree or (wide <= 0).any(axis=None):
        return mean_of([])
    log_x = np.log(complete.columns.to_numpy(float))
    logs = np.log(complete.to_numpy(float))
    return mean_of([float(np.polyfit(log_x, log, degree)[0]) for log in logs])


def last_row(table: pd.DataFrame, name: str) -> float | None:
    """Return the last finite value of a column, or None."""
    import numpy as np

    values = table[name].to_numpy(dtype=float) if name in table else np.empty(0)
    finite = values[np.isfinite(values)]
    return float(finite[-1]) if len(finite) else None


def first_row(table: pd.DataFrame, name: str) -> float | None:
    """Return the value of a column in the row of step 0, or None if it is not finite."""
    return last_row(table[table["step"] == 0], name)


def is_normalised(run: Run) -> bool:
    """Return whether F is the output of a norm, which fixes the scale of ‖F‖."""
    return bool(run.columns.get("scheme", {}).get("normalised", True))


def update_column(runs: Sequence[Run]) -> str:
    """Return the column that compares these runs: the relative one if any lacks a last norm."""
    return "model_update" if all(map(is_normalised, runs)) else "model_update_rel"


def unrelated_distance(run: Run, column: str) -> float:
    """Return the distance of two unrelated states; infinite if no norm fixes the scale of F."""
    if not is_normalised(run):
        return math.inf
    if column == "model_update_rel":
        return math.sqrt(2)
    return math.sqrt(2) * float(run.columns.get("f0_norm", math.inf))


def ceiling_of(run: Run, column: str) -> float:
    """Return the model update above which a run is saturated."""
    return SATURATED * unrelated_distance(run, column)


def value_at(run: Run, column: str, step: int) -> float | None:
    """Return the value at a step; for a run that diverged by then, its last finite value."""
    rows = run.steps if has_diverged_by(run, step) else run.steps[run.steps["step"] == step]
    return last_row(rows, column)


def layers_at(run: Run, diagnostic: str, step: int | None = None) -> tuple[int, np.ndarray] | None:
    """Return step and values (layers) of a snapshot, by default the last; None if there is none."""
    if diagnostic not in run.layer_names():
        return None
    steps, values = run.layers(diagnostic)
    chosen = [i for i, recorded in enumerate(steps) if step in (None, recorded)]
    return (int(steps[chosen[-1]]), values[chosen[-1]].astype(float)) if chosen else None


def has_mask_loss(runs: Sequence[Run]) -> bool:
    """Return whether all runs measured the validation loss where [MASK] is shown."""
    measured = [run for run in runs if len(run.evals)]
    return bool(measured) and all(
        last_row(run.evals, "loss_masked") is not None for run in measured
    )


def loss_column(runs: Sequence[Run]) -> str:
    """Return the column of the validation loss: on [MASK] only, if all runs have it."""
    return "loss_masked" if has_mask_loss(runs) else "loss"


def mask_note(runs: Sequence[Run]) -> str:
    """Return a note on the positions of the loss, if they are not all predicted positions."""
    if not has_mask_loss(runs) or not any(map(shows_tokens, runs)):
        return ""
    has_mask = all(_stated(run, "unigram_entropy") is not None for run in runs)
    return ON_MASK if has_mask else " of hidden answers"


def shows_tokens(run: Run) -> bool:
    """Return whether some predicted positions show a token: their loss is not that on [MASK]."""
    return loss_text.shows_tokens(*(last_row(run.evals, name) for name in ("loss", "loss_masked")))


def least_loss(run: Run) -> float | None:
    """Return the least possible validation loss of a run's task, if the task states it."""
    return last_row(run.evals, "optimal_loss")


def differ_in_least_loss(runs: Sequence[Run]) -> bool:
    """Return whether each run has a least possible loss and these losses differ over the seeds."""
    losses = [least_loss(run) for run in runs]
    return None not in losses and len(distinct_levels(losses)) > 1


def validation_levels(runs: Sequence[Run]) -> list[tuple[str, float]]:
    """Return the reference levels of the validation loss: name and value.

    Each is a mean over the runs of one task, as tables have it (see `context_free_loss`).
    """
    column = loss_column(runs)
    levels = mean_levels(runs, lambda run: context_free_loss(run, column))
    optima = mean_levels(runs, least_loss)
    return [("context_free", y) for y in levels] + [("optimal_loss", y) for y in optima]


def training_levels(runs: Sequence[Run]) -> list[tuple[str, float]]:
    """Return the level without context of a training loss over positions that show a token.

    Empty if the validation loss has the same positions: then its level holds for both.
    """
    if not mask_note(runs):
        return []
    levels = mean_levels(runs, lambda run: _stated(run, "context_free_entropy"))
    return [("training", y) for y in levels]


def final_value(run: Run, column: str) -> float:
    """Return the last finite validation loss.

    NaN if there is none, and for a diverged run that has only the one of its start.
    """
    rows = run.evals
    value = last_row(rows[rows["step"] > 0] if has_diverged(run) else rows, column)
    return math.nan if value is None else value


def training_flops(run: Run) -> float:
    """Return the FLOPs of all training steps that a run made; NaN where meta.json has none."""
    return run.step_flops * int(run.steps["step"].max()) if len(run.steps) else math.nan


def mean_levels(runs: Sequence[Run], value: Callable[[Run], float | None]) -> list[float]:
    """Return the mean value over the runs of each task and its data (see `distinct_levels`)."""
    tasks: dict[tuple[Any, ...], list[float | None]] = {}
    for run in runs:
        keys = sorted(key for key in run.flat_config if key.startswith("task."))
        tasks.setdefault((*keys, *values_of(run, [*keys, DATA])), []).append(value(run))
    return distinct_levels(mean_of(values).value for values in tasks.values())


def distinct_levels(values: Iterable[float | None], most: int = 3) -> list[float]:
    """Return the first finite values that differ by more than one percent, at most so many."""
    levels: list[float] = []
    for value in values:
        if value is not None and math.isfinite(value):
            if not any(math.isclose(value, level, rel_tol=0.01) for level in levels):
                levels.append(value)
    return levels[:most]


def _stated(run: Run, name: str) -> float | None:
    """Return a reference loss that the task of a run states, or None."""
    return loss_text.known(run.columns.get("references", {}).get(name))
