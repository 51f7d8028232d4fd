"""Compares the final losses of settings: the best one, its nearest rival, and the interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from deepstack.base.text import signed_text, value_text
from deepstack.instruments.answer.found import More, depths_text, digits_of, interval_text
from deepstack.instruments.answer.looks import FAR, FIXED, Looks
from deepstack.instruments.answer.power import seeds_needed
from deepstack.runs.intervals import student
from deepstack.runs.learning import Learning
from deepstack.runs.statistics import Mean, mean_of


@dataclass(frozen=True)
class Gap:
    """The lead of the best setting over its nearest rival.

    gap: mean and interval of the differences, seed by seed, in nats.
    others: number of settings that the best one was compared with.
    looks: the looks at the study, over which the interval holds.
    """

    leader: Learning
    rival: Learning
    gap: Mean
    others: int
    looks: Looks = FIXED

    @property
    def is_clear(self) -> bool:
        """Whether the interval leaves out 0."""
        return math.isfinite(self.gap.low) and self.gap.low > 0


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


def gap_of(cells: Sequence[Learning], looks: Looks = FIXED) -> Gap | None:
    """Return the lead of the setting with the least mean loss; None if fewer than two have losses.

    Only settings whose seeds all have a finite loss count.  The rival is the one whose interval
    reaches furthest down, or without intervals the one with the least mean loss.

    In a growing study every learning rate of a setting counts as a setting of its own: one rate of
    the leader has to beat each rate of the others, and its rates share the error (Bonferroni), so
    that it does not matter that rates are chosen by the same losses.
    """
    rates = [one for cell in cells for one in each_rate(cell)] if looks.repeated else list(cells)
    losses = {
        i: {seed: one.final_loss for seed, one in cell.by_seed.items()}
        for i, cell in enumerate(rates)
        if all(math.isfinite(one.final_loss) for one in cell.by_seed.values())
    }
    order = sorted(losses, key=lambda i: sum(losses[i].values()) / len(losses[i]))
    leader = rates[order[0]] if order else None
    others = [i for i in order if leader and not is_same(rates[i], leader)]
    if leader is None or not others:
        return None
    looks = looks.part(1 / len(leader.tried))
    gaps = {i: difference(losses[i], losses[order[0]]) for i in others}
    gaps = {i: looks.widened(one, one.n) for i, one in gaps.items()}
    unknown = [i for i in others if not math.isfinite(gaps[i].low)]
    nearest = min(others, key=lambda i: gaps[i].low)
    if unknown:
        nearest = unknown[0] if looks.repeated else others[0]
    elif gaps[nearest].low > 0:  # then its best rate is clearly worse too
        nearest = next(i for i in others if is_same(rates[i], rates[nearest]))
    number = len({(rates[i].label, rates[i].depth) for i in others})
    return Gap(leader, rates[nearest], gaps[nearest], number, looks)


def each_rate(cell: Learning) -> list[Learning]:
    """Return the seeds of one setting and depth at each of its learning rates."""
    if cell.rate is None:
        return [cell]
    return [replace(cell, rate=rate, by_seed=seeds) for rate, seeds in cell.tried.items()]


def is_same(cell: Learning, other: Learning) -> bool:
    """Return whether two cells are one setting at one depth."""
    return (cell.label, cell.depth) == (other.label, other.depth)


def difference(losses: dict[int, float], of_leader: dict[int, float]) -> Mean:
    """Return the mean loss minus the leader's over shared seeds; n is 0 if none is shared."""
    shared = sorted(set(losses) & set(of_leader))
    if shared:
        return mean_of([losses[seed] - of_leader[seed] for seed in shared])
    value = sum(losses.values()) / len(losses) - sum(of_leader.values()) / len(of_leader)
    return mean_of([])._replace(value=value)


