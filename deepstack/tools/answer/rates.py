"""The statement of a study over depths and learning rates: does the best rate move with depth?"""

from __future__ import annotations

import math
from collections.abc import Sequence

from deepstack.base import counted, signed_text
from deepstack.runs import LEAST_SEEDS, Best, Interval, as_sentence, rate_sentence, student
from deepstack.tools.answer.found import Found, More, depths_text
from deepstack.tools.answer.growth import MOST_RATES, rates_beyond, until_look
from deepstack.tools.answer.looks import FIXED, Looks
from deepstack.tools.answer.power import seeds_needed
from deepstack.tools.transfer import Transfer, can_refine, losses_of, transfer

MOST_RUNS = 200  # beyond this number no further runs are advised
METHOD = (
    "The exponent belongs to rates between those tried: at each depth the vertex of a parabola "
    "through the least mean loss and its two neighbours. It is fitted in logarithms, and its "
    "interval comes from samples of the seeds, widened to Student's t."
)


def movement(settings: dict[str, list[Best]], most: int, looks: Looks = FIXED) -> Found | None:
    """Return whether the best rate moves with depth; None without rates at two depths.

    settings: the seeds of each depth by setting.
    most: the number of settings that a sentence names.
    looks: the looks at the study, over which the intervals hold.
    """
    results = transfers(settings)
    if not results:
        return None
    known = {label: one for label, one in results.items() if one.exponent is not None}
    asked = sum(sum(one.is_chosen for one in cells) > 1 for cells in settings.values())
    together = max(asked if looks.repeated else len(known), 1)
    level = Looks(looks.number, looks.error / together)
    exponents = {
        label: level.widened(one.exponent, one.best[0].seeds)
        for label, one in known.items()
        if one.exponent is not None
    }
    clauses = [clause_of(label, results[label], exponents.get(label), looks) for label in results]
    more_names = f"; and {len(clauses) - most} more settings" if len(clauses) > most else ""
    open_ones = [label for label in results if not is_decided(exponents.get(label))]
    head = "Undecided: " if len(open_ones) == len(results) else ""
    sure = [METHOD, looks.sentence] if looks.repeated else [METHOD]
    if len(known) > 1:
        sure.append(f"The intervals of the {len(known)} exponents hold together with 95 %.")
    every = [cell for cells in settings.values() for cell in cells]
    details = list(filter(None, [rate_sentence(every, most)]))
    first = open_ones[0] if open_ones else None
    more = runs_that_decide(first, settings[first], results[first], level) if first else None
    if more is not None and more.runs > MOST_RUNS:
        more = None
    growing = open_ones if looks.repeated else []
    batches = [batch_of(settings[label], results[label], level) for label in growing]
    batch = [further for further in batches if further]
    details += ruled_out(exponents, looks)
    text = "; ".join(clauses[:most]) + more_names
    sentence = f"{head}{text if head else as_sentence(text)}."
    return Found("rates", sentence, not open_ones, sure, details, more, batch)


def transfers(settings: dict[str, list[Best]]) -> dict[str, Transfer]:
    """Return the best rates of each setting that has several at two depths, with shared seeds."""
    results = {}
    for label, cells in settings.items():
        losses = losses_of(one.cell for one in cells if one.is_chosen)
        by_rate = [set(seeds) for rates in losses.values() for seeds in rates.values()]
        if len(losses) > 1 and set.intersection(*by_rate):
            runs = [run for one in cells for run in one.runs]
            results[label] = transfer(losses, refines=can_refine(runs))
    return results


def ruled_out(exponents: dict[str, Interval], looks: Looks) -> list[str]:
    """Return a sentence on each exponent whose sign is open."""
    return [
        f"For {label}, an exponent outside of {signed_text(one.low, 2)} to "
        f"{signed_text(one.high, 2)} is ruled out ({looks.name.partition(' interval')[0]})."
        for label, one in exponents.items()
        if math.isfinite(one.low) and not is_decided(one)
    ]


def is_decided(exponent: Interval | None) -> bool:
    """Return whether an interval is known and excludes 0."""
    return exponent is not None and (exponent.low > 0 or exponent.high < 0)


def clause_of(label: str, result: Transfer, exponent: Interval | None, looks: Looks = FIXED) -> str:
    """Return the clause on one setting."""
    depths = depths_text([best.depth for best in result.best])
    seeds = counted("{} seeds", result.best[0].seeds)
    if exponent is None:
        return f"the best learning rate of {label} has no exponent in N ({result.advice[0]})"
    value, low, high = (signed_text(number, 2) for number in exponent)
    ends = f"{looks.name} {low} to {high}, {seeds}"
    if math.isnan(exponent.low):
        ends = f"{seeds}, no interval below {looks.least}"
    numbers = f"{value} ({ends}, {depths})"
    if not is_decided(exponent):
        return (
            f"no trend of the best learning rate of {label} with depth is established: its "
            f"exponent in N is {numbers}"
        )
    verb = "rises" if exponent.value > 0 else "falls"
    return (
        f"the best learning rate of {label} {verb} with depth, with an exponent in N of {numbers}"
    )


def runs_that_decide(
    label: str, cells: Sequence[Best], result: Transfer, looks: Looks
) -> More | None:
    """Return the runs that would decide the movement of one setting's best rate."""
    several = with_rates(cells)
    if result.exponent is None:
        return beyond_edges(label, several, result)
    seeds, deviation = spread_of(result)
    if math.isnan(deviation):
        return More(several, LEAST_SEEDS - seeds, "would give an interval", all_rates=True)
    wanted = seeds_needed(result.exponent.value, deviation, looks=looks)
    if wanted is None:
        return None
    reason = f"would show an exponent of this size for {label} with a probability of 80 %"
    return More(several, max(wanted - seeds, 1), reason, all_rates=True)


def with_rates(cells: Sequence[Best]) -> list[Best]:
    """Return the depths with two rates or more."""
    return [cell for cell in cells if len(cell.tried) > 1]


def beyond_edges(label: str, cells: Sequence[Best], result: Transfer) -> More:
    """Return the runs at rates beyond the first best rate that lies at an edge."""
    edge = next(best for best in result.best if not best.inside)
    cells = [cell for cell in cells if cell.depth == edge.depth]
    rates = rates_beyond(edge.rate.value, edge.edge, sorted(cells[0].tried))
    where = f"{label} at N = {edge.depth}"
    return More(cells, 0, f"would show whether a better rate of {where} lies there", rates)


def spread_of(result: Transfer) -> tuple[int, float]:
    """Return the number of seeds, and the standard deviation of one seed's exponent."""
    seeds, exponent = result.best[0].seeds, result.exponent
    if exponent is None:
        return seeds, math.nan
    half = (exponent.high - exponent.low) / 2
    return seeds, half / student(seeds) * math.sqrt(seeds)


def batch_of(cells: Sequence[Best], result: Transfer, looks: Looks) -> More | None:
    """Return the runs of a growing study up to the next look at one setting's exponent."""
    several = with_rates(cells)
    if result.exponent is None:
        more = beyond_edges(several[0].label, several, result)
        return more if len(more.cells[0].tried) < MOST_RATES else None
    seeds, deviation = spread_of(result)
    return until_look(several, seeds, result.exponent.value, deviation, looks, all_rates=True)
