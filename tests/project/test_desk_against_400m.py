"""experiments/desk_against_400m: its statistics on small examples, its numbers by plain loops."""

import csv
import itertools
import random
import sys
from collections import Counter
from importlib import import_module
from typing import Any

import pandas as pd
import pytest
from helpers import ROOT

from deepstack.config import load_study
from deepstack.sweeps import expand

FOLDER = ROOT / "experiments/desk_against_400m"
sys.path.insert(0, str(FOLDER))
pairs: Any = import_module("pairs")


class FakeRun:
    """A run with these settings by dotted key."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings

    def get(self, key: str, default: Any = None) -> Any:
        return self.settings.get(key, default)


def rows_of(name: str) -> list[dict[str, str]]:
    """Return the rows of a table of the experiment."""
    with (FOLDER / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_a_pair_is_separated_from_0_006_on_and_names_the_better_design_first() -> None:
    published = {"a": 2.702, "b": 2.696, "c": 2.701}
    assert 2.702 - 2.696 < 0.006  # by rounding of floats
    assert pairs.separated_pairs(published) == [("b", "a")]


def test_a_pair_agrees_if_the_better_design_is_lower_and_a_tie_counts_half() -> None:
    every = [("a", "b"), ("a", "c"), ("b", "c"), ("c", "d")]
    assert pairs.agreement(every, {"a": 1.0, "b": 2.0, "c": 0.5, "d": 0.5}) == 1.5
    diverged = float("inf")
    assert pairs.agreement(every, {"a": 1.0, "b": diverged, "c": diverged, "d": 3.0}) == 2.5


def test_the_counts_of_permutations_are_the_mahonian_numbers() -> None:
    """Of n! orders, this many have k pairs in order (OEIS A008302)."""
    every = list(itertools.combinations("abcd", 2))
    counts = Counter(pairs.permutation_counts(every, dict(zip("abcd", [5, 2, 7, 1], strict=True))))
    assert counts == {0: 1, 1: 3, 2: 5, 3: 6, 4: 5, 5: 3, 6: 1}


def test_the_interval_over_seeds_covers_every_draw() -> None:
    """Means of a minus b: -1 for seeds (0, 0), +0.5 for (0, 1) and (1, 0), +2 for (1, 1)."""
    losses = pd.DataFrame({"a": [1.0, 5.0], "b": [2.0, 3.0], "c": [9.0, 9.0]})
    assert pairs.seed_interval([("a", "b")], losses) == (0, 1)
    assert pairs.seed_interval([("a", "b"), ("a", "c")], losses) == (0.5, 1)
    assert pairs.seed_interval([("a", "c"), ("b", "c")], losses) == (1, 1)


def test_the_interval_over_designs_is_that_of_draws_one_by_one() -> None:
    rank = {design: i for i, design in enumerate(pairs.DESIGNS)}
    desk = {design: float((5 * i) % 9) for design, i in rank.items()}
    every = list(itertools.combinations(pairs.DESIGNS, 2))[:-4]
    assert pairs.design_interval(every, {d: float(i) for d, i in rank.items()}) == (1, 1)
    generator, shares = random.Random(3), []
    for _ in range(4000):
        drawn = generator.choices(pairs.DESIGNS, k=9)
        right = [desk[a] < desk[b] for a in drawn for b in drawn if (a, b) in every]
        shares += [sum(right) / len(right)] if right else []
    shares.sort()
    assert pairs.design_interval(every, desk) == pytest.approx(
        (shares[100], shares[3899]), abs=0.04
    )


def test_a_pair_is_decided_if_the_interval_of_its_differences_leaves_out_0() -> None:
    """Three differences of mean 1 need a deviation below 1 / 4.303 · √3 = 0.403."""
    losses = pd.DataFrame(
        {"a": [1.0, 1.0, 1.0], "b": [2.4, 1.6, 2.0], "c": [2.41, 1.59, 2.0], "d": [0.6, 0.5, 0.4]}
    )
    assert pairs.decided_pairs([("a", "b")], losses) == (1, 1)
    assert pairs.decided_pairs([("a", "c")], losses) == (0, 0)
    assert pairs.decided_pairs([("a", "b"), ("a", "c"), ("a", "d")], losses) == (2, 1)


def test_two_seeds_and_the_other_seeds_agree_with_each_other() -> None:
    """a is above b in seed 2 alone: its mean over seeds is above in every set with seed 2."""
    losses = pd.DataFrame({"a": [1.0, 1.0, 9.0], "b": [2.0, 2.0, 2.0], "c": [0.0, 0.0, 0.0]})
    every = [("a", "b"), ("a", "c")]
    assert pairs.halves_agreement(every, losses) == pytest.approx(0.5)


def test_the_study_has_each_published_design_once_in_their_order() -> None:
    designs = []
    for config in expand(load_study(FOLDER / "study.yaml")):
        blocks = config.model.scheme_options.get("blocks", 8)
        settings = {"model.scheme": config.model.scheme, "model.scheme_options.blocks": blocks}
        designs.append(pairs.design_of(FakeRun(**settings)))
    assert designs == pairs.DESIGNS and len(set(designs)) == 9


def test_the_numbers_of_the_page_follow_from_the_losses_of_the_runs() -> None:
    """The share at the best rate, from runs.csv and published.csv by loops."""
    published = {row["design"]: row for row in rows_of("published.csv")}
    losses: dict[str, dict[str, float]] = {}
    for row in rows_of("runs.csv"):
        if row["setting"] == "best":
            losses.setdefault(row["design"], {})[row["seed"]] = float(row["val_loss"])
    seeds = set.intersection(*(set(of) for of in losses.values()))
    means = {design: sum(of[seed] for seed in seeds) for design, of in losses.items()}
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    for column in ("16", "32"):
        gaps = {
            pair: float(published[pair[0]][column]) - float(published[pair[1]][column])
            for pair in itertools.combinations(published, 2)
        }
        kept = {pair: gap for pair, gap in gaps.items() if abs(gap) > 0.0055}
        agree = sum((means[a] > means[b]) == (gap > 0) for (a, b), gap in kept.items())
        (row,) = (
            row
            for row in rows_of("pairs.csv")
            if (row["setting"], row["seeds"], row["column"]) == ("best", "all", column)
        )
        assert (int(row["n"]), int(row["pairs"]), float(row["agree"])) == (
            len(seeds), len(kept), agree,
        )  # fmt: skip
        assert float(row["share"]) == pytest.approx(agree / len(kept), abs=5e-4)
        assert f"{agree} of {len(kept)} pairs" in page
        if column == "16":  # docs/answer.md cites this comparison
            cited = (ROOT / "docs/answer.md").read_text(encoding="utf-8").replace("\n  ", " ")
            ends = f"{float(row['designs_low']):.2f} to {float(row['designs_high']):.2f}"
            assert f"{agree} of {len(kept)} pairs" in cited and f"over designs {ends})" in cited
            assert f"{row['decided_agree']} of the {row['decided']} pairs" in cited