def nats(number: Mean | float) -> str:
    """Return a number of nats with the decimals of its interval, or three."""
    if isinstance(number, Mean):
        return signed_text(number.value, digits_of(number))
    return signed_text(number, 3)


def margin_clause(gap: Gap, several_depths: bool) -> tuple[str, bool]:
    """Return the clause on a comparison, and whether its interval leaves out 0."""
    leader, rival, is_clear = gap.leader, gap.rival, gap.is_clear
    numbers = interval_text(gap.gap, looks=gap.looks)
    same = leader.label == rival.label
    if not gap.gap.n:
        numbers = "no shared seed, so no interval"
    if same:
        least, most = sorted((leader.depth, rival.depth))
        if is_clear:
            verb = "falls" if leader.depth == most else "rises"
            text = f"its validation loss {verb} by {nats(gap.gap)} nats from N = {least} to {most}"
            return f"{text} ({numbers})", True
        return (
            f"it is undecided whether its loss differs between N = {least} and {most}: "
            f"{nats(gap.gap)} nats ({numbers})"
        ), False
    at = f"at N = {leader.depth} " if several_depths else ""
    if is_clear:
        others = "" if gap.others == 1 else f" and the {gap.others - 1} others"
        if gap.others == 2:
            others = " and the other one"
        text = f"{at}{leader.label} is better than {rival.label}{others}: it ends {nats(gap.gap)}"
        return f"{text} nats below {rival.label} ({numbers})", True
    if gap.looks.repeated and leader.rate is not None and rival.rate is not None:
        rates = f"lr {value_text(leader.rate)} and {value_text(rival.rate)}"
        numbers = f"{rates}; {numbers}"
    return (
        f"{at}it is undecided which of {leader.label} and {rival.label} is better: {leader.label} "
        f"ends {nats(gap.gap)} nats lower ({numbers})"
    ), False


def between_clause(gap: Gap, depths: Sequence[int]) -> str:
    """Return a clause on the depths between two compared ones, or ''."""
    least, most = sorted((gap.leader.depth, gap.rival.depth))
    between = [depth for depth in depths if least < depth < most]
    if not between:
        return ""
    return f"{depths_text(between)} between them {'are' if between[1:] else 'is'} not compared"


def one_rate_caveats(gap: Gap) -> tuple[str, str]:
    """Return a clause and a sentence on a comparison at one learning rate of each setting, or ''.

    The clause is for the sentence of an answer on two optimizers, the sentence is for two schemes.
    """
    cells = (gap.leader, gap.rival)
    rates = [rate for cell in cells for rate in cell.tried if math.isfinite(rate)]
    if len(rates) != 2 or any(len(cell.tried) != 1 for cell in cells):
        return "", ""
    at = f"at the rate {value_text(rates[0])}"
    if rates[0] != rates[1]:
        at += f" of {gap.leader.label} and {value_text(rates[1])} of {gap.rival.label}"
    around = sorted({float(f"{rate * factor:.3g}") for rate in rates for factor in (0.5, 1, 2)})
    add = f"add train.lr={','.join(map(value_text, around))}"
    first, second = (next(iter(cell.by_seed.values())) for cell in cells)
    if first.optimizer != second.optimizer:
        return f"compared {at} alone, and an optimizer's best rate may differ: {add}", ""
    if first.scheme != second.scheme:
        return (
            "",
            f"The schemes are compared {at} alone, and a scheme's best rate may differ: {add}.",
        )
    return "", ""


def runs_that_decide(gap: Gap) -> More | None:
    """Return the further seeds of both settings that would show a difference of this size."""
    cells, n = [gap.leader, gap.rival], gap.gap.n
    if n < gap.looks.least:
        return More(cells, gap.looks.least - n, "would give an interval")
    wanted = seeds_needed(gap.gap.value, gap.gap.sd, looks=gap.looks)
    if wanted is None:
        return None
    reason = "would show a difference of this size with a probability of 80 %"
    return More(cells, max(wanted - n, 1), reason)
