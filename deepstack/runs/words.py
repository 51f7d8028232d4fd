"""The clauses in which findings are stated: who learns, which is better, edges, growth of ‖ΔF‖.

`deepstack sweep`, `report` and `answer` print these.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from deepstack.base.text import counted, signed_text, value_text
from deepstack.records import GROWN, Run
from deepstack.runs.best import Best, by_success
from deepstack.runs.intervals import LEAST_SEEDS
from deepstack.runs.margin import Margin, margin_of
from deepstack.runs.statistics import Mean
from deepstack.runs.update_growth import Growth, Local

ROUNDING = 1e-6  # half of an interval below this part of the value is rounding
NAME = "95 % interval"
PAIRS = "pairs of seeds"
MOST_UNCOUNTED = 3  # settings without an interval that a clause names
UNCOUNTED = "the study grew, and its looks are not counted here: deepstack answer"


def digits_of(mean: Mean) -> int:
    """Return the decimals that show two digits of a mean's interval, or else of the mean."""
    half = (mean.high - mean.low) / 2
    scale = half if math.isfinite(half) and half > ROUNDING * abs(mean.value) else abs(mean.value)
    if not math.isfinite(scale) or scale == 0:
        return 3
    return min(max(1 - math.floor(math.log10(scale)), 2), 5)


def nats(number: Mean | float) -> str:
    """Return a number of nats with the decimals of its interval, or three."""
    if isinstance(number, Mean):
        return signed_text(number.value, digits_of(number))
    return signed_text(number, 3)


def interval_text(
    mean: Mean, unit: str = PAIRS, *, name: str = NAME, least: int = LEAST_SEEDS
) -> str:
    """Return '95 % interval 0.28 to 0.35, 5 pairs of seeds', or why there is none.

    name: of the interval.
    least: number of seeds from which on there is one.
    """
    number = counted(f"{{}} {unit}", mean.n)
    if unit == PAIRS and mean.n == 1:
        number = "1 pair of seeds"
    if not math.isfinite(mean.low):
        equal = f"{number}, which change nothing, so no interval"
        return equal if mean.n >= least else f"{number}, no interval below {least}"
    digits = digits_of(mean)
    low, high = (signed_text(end, digits) for end in (mean.low, mean.high))
    return f"{name} {low} to {high}, {number}"


def margin_clause(
    margin: Margin,
    several_depths: bool,
    *,
    name: str = NAME,
    least: int = LEAST_SEEDS,
    with_values: bool = False,
    is_better: str = "is better than",
) -> str:
    """Return the clause on a comparison of two settings, or of two depths of one.

    several_depths: whether the clause names its depth.
    name, least: see `interval_text`.
    with_values: whether an undecided clause names the learning rates.
    is_better: the verb of a decided comparison of settings.
    """  # fmt: skip
    leader, rival, gap = margin.leader, margin.rival, margin.gap
    numbers = interval_text(gap, name=name, least=least)
    if not gap.n:
        numbers = "no shared seed, so no interval"
    if leader.label == rival.label:
        return depths_clause(margin, numbers)
    at = f"at N = {leader.depth} " if several_depths else ""
    if margin.is_clear:
        others = "" if margin.others == 1 else f" and the {margin.others - 1} others"
        if margin.others == 2:
            others = " and the other one"
        text = f"{at}{leader.label} {is_better} {rival.label}{others}: it ends {nats(gap)}"
        return f"{text}{leader.unit} below {rival.label} ({numbers}){uncounted_text(margin)}"
    if with_values and leader.is_chosen and rival.is_chosen:
        rates = f"lr {value_text(leader.value)} and {value_text(rival.value)}"
        numbers = f"{rates}; {numbers}"
    side = "lower" if gap.value >= 0 else "higher over their shared seeds"
    size = nats(gap).removeprefix("−")  # a minus sign
    return (
        f"{at}it is undecided which of {leader.label} and {rival.label} is better: {leader.label} "
        f"ends {size}{leader.unit} {side} ({numbers}){uncounted_text(margin)}"
    )


def uncounted_text(margin: Margin) -> str:
    """Return the end of a clause on the settings that have too few seeds to count; '' for none."""
    names = list(dict.fromkeys(one.label for one in margin.uncounted))
    if not names:
        return ""
    return f"; not counted, without an interval: {shortened(names)}"


def shortened(names: Sequence[str]) -> str:
    """Return the first names, and the number of the others."""
    more = f" and {len(names) - MOST_UNCOUNTED} more" if len(names) > MOST_UNCOUNTED else ""
    return ", ".join(names[:MOST_UNCOUNTED]) + more


def lead_sentence(rows: Sequence[Best]) -> str | None:
    """Return the sentence on the best setting of the greatest depth; None without two losses."""
    deepest = max((one.depth for one in rows), default=0)
    cells = [one for one in rows if one.depth == deepest]
    margin = margin_of(cells)
    if margin is None:
        return None
    several_depths = any(one.depth < deepest for one in rows)
    looks = has_looks(margin.leader.runs)
    verb = "leads" if looks else "is better than"
    clause = as_sentence(margin_clause(margin, several_depths, is_better=verb))
    blind = margin.leader.is_judged and not margin.leader.learnt
    nothing = f"{margin.leader.label} has learned nothing from context" if blind else ""
    ends = {one.label: [end.state for end in one.by_seed.values()] for one in cells}
    gone = [label for label, states in ends.items() if "diverged" in states]
    diverged = f"not compared, with diverged runs: {shortened(gone)}" if gone else ""
    return "; ".join(filter(None, [clause, nothing, diverged, UNCOUNTED if looks else ""])) + "."


