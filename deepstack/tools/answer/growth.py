"""The further runs of a study that grows until its question is decided."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from deepstack.base import counted
from deepstack.runs import HIGHEST, LOWEST, Best
from deepstack.tools.answer.found import Found, More
from deepstack.tools.answer.looks import Looks
from deepstack.tools.answer.margins import Gap, far_seed_sentence
from deepstack.tools.answer.power import seeds_needed

WIDEST = 2  # ratio of two depths between which no further one is added
MOST_RATES = 16  # of one setting and depth, beyond which none is added at an edge
HOPELESS = 0.1  # probability below which the last look is not waited for
FEWEST = 8  # seeds before a difference can be called too small to show
OF_COUNTS = 0.2  # share of the error of who learns where; the comparison has the rest
TO_LOOK = "would reach the next look"


def grown(found: Found, cells: Sequence[Best], gap: Gap | None, looks: Looks) -> Found:
    """Return a statement on settings with the open questions of a growing study.

    cells: every setting and depth.
    gap: their comparison, or None.
    looks: those whose error the counts of learning seeds share.

    The study is decided if every setting is known to learn or not at every depth, the interval of
    the comparison excludes 0, no compared setting is best at the edge of its rates, and, if
    depths are added, it is known up to a factor of two where a setting ceases to learn.
    """
    if not looks.repeated:
        return found
    rates = rates_in_all(cells, looks)
    edges = beyond_edges(cells, gap)
    unknown = open_cells(cells, looks)
    seeds = more_seeds(unknown, gap, rates, looks)
    details = [open_sentence(cell) for cell in unknown]
    details += filter(None, [far_seed_sentence(gap) if gap else ""])
    between = [] if edges or unknown else depths_between(cells, looks.lead(rates), looks)
    is_clear = gap.is_clear if gap else len(cells) == 1 or found.decided
    decided = not edges and not unknown and not between and is_clear
    judged = any(one.outcome for cell in cells for one in cell.by_seed.values())
    return replace(
        found,
        decided=decided,
        sure=[*found.sure, *([looks.counts_sentence(rates)] if judged else [])],
        details=[*found.details, *details],
        batch=edges or seeds or between,
    )


def open_cells(cells: Sequence[Best], looks: Looks) -> list[Best]:
    """Return the cells of which a growing study has yet to know whether they learn."""
    if not looks.repeated:
        return []
    rates = rates_in_all(cells, looks)
    return [cell for cell in cells if missing(cell, rates, looks)]


def open_sentence(cell: Best) -> str:
    """Return that it is open whether a setting learns at a depth."""
    return (
        f"It is open whether {cell.label} learns at N = {cell.depth} "
        f"({cell.learnt} of {counted('{} seeds', cell.seeds)})."
    )


def rates_in_all(cells: Sequence[Best], looks: Looks) -> int:
    """Return the number of rates, one of which may learn by chance, with those of added depths."""
    rates = sum(len(cell.tried) for cell in cells)
    if looks.depths:
        rates += sum(halvings(a, b) * len(a.tried) for a, b in neighbours(cells))
    return rates


def more_seeds(unknown: Sequence[Best], gap: Gap | None, rates: int, looks: Looks) -> list[More]:
    """Return the seeds that would show whether cells learn, and those up to the next comparison.

    unknown: the cells of which that is open.
    """
    seeds = [
        More([cell], target - cell.seeds, TO_LOOK)
        for cell in unknown
        if (target := looks.after(cell.seeds + missing(cell, rates, looks) - 1))
    ]
    if gap is None or gap.is_clear:
        return seeds
    pair, difference = [gap.leader, gap.rival], gap.gap
    further = until_look(pair, difference.n, difference.value, difference.sd, gap.looks)
    return [*seeds, further] if further else seeds


def neighbours(cells: Sequence[Best]) -> list[tuple[Best, Best]]:
    """Return the pairs of one setting's neighbouring depths, the less deep one first."""
    by_setting: dict[str, list[Best]] = {}
    for cell in sorted(cells, key=lambda cell: cell.depth):
        by_setting.setdefault(cell.label, []).append(cell)
    return [pair for every in by_setting.values() for pair in pairwise(every)]


