"""The statement on the seeds of one setting: what its interval shows about learning."""

from __future__ import annotations

import math
from collections.abc import Sequence

from deepstack.base import counted
from deepstack.runs import LEAST_SEEDS, Best, Mean, Result, loss_of, mean_of, nats
from deepstack.tools.answer.found import MOST_NAMES, Found, More, interval_text, share_text
from deepstack.tools.answer.looks import FIXED, Looks

CONTEXT = "a predictor without context"
UNTRAINED = "its untrained stack, which begins below a predictor without context"


def about_one(cell: Best, looks: Looks = FIXED) -> Found:
    """Return the statement on the seeds of one setting at one depth.

    looks: of a growing study, whose verdict is the count of seeds that learn.
    """
    ends = list(cell.by_seed.values())
    name = f"{cell.label} with {cell.depth} layers" if cell.depth else cell.label
    if cell.is_chosen:
        name += f", at its best rate ({cell.value_text}),"
    sure = list(filter(None, [share_text(cell.learnt, cell.seeds)])) if cell.is_judged else []
    more, few = None, cell.seeds < LEAST_SEEDS
    if few:
        more = More([cell], LEAST_SEEDS - cell.seeds, "would give an interval")
    if diverged := sum(one.state == "diverged" for one in ends):
        where = f"in {diverged} of {counted('{} seeds', cell.seeds)}"
        rest = f" and learns in {cell.learnt}" if cell.learnt else ""
        return Found("run", f"{name} diverges {where}{rest}.", not few, sure, more=more)
    loss = loss_of([one.loss for one in ends])
    gain = loss_of([one.gain for one in ends])
    if not gain.n:
        text = f"{name} ends at a validation loss of {nats(loss)}{cell.unit}"
        return Found("run", f"{text} ({interval_text(loss, 'seeds')}).", True, [], more=more)
    seeds = f"learns in {cell.learnt} of {counted('{} seeds', cell.seeds)}"
    numbers = f"{interval_text(outward(gain), 'seeds')}; loss {nats(loss)}{share_of(ends)}"
    if looks.repeated or few:
        text = f"{name} {seeds}: it ends {distance(gain, reference_of(ends))} ({numbers})"
        return Found("run", f"{text}.", False, sure, more=more)
    clear = max(one.clear for one in ends)
    text, decided = verdict_of(name, gain, reference_of(ends), clear)
    rest = f"; it {seeds}" if decided and 0 < cell.learnt < cell.seeds else ""
    return Found("run", f"{text} ({numbers}){rest}.", decided, sure, more=more)


def verdict_of(name: str, gain: Mean, reference: str, clear: float) -> tuple[str, bool]:
    """Return the clause that a 95 % interval allows, and whether it decides anything.

    gain: distance of the losses below the reference, in nats.
    clear: distance from which on a run has learnt (`Result.clear`).

    The interval lies above 0, below 0, within `clear` of 0, or decides nothing.
    """
    text = f"it ends {distance(gain, reference)}"
    if gain.low > 0 and gain.value > clear:
        return f"{name} learns from context: {text}", True
    if gain.low > 0:
        return f"{name} learns less than the {clear:g} nats that count as learning: {text}", True
    if gain.high < 0:
        return f"{name} does not learn from context: {text}", True
    if gain.n >= LEAST_SEEDS and not math.isfinite(gain.low):
        return f"Undecided: {name} has equal losses in all seeds: {text}", False
    if -clear <= gain.low and gain.high <= clear:
        level = f"it ends level, within {clear:g} nats, with {reference}"
        return f"{name} has learned nothing from context: {level}", True
    return f"Undecided: the interval of {name} includes 0: {text}", False


def distance(gain: Mean, reference: str) -> str:
    """Return how far a loss ends from its reference: '0.45 nats below a predictor …'."""
    side = "below" if gain.value >= 0 else "above"
    return f"{nats(outward(gain))} nats {side} {reference}"


def outward(gain: Mean) -> Mean:
    """Return a mean distance and its interval, turned so that the mean is not negative."""
    if gain.value >= 0:
        return gain
    return gain._replace(value=-gain.value, low=-gain.high, high=-gain.low)


def reference_of(ends: Sequence[Result]) -> str:
    """Return the words for the loss that most of these runs are compared with."""
    lower = [one for one in ends if one.gain is not None and one.gain != -(one.margin or 0.0)]
    return UNTRAINED if 2 * len(lower) > len(ends) else CONTEXT


def shares_sentence(cells: Sequence[Best]) -> str:
    """Return the sentence on the parts of what can be learnt of settings, or ''."""
    known = [(one.label, mean_of([end.share for end in one.by_seed.values()])) for one in cells]
    parts = [f"{label} {100 * share.value:.0f} %" for label, share in known if share.n]
    if not parts:
        return ""
    more = f", and {len(parts) - MOST_NAMES} more" if len(parts) > MOST_NAMES else ""
    where = f"At N = {cells[0].depth} the settings have learnt of what can be learnt"
    return f"{where}: {', '.join(parts[:MOST_NAMES])}{more}.".replace("-", "−")


def share_of(ends: Sequence[Result]) -> str:
    """Return the part of what can be learnt, '; 62 % of what can be learnt', or ''."""
    share = mean_of([one.share for one in ends])
    return f"; {100 * share.value:.0f} % of what can be learnt".replace("-", "−") * (share.n > 0)
