"""Whether a candidate is better than its baseline: the statement of `deepstack answer` in one word.

Nothing is computed here.  `deepstack.tools.answer` compares the losses of both commands seed
by seed, over all looks at the study, and names the better setting if the interval excludes 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from deepstack.runs import bests_of, count_diverged, joined, margin_of
from deepstack.tools.own_trainer.command_file import BASELINE, CANDIDATE
from deepstack.tools.own_trainer.spread import UNDECIDED as UNDECIDED

if TYPE_CHECKING:
    from deepstack.records import RunFolder
    from deepstack.runs import Best, Result
    from deepstack.tools.answer import Found

BETTER, NOT_BETTER = 0, 10
"""Exit codes of `deepstack sweep --until decided` on a study with baseline and candidate, beside
UNDECIDED."""


@dataclass(frozen=True)
class Verdict:
    """The decision on a candidate.  exit_code: BETTER, NOT_BETTER or UNDECIDED."""

    exit_code: int
    sentence: str


def verdict_of(found: Found, results: Iterable[Result]) -> Verdict:
    """Return the decision that a statement on the results of baseline and candidate makes.

    Seeds that diverged have no loss to compare.  A candidate with more of them than its baseline is
    not kept, by caution: that it diverges more often is not tested.  Of several depths the
    statement compares the greatest; a candidate that is clearly worse at another one is not better
    either.
    """
    results = list(results)
    better = found.better.partition(",")[0] if found.decided else ""
    worse = worse_depths(results)
    if better == CANDIDATE and worse:
        text = f"better at the greatest depth, and worse at N = {joined(list(map(str, worse)))}"
        return Verdict(NOT_BETTER, f"{text}: keep the baseline (exit code {NOT_BETTER})")
    (failed, seeds), (others, of) = (count_diverged(results, one) for one in (CANDIDATE, BASELINE))
    if better == CANDIDATE and failed <= others:
        return Verdict(BETTER, f"better: keep the candidate (exit code {BETTER})")
    if better == BASELINE:
        return Verdict(NOT_BETTER, f"not better: keep the baseline (exit code {NOT_BETTER})")
    if failed > others:
        counts = f"{failed} of {seeds} seeds of the candidate diverge, {others} of {of} of the"
        text = f"not shown to be better: {counts} baseline; keep the baseline"
        return Verdict(NOT_BETTER, f"{text} (exit code {NOT_BETTER})")
    return Verdict(
        UNDECIDED, f"undecided: no difference is shown, keep the baseline (exit code {UNDECIDED})"
    )


def worse_depths(results: Iterable[Result]) -> list[int]:
    """Return the depths at which the baseline is better by the interval of `deepstack.runs`."""
    depths: dict[int, list[Best]] = {}
    for one in bests_of(results):
        depths.setdefault(one.depth, []).append(one)
    margins = {depth: margin_of(cells) for depth, cells in sorted(depths.items())}
    return [
        depth
        for depth, margin in margins.items()
        if margin and margin.is_clear and margin.leader.label.partition(",")[0] == BASELINE
    ]


def decide(study: Path, folders: Iterable[RunFolder]) -> Verdict:
    """Return the decision on the runs of a study that has stopped growing."""
    from deepstack.records import Run
    from deepstack.runs import Runs
    from deepstack.tools.answer import find, looks_at

    runs = Runs(Run(folder.path) for folder in folders)
    results = runs.keep(lambda run: run.damage() is None, "none of these runs can be read").results
    found = find(results.values(), looks=looks_at([study]))
    return verdict_of(found, results.values())
