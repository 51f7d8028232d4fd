"""Compares the final losses of settings: the best one, its nearest rival, and the interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from deepstack.base import value_text
from deepstack.runs import Best, Margin, Mean, margin_clause, margin_of, student
from deepstack.tools.answer.found import More, depths_text
from deepstack.tools.answer.looks import FAR, FIXED, Looks
from deepstack.tools.answer.power import seeds_needed


@dataclass(frozen=True)
class Gap(Margin):
    """The lead of the best setting, whose interval holds over the looks at a study."""

    looks: Looks = FIXED


def far_seed_sentence(gap: Gap) -> str:
    """Return the sentence on a difference that only normal differences would decide, or ''."""
    mean, looks = gap.gap, gap.looks
    if gap.is_clear or not looks.repeated or not math.isfinite(mean.se):
        return ""
    if not abs(mean.value) > student(mean.n, looks.intervals) * mean.se:
        return ""
    return (
        "Undecided: the differences between seeds may not be normal. Student's t would decide it, "
        f"and one further pair of seeds {FAR} standard deviations away would level it."
    )


def gap_of(cells: Sequence[Best], looks: Looks = FIXED) -> Gap | None:
    """Return the lead of the setting with the least mean loss; None if fewer than two have losses.

    In a growing study every learning rate of a setting counts as a setting (see `margin_of`), and
    the leader's rates share the error (Bonferroni).
    """

    def widen(leader: Best, gap: Mean) -> Mean:
        return looks.part(1 / len(leader.tried)).widened(gap, gap.n)

    margin = margin_of(cells, widen, of_values=looks.repeated)
    if margin is None:
        return None
    return Gap(**vars(margin), looks=looks.part(1 / len(margin.leader.tried)))


def gap_clause(gap: Gap, several_depths: bool) -> str:
    """Return the clause on a comparison."""
    name, least, repeated = gap.looks.name, gap.looks.least, gap.looks.repeated
    return margin_clause(gap, several_depths, name=name, least=least, with_values=repeated)


def between_clause(gap: Gap, depths: Sequence[int]) -> str:
    """Return a clause on the depths between two compared ones, or ''."""
    least, most = sorted((gap.leader.depth, gap.rival.depth))
    between = [depth for depth in depths if least < depth < most]
    if not between:
        return ""
    return f"{depths_text(between)} between them {'are' if between[1:] else 'is'} not compared"


def one_rate_caveats(gap: Gap, compared: Sequence[Best]) -> tuple[str, str]:
    """Return a clause and a sentence on comparisons at one learning rate of each setting, or ''.

    compared: all settings at the depth of the comparison.

    The clause is for the sentence of an answer on two optimizers, the sentence is for two schemes.
    """
    leader = gap.leader
    others = [one for one in (gap.rival, *compared) if not one.same_cell(leader)]
    if other := other_at_one_rate(leader, others, "optimizer"):
        at, add = one_rate_texts(leader, other)
        return f"compared {at} alone, and an optimizer's best rate may differ: {add}", ""
    if other := other_at_one_rate(leader, others, "scheme"):
        at, add = one_rate_texts(leader, other)
        text = f"The schemes are compared {at} alone, and a scheme's best rate may differ: {add}."
        return "", text
    return "", ""


def other_at_one_rate(leader: Best, others: Sequence[Best], name: str) -> Best | None:
    """Return the first setting with another optimizer or scheme and a single rate, as the leader's.

    name: of the attribute of results.
    """

    def kind(one: Best) -> str:
        return str(getattr(next(iter(one.by_seed.values())), name))

    def has_one_rate(one: Best) -> bool:
        return len(one.tried) == 1 and all(map(math.isfinite, one.tried))

    differing = (one for one in others if has_one_rate(one) and kind(one) != kind(leader))
    return next(differing, None) if has_one_rate(leader) else None


def one_rate_texts(leader: Best, other: Best) -> tuple[str, str]:
    """Return 'at the rate 0.001', and the rates around to add."""
    rates = [*leader.tried, *other.tried]
    at = f"at the rate {value_text(rates[0])}"
    if rates[0] != rates[1]:
        at += f" of {leader.label} and {value_text(rates[1])} of {other.label}"
    around = sorted({float(f"{rate * factor:.3g}") for rate in rates for factor in (0.5, 1, 2)})
    return at, f"add the rates {', '.join(map(value_text, around))}"


def runs_that_decide(gap: Gap) -> More | None:
    """Return the further seeds of both settings that would show a difference of this size."""
    cells, n = [gap.leader, gap.rival], gap.gap.n
    if n < gap.looks.least:
        return More(cells, gap.looks.least - n, "would give an interval")
    if not math.isfinite(gap.gap.sd):
        return None
    wanted = seeds_needed(gap.gap.value, gap.gap.sd, looks=gap.looks)
    if wanted is None:
        return None
    reason = "would show a difference of this size with a probability of 80 %"
    return More(cells, max(wanted - n, 1), reason)