def has_looks(runs: Sequence[Run]) -> bool:
    """Return whether these runs belong to a study that grew until its question was decided."""
    return any((path / GROWN).is_file() for path in {run.path.parent for run in runs})


def depths_clause(margin: Margin, numbers: str) -> str:
    """Return the clause on one setting at two depths."""
    leader, rival, gap = margin.leader, margin.rival, margin.gap
    least, most = sorted((leader.depth, rival.depth))
    if margin.is_clear:
        verb = "falls" if leader.depth == most else "rises"
        text = f"its validation loss {verb} by {nats(gap)}{leader.unit} from N = {least} to {most}"
        return f"{text} ({numbers})"
    return (
        f"it is undecided whether its loss differs between N = {least} and {most}: "
        f"{nats(gap)}{leader.unit} ({numbers})"
    )


def growth_sentence(growth: Growth) -> str:
    """Return the sentence on the growth of ‖ΔF‖ with depth of one setting.

    It states one exponent for all depths only if the local ones agree.
    """
    symbol = "‖ΔF‖" if growth.column == "model_update" else "‖ΔF‖/‖F_0‖"
    first = f"the first {symbol}" if growth.step == 1 else f"{symbol} at step {growth.step}"
    subject = f"{first} of {growth.label}"
    local = joined([local_text(one) for one in growth.local])
    numbers = sorted({one.exponent.n for one in growth.local})
    seeds = counted("{} seeds", " to ".join(map(str, numbers)))
    if not growth.has_intervals:
        text = (
            f"The exponent of N in {subject} is {local} ({seeds}, no interval below {LEAST_SEEDS})"
        )
    elif len(growth.local) == 1:
        text = f"The exponent of N in {subject} is {local} ({NAME}, {seeds})"
    elif not growth.agree:
        text = f"{subject} follows no single power of N: the exponent is {local} ({NAME}s, {seeds})"
    elif not growth.is_exact:
        text = f"It is undecided whether {subject} follows one power of N: the exponent is {local}"
        text += f" ({NAME}s, {seeds})"
    else:
        value, low, high = power_texts(growth.whole)
        ends = f"from N = {growth.local[0].first} to {growth.local[-1].last}"
        text = f"{subject} follows N^{value} {ends} ({NAME} {low} to {high}, {seeds}); between "
        text += f"neighbouring depths the exponent is {local}"
    text = text[0].upper() + text[1:]
    notes = ["each depth has its own learning rate"] if growth.has_rates else []
    if growth.left_out:
        depths = joined([str(depth) for depth in growth.left_out])
        notes.append(f"N = {depths} is left out, saturated or diverged")
    return f"{'; '.join([text, *notes])}."


def local_text(one: Local) -> str:
    """Return an exponent between two depths: '0.55 (0.50 to 0.60) from N = 6 to 48'."""
    value, low, high = power_texts(one.exponent)
    interval = f" ({low} to {high})" if math.isfinite(one.exponent.low) else ""
    return f"{value}{interval} from N = {one.first} to {one.last}"


def power_texts(mean: Mean) -> list[str]:
    """Return an exponent and the ends of its interval with two decimals."""
    return [signed_text(number, 2) for number in (mean.value, mean.low, mean.high)]


def joined(names: Sequence[str]) -> str:
    """Return names as words: 'a, b and c'."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def rate_sentence(rows: Sequence[Best], most: int) -> str | None:
    """Return a sentence on the best rates of the greatest depth, or None if none was chosen.

    most: the number of settings that it names.
    """
    deepest = by_success([one for one in rows if one.depth == max(one.depth for one in rows)])
    if not any(one.is_chosen for one in deepest):
        return None
    words = []
    for one in deepest[:most]:
        if not one.is_judged:  # no loss to compare with
            words += [f"{one.label} ends lowest at the rate {one.value_text}"] * one.is_chosen
            continue
        if one.is_chosen and not one.learnt:
            words.append(f"{one.label} learns at no rate")
            continue
        where = f" at its best rate ({one.value_text})" if one.is_chosen else ""
        words.append(f"{one.label} learns{where}: {one.learnt} of {counted('{} seeds', one.seeds)}")
    if not words:
        return None
    more = f"; and {len(deepest) - most} more" if len(deepest) > most else ""
    return f"At N = {deepest[0].depth}, {'; '.join(words)}{more}."


def count_text(one: Best) -> str:
    """Return a setting with its count: 'DeepNorm at its best rate (0.064) 2 of 2 (0.47)'."""
    rate = f" at its best rate ({one.value_text})" if one.is_chosen else ""
    gain = f" ({one.gain:.2f})" if one.learnt else ""
    return f"{one.label}{rate} {one.learnt} of {one.seeds}{gain}"


def as_sentence(text: str) -> str:
    """Return a text with a capital letter, unless it begins with the name of a setting."""
    begins = text.split(" ")[0] in ("it", "at", "its", "the", "no")
    return text[0].upper() + text[1:] if begins else text
