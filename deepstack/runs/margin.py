"""The margin of the best setting over its nearest rival: leader, paired difference, interval.

The leader is the setting with the least mean final loss at its best value, among those whose seeds
all have a finite loss there.  Where seeds are missing, it is the one that the fewest others beat
over the seeds that both have.  It is compared with each of the others over these seeds: mean and
95 % interval (Student's t) of the differences.  The rival is the setting whose interval reaches
furthest down, so that a margin above 0 holds for all others that have an interval too.  A setting
without one, below three shared seeds, is the rival if its mean difference is not above the rival's:
the first of these.  If it is above, the setting is not counted, and the sentence names it.  Of
equals the first one counts, in the order of tables.  Losses of other data, families or settings
of the task are not compared.

The best values are chosen by the losses that are compared.  Over simulated studies of normal losses
the interval holds the difference of the true means at the chosen values in 94 to 99 % for two
settings with one to five values and 3 to 12 seeds, and in 94 to 100 % for three and five
(docs/answer.md, "The interval of the best of several").
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from deepstack.runs.best import Best
from deepstack.runs.outcomes import Task, task_differences
from deepstack.runs.statistics import Mean, difference_of, mean_of

DIGITS = 9  # of a difference, or of the end of an interval, that count
Widen = Callable[[Best, Mean], Mean]


@dataclass(frozen=True)
class Margin:
    """The lead of the best setting over its nearest rival.

    gap: the rival's loss minus the leader's, seed by seed, in nats: mean and interval.
    others: number of settings that the best one was compared with.
    uncounted: settings without an interval that end further above the leader than the rival.
    """

    leader: Best
    rival: Best
    gap: Mean
    others: int
    uncounted: tuple[Best, ...] = ()

    @property
    def is_clear(self) -> bool:
        """Whether the interval excludes 0."""
        return math.isfinite(self.gap.low) and self.gap.low > 0


def margin_of(
    cells: Sequence[Best], widen: Widen | None = None, *, of_values: bool = False
) -> Margin | None:
    """Return the lead of the setting with the least mean loss.

    None if fewer than two have losses, or if their tasks differ.

    widen: leader and a difference -> the difference with a wider interval.
    of_values: whether each value of a setting counts as a setting: one value of the leader has to
        beat each value of the others, so that it does not matter that the losses choose it.
    """
    ends = [one for cell in cells for one in (cell.at_each_value() if of_values else [cell])]
    losses = {i: known for i, cell in enumerate(ends) if (known := cell.losses) is not None}
    order = ranked(losses)
    leader = ends[order[0]] if order else None
    others = [i for i in order if leader and not ends[i].same_cell(leader)]
    if leader is None or not others or task_differences(tasks_of(cells)):
        return None
    gaps = {i: difference(losses[i], losses[order[0]]) for i in others}
    if widen is not None:
        gaps = {i: widen(leader, gap) for i, gap in gaps.items()}
    unknown = [i for i, gap in gaps.items() if not math.isfinite(gap.low)]
    nearest = rival_among(gaps, unknown, of_values)
    uncounted = unknown if math.isfinite(gaps[nearest].low) else []
    if gaps[nearest].low > 0:  # then its best value is clearly worse too
        nearest = next(i for i in others if ends[i].same_cell(ends[nearest]))
    number = len({(ends[i].label, ends[i].depth) for i in others if i not in uncounted})
    left = tuple(ends[i] for i in uncounted)
    return Margin(leader, ends[nearest], gaps[nearest], number, left)


def tasks_of(cells: Iterable[Best]) -> list[Task]:
    """Return the task of each result at the best values."""
    return [one.task for cell in cells for one in cell.by_seed.values()]


def rival_among(gaps: Mapping[int, Mean], unknown: Sequence[int], all_count: bool) -> int:
    """Return the key of the gap that reaches lowest, or of the first unknown one that counts.

    unknown: keys of the gaps without an interval, which count up to the mean of the others' rival.
    all_count: whether each of them counts.
    """
    known = [i for i in gaps if i not in unknown]
    if not known or (unknown and all_count):
        return unknown[0]
    rival = min(known, key=lambda i: round(gaps[i].low, DIGITS))
    most = round(gaps[rival].value, DIGITS)
    return next((i for i in unknown if round(gaps[i].value, DIGITS) <= most), rival)


def ranked(losses: Mapping[int, dict[int, float]]) -> list[int]:
    """Return the keys in the order of mean losses; where seeds are missing, the least beaten first.

    losses: loss by seed.
    """
    order = sorted(losses, key=lambda i: fmean(losses[i].values()))
    if len({frozenset(by_seed) for by_seed in losses.values()}) > 1:
        beaten = {
            i: sum(
                round(difference(other, losses[i]).value, DIGITS) < 0 for other in losses.values()
            )
            for i in order
        }
        order.sort(key=beaten.__getitem__)
    return order


def difference(losses: dict[int, float], of_leader: dict[int, float]) -> Mean:
    """Return the mean loss minus the leader's over shared seeds; n is 0 if none is shared."""
    shared = sorted(set(losses) & set(of_leader))
    if shared:
        return difference_of([(losses[seed], of_leader[seed]) for seed in shared])
    value = fmean(losses.values()) - fmean(of_leader.values())
    return mean_of([])._replace(value=value)
