"""Ends a study whose seeds, or whose change, do nothing to the metric: no seed can decide it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from deepstack.base import DeepstackError, counted
from deepstack.runs import LEAST_SEEDS, seeds_change_nothing
from deepstack.tools.own_trainer.command_file import BASELINE, CANDIDATE

if TYPE_CHECKING:
    from deepstack.runs import Result

UNDECIDED = 11
"""Exit code of `deepstack sweep --until decided` where no difference is shown."""


class NoSpreadError(DeepstackError):
    """The runs of a study cannot show a difference, however many seeds it gets."""

    exit_code = UNDECIDED


def no_spread(results: Sequence[Result]) -> str:
    """Return why these results say nothing about chance; empty if they may.

    Either each command ends with one value for all seeds, or baseline and candidate end with the
    same value for each seed.
    """
    groups: dict[tuple[str, int, float | None], dict[int, float]] = {}
    for one in results:
        rate = None if math.isnan(one.rate) else one.rate
        if not math.isfinite(one.final_loss):
            return ""
        groups.setdefault((one.setting, one.depth, rate), {})[one.seed] = one.final_loss
    least = min(map(len, groups.values()), default=0)
    if least >= LEAST_SEEDS and seeds_change_nothing(one.values() for one in groups.values()):
        return (
            "each command prints one value for all seeds, so nothing tells the change from chance; "
            "let the script use {seed}, and print the metric with more digits"
        )
    both = {
        name: {key[1:]: values for key, values in groups.items() if key[0] == name}
        for name in (BASELINE, CANDIDATE)
    }
    if least >= LEAST_SEEDS and both[BASELINE] and both[BASELINE] == both[CANDIDATE]:
        seeds = counted("{} seeds", least)
        return (
            f"candidate prints the same values as baseline for {seeds}: the change does nothing "
            "to the metric; see that the script uses it"
        )
    return ""
