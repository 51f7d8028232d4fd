"""The settings of a depth that a growing study adds, where rules of its file follow depth."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from deepstack.base import ConfigError, value_text
from deepstack.config import Combination, Override, Study, with_overrides
from deepstack.config import values as values_by_key
from deepstack.runs import DEPTH, LR, SEED

DIGITS = 3  # of an interpolated number


class Between(NamedTuple):
    """The study with a rule for an added depth.

    settings: the interpolated ones, dotted key -> value.
    refusal: the reason why the depth has no settings, and the rule to add; '' if it has some.
    """

    study: Study
    settings: dict[str, Any]
    refusal: str = ""


def with_depth(study: Study, values: Mapping[str, Any]) -> Between:
    """Return the study with a rule for a depth that its grid lacks.

    values: swept values of the new run.

    `sweep.overrides` with `where: {model.depth: …}` match no depth in between.  A setting whose
    values at the two neighbouring depths of the grid are equal keeps them.  Positive numbers are
    interpolated in the logarithms of setting and depth.  Other values refuse the depth.
    """
    depth = values.get(DEPTH)
    if depth is None or depth in study.grid.get(DEPTH, [depth]):
        return Between(study, {})
    at: dict[int, Combination] = {}
    for cell in study.combinations():
        if all(values.get(key) == cell.values[key] for key in cell.values if key not in FREE):
            at.setdefault(cell.values[DEPTH], cell)
    below = max((one for one in at if one < depth), default=None)
    above = min((one for one in at if one > depth), default=None)
    if below is None or above is None:
        return Between(study, {})
    base = values_by_key(study.base)
    share = math.log(depth / below) / math.log(above / below)
    kept: dict[str, Any] = {}
    made: dict[str, Any] = {}
    for key in sorted({*at[below].overridden, *at[above].overridden}):
        first: Any = (base | at[below].overridden).get(key)
        last: Any = (base | at[above].overridden).get(key)
        if first == last:
            kept[key] = first
        elif is_positive(first) and is_positive(last):
            made[key] = interpolated(first, last, share)
        else:
            ends = f"{value_text(first)} at N = {below} and {value_text(last)} at N = {above}"
            reason = f"sweep.overrides set {key} to {ends}, and no value lies between"
            return Between(study, {}, refusal(depth, key, reason))
    try:
        with_overrides(study.base, {**values, **kept, **made})
    except ConfigError as error:
        return Between(study, {}, refusal(depth, ", ".join(made), str(error)))
    where = {key: [value] for key, value in values.items() if key not in (LR, SEED)}
    return Between(replace(study, overrides=(*study.overrides, Override(where, kept | made))), made)


FREE = (DEPTH, LR, SEED)  # swept keys in which the neighbours of a new run may differ from it


def is_positive(value: Any) -> bool:
    """Return whether a value is a number above 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def interpolated(first: float, last: float, share: float) -> float:
    """Return the number at this share of the way from one to another, in logarithms."""
    value = float(f"{first * (last / first) ** share:.{DIGITS}g}")
    return round(value) if isinstance(first, int) and isinstance(last, int) else value


def refusal(depth: int, key: str, reason: str) -> str:
    """Return the sentence on a depth without settings, with the rule to add."""
    return (
        f"N = {depth} is not added: {reason}; add {depth} to "
        f"model.depth in sweep.grid, and {{where: {{model.depth: {depth}}}, set: {{{key}: …}}}} to "
        "sweep.overrides"
    )