def halvings(shallow: Best, deep: Best) -> int:
    """Return the number of depths that would divide all of a range into parts of WIDEST at most."""
    ratio = math.log(deep.depth / shallow.depth, WIDEST)
    return 2 ** math.ceil(math.log2(ratio)) - 1 if ratio > 1 else 0


def depths_between(cells: Sequence[Best], seeds: int, looks: Looks) -> list[More]:
    """Return the runs at a depth between two, a factor above WIDEST apart, where one alone learns.

    seeds: number of seeds of the new depth; its rates are those of the less deep neighbour.
    """
    return [
        More([shallow], seeds, TO_LOOK, all_rates=True, depth=middle(shallow, deep))
        for shallow, deep in neighbours(cells)
        if looks.depths
        and deep.depth > WIDEST * shallow.depth
        and all(cell.is_judged for cell in (shallow, deep))
        and mostly_learns(shallow) != mostly_learns(deep)
    ]


def middle(shallow: Best, deep: Best) -> int:
    """Return the depth between two in logarithms."""
    return round(math.sqrt(shallow.depth * deep.depth))


def mostly_learns(cell: Best) -> bool:
    """Return whether more than half of a setting's seeds learn."""
    return 2 * cell.learnt > cell.seeds


def is_compared(cell: Best, gap: Gap) -> bool:
    """Return whether a setting and depth is one of the two compared ones."""
    return cell.same_cell(gap.leader) or cell.same_cell(gap.rival)


def missing(cell: Best, cells: int, looks: Looks) -> int:
    """Return the least number of further seeds that show whether a setting learns; 0 if known."""
    if not cell.is_judged:
        return 0
    return max(looks.lead(cells) - abs(2 * cell.learnt - cell.seeds), 0)


def beyond_edges(cells: Sequence[Best], gap: Gap | None) -> list[More]:
    """Return the runs at rates beyond the best ones of the compared cells, or of a single cell."""
    compared = [cell for cell in cells if len(cells) == 1 or (gap and is_compared(cell, gap))]
    return [more for cell in compared if (more := beyond_edge(cell))]


def beyond_edge(cell: Best) -> More | None:
    """Return the runs at rates beyond the best one, if it is at the edge and the setting learns."""
    blind = cell.is_judged and not cell.learnt
    if not cell.edge or blind or len(cell.tried) >= MOST_RATES:
        return None
    return More([cell], 0, TO_LOOK, rates_beyond(cell.value, cell.edge, sorted(cell.tried)))


def until_look(
    cells: Sequence[Best],
    seeds: int,
    effect: float,
    deviation: float,
    looks: Looks,
    *,
    all_rates: bool = False,
) -> More | None:
    """Return the seeds up to the next look; None after the last, or if it would hardly show more.

    seeds: number of shared seeds so far.
    effect, deviation: measured mean, and standard deviation of one seed's value.

    From eight seeds on, runs end if the last look would show an effect of this size with a
    probability below 10 %: a stop for futility, which makes wrong statements rarer.
    """
    target = looks.after(seeds, compared=True)
    known = seeds >= FEWEST and math.isfinite(effect)
    if target is None or (known and seeds_needed(effect, deviation, HOPELESS, looks) is None):
        return None
    return More(cells, target - seeds, TO_LOOK, all_rates=all_rates)


def rates_beyond(best: float, edge: str, tried: Sequence[float]) -> list[float]:
    """Return two rates beyond the best one tried, or one on each side beside a diverged rate."""
    if edge == HIGHEST:
        return [rounded(best * 2), rounded(best * 4)]
    if edge == LOWEST:
        return [rounded(best / 4), rounded(best / 2)]
    near = min(tried, key=lambda rate: abs(math.log(rate / best)))
    at = tried.index(near)
    beside = [tried[i] for i in (at - 1, at + 1) if 0 <= i < len(tried)]
    return sorted(rounded(math.sqrt(near * other)) for other in beside)


def rounded(rate: float) -> float:
    """Return a rate with three digits."""
    return float(f"{rate:.3g}")
