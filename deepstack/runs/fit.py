"""Fits powers of depth: least squares in logarithms, with a standard error."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from deepstack.base.text import signed_text
from deepstack.runs.intervals import LEAST_SEEDS

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd


class Fit(NamedTuple):
    """y = exp(intercept)·x^exponent, through n points.

    seeds: number of seeds fitted separately; exponent and standard error belong to their mean.

    1: one line through the means, its standard error from the residuals, NaN for fewer than three
    points.
    """

    exponent: float
    standard_error: float
    intercept: float
    n: int
    seeds: int = 1

    def __str__(self) -> str:
        """`0.52 ± 0.03`, `0.486 ± 0.003`; below three seeds `0.52 (2 seeds)`, `0.52 (4 points)`."""
        exponent = signed_text(self.exponent, 2)
        if not self.has_error:
            words = f"{self.seeds} seeds" if self.seeds > 1 else f"{self.n} points"
            return f"{exponent} ({words})"
        digits = 2 if self.standard_error >= 0.005 else 3
        return f"{signed_text(self.exponent, digits)} ± {self.standard_error:.{digits}f}"

    @property
    def has_error(self) -> bool:
        """Whether the standard error is one over three seeds or more."""
        return self.seeds >= LEAST_SEEDS and not math.isnan(self.standard_error)


def power_law(x: Sequence[float], y: Sequence[float]) -> Fit | None:
    """Fit log y on log x by least squares; the exponent's standard error from the residuals.

    None for fewer than two distinct x; no error for fewer than three points.
    """
    import numpy as np

    if len(set(x)) < 2:
        return None
    log_x, log_y = np.log(np.asarray(x, float)), np.log(np.asarray(y, float))
    (exponent, intercept), error = np.polyfit(log_x, log_y, 1), math.nan
    if len(log_x) > 2:
        error = math.sqrt(np.polyfit(log_x, log_y, 1, cov=True)[1][0, 0])
    return Fit(float(exponent), error, float(intercept), len(log_x))


def power_law_of_seeds(x: Sequence[float], values: Sequence[Mapping[int, float]]) -> Fit | None:
    """Return the mean of the seeds' power laws, with standard error deviation / sqrt(seeds).

    values: seed -> y at each x.  A seed has the same random numbers at every x (initialisation,
        order of batches), which residuals of a line through the means would not show.  A seed that
        lacks an x is left out.  With fewer than two complete seeds the line goes through the means.
    """
    import numpy as np

    if not values:
        return None
    common = set.intersection(*(set(at) for at in values))
    complete = sorted(seed for seed in common if all(at[seed] > 0 for at in values))
    if len(complete) < 2:
        return power_law(x, [float(np.mean(list(at.values()))) for at in values])
    fits = [power_law(x, [at[seed] for at in values]) for seed in complete]
    fitted = [fit for fit in fits if fit is not None]
    if not fitted:
        return None
    exponents = np.array([fit.exponent for fit in fitted])
    error = float(exponents.std(ddof=1)) / math.sqrt(len(fitted))
    intercept = float(np.mean([fit.intercept for fit in fitted]))
    return Fit(float(exponents.mean()), error, intercept, len(x), len(fitted))


def fit_points(points: pd.DataFrame) -> Fit | None:
    """Return the power law of rows of `points_of` that are neither saturated nor diverged."""
    used = points[(points["mark"] == "") & (points["y"] > 0)]
    return power_law_of_seeds(used["x"].tolist(), used["by_seed"].tolist())


def is_power(points: pd.DataFrame, fit: Fit | None) -> bool:
    """Return whether the means of a fit lie as close to its line as seeds lie to their means.

    Both are standard deviations of log y: of the means from the line, with n - 2 degrees of
    freedom, and of the seeds at one x, pooled.  A curve through few seeds' scatter passes; below
    three seeds or three points nothing is known, and every fit passes.
    """
    import numpy as np

    used = points[(points["mark"] == "") & (points["y"] > 0)]
    if fit is None or fit.seeds < LEAST_SEEDS or fit.n < 3:
        return True
    logs = [np.log([y for y in at.values() if y > 0]) for at in used["by_seed"]]
    spread = math.sqrt(float(np.mean([one.var(ddof=1) for one in logs])))
    means, x = np.array([one.mean() for one in logs]), np.log(used["x"].to_numpy(float))
    rest = means - np.polyval(np.polyfit(x, means, 1), x)
    return math.sqrt(float(rest @ rest) / (len(x) - 2)) <= spread


def exponent_title(fits: Sequence[Fit | None]) -> str:
    """Return the title of a legend of exponents, which explains their errors."""
    seeds = {fit.seeds for fit in fits if fit is not None and fit.has_error}
    errors = " or ".join(map(str, sorted(seeds, reverse=True)))
    return f"exponent of N, ± standard error over {errors} seeds" if errors else "exponent of N"


def vertex(curve: tuple[np.ndarray, np.ndarray]) -> tuple[float, float] | None:
    """Return the lowest point of the parabola through the point of least y and its neighbours.

    None if that point has no neighbour with a finite y on both sides.
    """
    import numpy as np

    x, y = curve
    i = int(y.argmin())
    if not 0 < i < len(y) - 1 or not np.isfinite(y[i - 1 : i + 2]).all():
        return None
    bend, tilt, least = np.polyfit(x[i - 1 : i + 2] - x[i], y[i - 1 : i + 2], 2)
    shift = -tilt / (2 * bend) if bend > 0 else 0.0
    at = float(np.clip(x[i] + shift, x[i - 1], x[i + 1]))
    return at, float(np.polyval([bend, tilt, least], at - x[i]))
