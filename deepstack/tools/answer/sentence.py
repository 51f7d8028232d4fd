"""Chooses the sentence that answers a study, by the axes that vary."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from deepstack.base import counted, signed_text, value_text
from deepstack.runs import (
    Best,
    Result,
    as_sentence,
    bests_of,
    digits_of,
    require,
    task_sentence,
)
from deepstack.tools.answer.found import (
    MOST_NAMES,
    Found,
    Kind,
    depths_text,
    joined,
    share_text,
    some_names,
)
from deepstack.tools.answer.growth import OF_COUNTS, grown, open_cells
from deepstack.tools.answer.looks import FIXED, SEEDS, Looks
from deepstack.tools.answer.margins import (
    Gap,
    between_clause,
    gap_clause,
    gap_of,
    one_rate_caveats,
    runs_that_decide,
)
from deepstack.tools.answer.one_setting import about_one, shares_sentence
from deepstack.tools.answer.power import MOST_SEEDS
from deepstack.tools.answer.rates import movement

T_TEST = (
    "The interval is Student's t over the differences of runs with equal seeds: if these are "
    "normal, and their number was fixed before the first look, its false-positive rate is 5 %. A "
    "second look with more seeds raises it: judge by the new seeds alone, or let --until add "
    "them. With rare bad seeds or a long tail in one setting it is up to 25 % (docs/answer.md)."
)
EACH_RATE = (
    "The best rate of a setting has to beat each rate of the others, and a setting's rates share "
    "the error (Bonferroni)."
)
CHOSEN = "Rates are chosen by the losses that are compared; the interval does not count that."


def find(results: Iterable[Result], *, looks: Looks = FIXED) -> Found:
    """Return the statement of a study about its finished runs.

    looks: the looks at the study, over which its intervals hold.

    Raises NothingMatchedError if no run has ended with a validation loss, or diverged.
    """
    cells = bests_of(results)
    require(cells, "no finished run has a validation loss, so there is nothing to answer with")
    settings: dict[str, list[Best]] = {}
    for cell in cells:
        settings.setdefault(cell.label, []).append(cell)
    if found := movement(settings, MOST_NAMES, looks):
        return named(found, looks)
    if len(cells) == 1:
        return grown(about_one(cells[0], looks), cells, None, looks)
    depths = sorted({cell.depth for cell in cells})
    gap = compared_cells(settings, depths, looks.part(1 - OF_COUNTS))
    of_counts = looks.part(OF_COUNTS)
    found = about_several(settings, depths, gap, open_cells(cells, of_counts))
    return named(grown(found, cells, gap, of_counts), looks)


def named(found: Found, looks: Looks) -> Found:
    """Return a statement whose sentence names the settings that added depths were given."""
    values: dict[tuple[int, str], list[str]] = {}
    for depth, key, value in looks.interpolated:
        values.setdefault((depth, key), []).append(value_text(value))
    if not values:
        return found
    settings = [f"{key} = {joined(texts)} at N = {depth}" for (depth, key), texts in values.items()]
    text = f"interpolated between neighbouring depths: {some_names(settings)}"
    return replace(found, sentence=f"{found.sentence.removesuffix('.')}; {text}.")


def about_several(
    settings: dict[str, list[Best]],
    depths: Sequence[int],
    gap: Gap | None,
    unsure: Sequence[Best] = (),
) -> Found:
    """Return the statement on several settings, depths or both: who learns where, and the margin.

    unsure: the cells of which a growing study has yet to know whether they learn.

    The margin is the difference of the two best settings at the greatest depth; of one setting,
    the difference of the greatest and the least depth.
    """
    one_depth = len(depths) == 1
    every = [cell for cells in settings.values() for cell in cells]
    judged = {
        label: cells for label, cells in settings.items() if all(cell.is_judged for cell in cells)
    }
    where = where_clauses(judged, one_depth, unsure) if judged else ""
    if gap is None:
        text = where or f"the losses of these settings cannot be compared{divergences(every)}"
        found = Found("depths", "", bool(judged))
    else:
        compared = [cell for cell in every if len(settings) > 1 and cell.depth == depths[-1]]
        optimizers, schemes = one_rate_caveats(gap, compared)
        margin = gap_clause(gap, not one_depth)
        clauses = [margin, where] if one_depth else [where, margin]
        text = "; ".join(filter(None, [*clauses, between_clause(gap, depths), optimizers]))
        found = about_gap(gap, any(cell.is_chosen for cell in every), schemes)
    sure, details = list(found.sure), list(found.details)
    sure += shares([cell for cells in judged.values() for cell in cells])
    details += filter(None, [shares_sentence([c for c in every if c.depth == depths[-1]])])
    if gap is None:
        details += task_sentence(one.task for cell in every for one in cell.by_seed.values())
    kind: Kind = "settings" if one_depth else "depths"
    return replace(found, kind=kind, sentence=f"{as_sentence(text)}.", sure=sure, details=details)


def shares(cells: Sequence[Best]) -> list[str]:
    """Return what the most seeds that all learned, and that all did not, say about other seeds."""
    all_learned = [cell.seeds for cell in cells if cell.learnt == cell.seeds]
    none_learned = [cell.seeds for cell in cells if not cell.learnt]
    texts = [share_text(max(all_learned), max(all_learned)) if all_learned else None]
    texts += [share_text(0, max(none_learned)) if none_learned else None]
    return list(filter(None, texts))


def about_gap(gap: Gap, is_chosen: bool, schemes: str) -> Found:
    """Return what a margin alone says: whether it is clear, how sure, and what would decide it.

    is_chosen: whether the best of several rates is chosen in any cell.
    schemes: the sentence on schemes that share a rate, or ''.
    """
    sure = []
    if math.isfinite(gap.gap.low):
        sure.append(gap.looks.sentence if gap.looks.repeated else T_TEST)
    if gap.others > 1:
        sure.append(f"The best of {gap.others + 1} settings is compared with each of the others.")
    if is_chosen:
        sure.append(EACH_RATE if gap.looks.repeated else CHOSEN)
    sure += filter(None, [schemes])
    if gap.is_clear:
        return Found("settings", "", True, sure, better=gap.leader.label)
    more = runs_that_decide(gap)
    details = [] if more else [nothing_more(gap)]
    return Found("settings", "", False, sure, details, more)


def divergences(cells: Sequence[Best]) -> str:
    """Return ': candidate diverges in 1 of 3 seeds' for cells whose losses have no mean, or ''."""
    parts = [
        f"{cell.label} diverges{depth_text(cell, cells)} in {number} of "
        f"{counted('{} seeds', cell.seeds)}"
        for cell in cells
        if (number := sum(one.state == "diverged" for one in cell.by_seed.values()))
    ]
    return f": {joined(parts)}" if 0 < len(parts) <= MOST_NAMES else ""


def depth_text(cell: Best, cells: Sequence[Best]) -> str:
    """Return ' at N = 4' where these cells have several depths, else ''."""
    return f" at N = {cell.depth}" if len({one.depth for one in cells}) > 1 else ""


def compared_cells(
    settings: dict[str, list[Best]], depths: Sequence[int], looks: Looks
) -> Gap | None:
    """Return the two cells whose losses are compared, or None if two do not have finite ones."""
    if len(settings) > 1:
        deepest = [c for cells in settings.values() for c in cells if c.depth == depths[-1]]
        return gap_of(deepest, looks)
    (cells,) = settings.values()
    return gap_of([cells[0], cells[-1]], looks)


def nothing_more(gap: Gap) -> str:
    """Return why further seeds would not decide which of two settings is better."""
    if not math.isfinite(gap.gap.low):
        return "More seeds would show no more: let the training use its seed."
    largest = max(abs(gap.gap.low), abs(gap.gap.high))
    text = signed_text(largest, digits_of(gap.gap))
    percent = gap.looks.name.partition(" interval")[0]
    most = SEEDS[-1] if gap.looks.repeated else MOST_SEEDS
    return (
        f"A difference above {text}{gap.leader.unit} is ruled out ({percent}); to show "
        f"one as small as measured would take more than {most} seeds."
    )


def where_clauses(
    settings: dict[str, list[Best]], one_depth: bool, unsure: Sequence[Best] = ()
) -> str:
    """Return who learns where: settings that learn at the same depths share a clause.

    unsure: cells whose seeds are counted, because more may end otherwise.
    """
    rates = any(cell.is_chosen for cells in settings.values() for cell in cells)
    if one_depth:
        return one_depth_clauses([cells[0] for cells in settings.values()], rates)
    patterns: dict[tuple[tuple[int, int, int, bool], ...], list[str]] = {}
    for label, cells in settings.items():
        pattern = tuple(
            (one.depth, one.learnt, one.seeds, any(one is other for other in unsure))
            for one in cells
        )
        patterns.setdefault(pattern, []).append(label)
    every = [cell for cells in settings.values() for cell in cells]
    depths = sorted({cell.depth for cell in every})
    clauses = [pattern_clause(names, pattern, depths) for pattern, names in patterns.items()]
    if len(clauses) > MOST_NAMES:
        clauses = [*clauses[:MOST_NAMES], f"and {len(clauses) - MOST_NAMES} other patterns"]
    seeds = sorted({cell.seeds for cell in every})
    counts = (
        counted("{} seeds", seeds[0]) if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]} seeds"
    )
    each = " each" if len(every) > 1 else ""
    rate = ", at the best rate of each" if rates else ""
    return f"{'; '.join(clauses)} ({depths_text(depths)}, {counts}{each}{rate})"


def one_depth_clauses(cells: Sequence[Best], rates: bool) -> str:
    """Return who learns at the one depth: 'DeepNorm learns (3 of 3 seeds)'."""
    groups: dict[tuple[int, int], list[Best]] = {}
    for cell in cells:
        groups.setdefault((cell.learnt, cell.seeds), []).append(cell)
    clauses = []
    for (learnt, seeds), members in sorted(groups.items(), key=lambda one: -one[0][0] / one[0][1]):
        names = [
            cell.label + (f" at its best rate ({cell.value_text})" if cell.is_chosen else "")
            for cell in members
        ]
        several = len(names) > 1
        verb = ("learn" if several else "learns") if learnt else ("do" if several else "does")
        words = f"{some_names(names)} {verb}{'' if learnt else ' not learn'}"
        each = " each" if several else ""
        clauses.append(f"{words} ({learnt} of {counted('{} seeds', seeds)}{each})")
    return "; ".join(clauses)


def pattern_clause(
    names: Sequence[str], pattern: Sequence[tuple[int, int, int, bool]], depths: Sequence[int]
) -> str:
    """Return where these settings learn.

    pattern: depth, seeds that learn, all seeds, and whether the seeds are counted even if all end
        alike.
    depths: those of all settings.
    """
    verb = "learns" if len(names) == 1 else "learn"
    whole = [depth for depth, learnt, seeds, unsure in pattern if learnt == seeds and not unsure]
    none = [depth for depth, learnt, seeds, unsure in pattern if not learnt and not unsure]
    some = [one[:3] for one in pattern if one[0] not in whole + none]
    who = some_names(names)
    if len(whole) == len(depths):
        return f"{who} {verb} at every depth"
    if len(none) == len(depths):
        return f"{who} {'has' if len(names) == 1 else 'have'} learned at no depth"
    parts = [f"at {depths_text(whole)}"] if whole else []
    parts += [
        f"in {learnt} of {counted('{} seeds', seeds)} at N = {depth}"
        for depth, learnt, seeds in some
    ]
    if none and not parts:
        return f"{who} {'does' if len(names) == 1 else 'do'} not learn at {depths_text(none)}"
    parts += [f"not at {depths_text(none)}"] if none else []
    return f"{who} {verb} {joined(parts)}"
