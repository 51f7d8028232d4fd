"""Which settings, rates and seeds an answer compares: known answers by scipy's paired t test."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
from scipy import stats

from deepstack.runs.outcomes import Result
from deepstack.tools.answer.grow import Point, grow
from deepstack.tools.answer.looks import growing, looks_at
from deepstack.tools.answer.sentence import find

CHANCE = 3.25
Losses = Sequence[float] | dict[int, float]


def seeds_of(setting: str, losses: Losses, rate: float = 1e-3, depth: int = 6) -> list[Result]:
    """Results by seed, or of seeds 0, 1, 2, …; an infinite loss is a run that diverged."""
    by_seed = losses if isinstance(losses, dict) else dict(enumerate(losses))
    return [
        Result(setting, setting, depth, rate, seed, "done", loss, CHANCE)
        if math.isfinite(loss)
        else Result(setting, setting, depth, rate, seed, "diverged", None, CHANCE)
        for seed, loss in by_seed.items()
    ]


def paired(worse: Sequence[float], better: Sequence[float]) -> str:
    """Return '0.30 to 0.34, 4 pairs', the 95 % interval of scipy's paired t test."""
    ends = stats.ttest_rel(worse, better).confidence_interval()
    digits = max(1 - math.floor(math.log10((ends.high - ends.low) / 2)), 2)
    return f"interval {ends.low:.{digits}f} to {ends.high:.{digits}f}, {len(worse)} pairs"


A = {0: 2.90, 1: 2.60, 2: 2.71, 3: 2.83, 5: 2.5}
B = {1: 2.98, 2: 3.02, 3: 3.20, 0: 3.31, 4: 2.7}


def test_a_difference_is_taken_over_the_seeds_that_both_settings_have() -> None:
    sentence = find(seeds_of("A", A) + seeds_of("B", B)).sentence
    shared = [0, 1, 2, 3]
    ends = paired([B[seed] for seed in shared], [A[seed] for seed in shared])
    assert "A is better than B" in sentence and ends in sentence, sentence
    none = find(seeds_of("A", {0: 2.5, 1: 2.6}) + seeds_of("B", {2: 2.9, 3: 2.8})).sentence
    assert "no shared seed, so no interval" in none


def test_a_setting_with_a_diverged_seed_is_not_compared() -> None:
    """However low its other seeds end: the mean over them alone would choose it for its failure."""
    lucky = seeds_of("C", [2.0, math.inf, 2.1, 2.0])
    found = find(lucky + seeds_of("A", A) + seeds_of("B", B))
    assert found.sentence.startswith("A is better than B: ") and " C " not in found.sentence[:40]
    assert not any("compared with each of the others" in text for text in found.sure)


def test_the_rival_is_the_setting_whose_interval_reaches_furthest_down() -> None:
    """Not the second best mean: a margin then holds for all others too."""
    best, tight, wide = [2.70, 2.72, 2.71], [2.80, 2.821, 2.81], [2.80, 2.95, 2.98]
    assert sum(tight) < sum(wide)
    found = find(seeds_of("A", best) + seeds_of("B", tight) + seeds_of("C", wide))
    low, high = stats.ttest_rel(wide, best).confidence_interval()
    assert low < 0 < stats.ttest_rel(tight, best).confidence_interval().low
    assert found.sentence.startswith("It is undecided which of A and C is better")
    assert f"{low:.2f} to {high:.2f}, 3 pairs".replace("-", "−") in found.sentence


def test_in_a_growing_study_a_rate_of_the_leader_has_to_beat_every_rate_of_the_others() -> None:
    """Here it beats the best rate of B clearly, and of the other one it knows too little."""
    best, second = [2.70 + 0.01 * i for i in range(8)], [2.90 + 0.011 * i for i in range(8)]
    known = seeds_of("A", best) + seeds_of("B", second)
    assert find(known, looks=growing()).sentence.startswith("A is better than B")
    wide = [2.95 + 0.2 * (-1) ** i for i in range(8)]
    found = find(known + seeds_of("B", wide, 2e-3), looks=growing())
    assert "undecided which of A and B is better" in found.sentence
    few = find(known + seeds_of("B", [2.95, 2.96, 2.97], 2e-3), looks=growing())
    assert "3 pairs of seeds, no interval below 6" in few.sentence


def test_a_clearly_worse_setting_is_named_at_its_best_rate() -> None:
    best = [2.70 + 0.01 * i for i in range(8)]
    lower, higher = ([end + 0.003 * (i % 3) for i in range(8)] for end in (2.9, 3.0))
    wide = [end + 0.01 + 0.03 * (-1) ** i for i, end in enumerate(lower)]
    results = seeds_of("A", best) + seeds_of("B", lower, 1e-3) + seeds_of("B", wide, 2e-3)
    found = find([*results, *seeds_of("B", higher, 4e-3)], looks=growing())
    assert found.sentence.startswith("A is better than B: it ends 0.1")
    gap = sum(lower) / 8 - sum(best) / 8
    assert f"ends {gap:.3f} nats below B" in found.sentence


@pytest.mark.parametrize(("change", "verb"), [(-0.2, "falls"), (0.2, "rises")])
def test_a_loss_falls_or_rises_with_depth(change: float, verb: str) -> None:
    shallow = [2.70, 2.71, 2.75]
    deep = [loss + change + more for loss, more in zip(shallow, (0.0, 0.03, -0.03), strict=True)]
    sentence = find(seeds_of("A", shallow) + seeds_of("A", deep, depth=48)).sentence
    ends = paired(*sorted([shallow, deep], key=sum, reverse=True))
    assert f"its validation loss {verb} by 0.200 nats from N = 6 to 48" in sentence
    assert ends in sentence, ends


def test_new_runs_complete_the_pairs_of_seeds_that_are_there() -> None:
    """A has seeds 0 to 3 and B 2 to 6: for six pairs A lacks 4 and 5, and B 0 and 1."""
    batches: list[set[tuple[str, int]]] = []

    def measure(points: Sequence[Point]) -> list[Result]:
        batches.append({(point.setting, point.seed) for point in points})
        return [
            *seeds_of("A", {seed: 2.80 + 0.01 * seed for seed in range(4)}),
            *seeds_of("B", {seed: 2.80 + 0.01 * (seed % 2) for seed in range(2, 7)}),
        ]

    grow(measure, growing())
    assert batches[:2] == [set(), {("A", 4), ("A", 5), ("B", 0), ("B", 1)}]


def test_of_several_growing_studies_the_least_error_counts(tmp_path: Path) -> None:
    for name, error in (("one", 0.05), ("two", 0.01), ("three", 0.02)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "until.json").write_text(json.dumps({"error": error}))
    looks = looks_at(sorted(tmp_path.iterdir()))
    results = seeds_of("A", [2.7 + 0.01 * i for i in range(8)])
    results += seeds_of("B", [2.9 + 0.011 * i for i in range(8)])
    assert "99.2 % interval over 6 looks" in find(results, looks=looks).sentence  # 0.8 · 0.01
