"""A study that grows until it is decided: studies with known truth, and real small ones."""

import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from helpers.command_line import TINY, refusal, succeed, typed
from scipy.special import stdtr

from deepstack.base.errors import ResourceError
from deepstack.runs.outcomes import Result
from deepstack.tools.answer.grow import Growth, Point, grow
from deepstack.tools.answer.looks import COMPARED, counted_looks, growing, looks_at

CHANCE = 3.25
NOISE = 0.03
Loss = Callable[[np.random.Generator, Point], float]
Measure = Callable[[Sequence[Point]], list[Result]]


def measured(
    loss: Loss,
    settings: Sequence[str] = "AB",
    depths: Sequence[int] = (6,),
    rates: Sequence[float] = (1e-3,),
    seeds: int = 3,
    random: int = 0,
) -> Measure:
    """Return a function that 'trains' runs: each loss is its truth and noise of its own.

    A part of the noise is shared by all runs of a seed.
    """
    ends: dict[Point, Result] = {}

    def measure(points: Sequence[Point]) -> list[Result]:
        grid = product(settings, depths, rates, range(seeds))
        for point in points or (Point(*values) for values in grid):
            key = (random, point.seed)
            shared = np.random.default_rng(key).normal(0, NOISE)
            words = (*map(ord, point.setting), point.depth, round(1e6 * point.rate))
            value = shared + loss(np.random.default_rng((*key, *words)), point)
            state = "diverged" if math.isinf(value) else "done"
            end = (point.setting, point.setting, *point[1:], state)
            ends[point] = Result(*end, None if state == "diverged" else value, CHANCE)
        return list(ends.values())

    return measure


def settings_apart(deviations: float) -> Loss:
    """Losses of which B's are higher, by so many deviations of a difference of two seeds."""
    effect = deviations * NOISE * math.sqrt(2)
    return lambda rng, point: 2.8 + effect * (point.setting == "B") + rng.normal(0, NOISE)


def rate_moves(power: float, center: float = 4e-3) -> Loss:
    """Losses whose best rate is `center` at N = 6, and goes with this power of N."""

    def loss(rng: np.random.Generator, point: Point) -> float:
        away = math.log(point.rate / center) - power * math.log(point.depth / 6)
        return 2.6 + 0.1 * away**2 + rng.normal(0, NOISE)

    return loss


def learning(share: float) -> Loss:
    """Losses of which this share of the seeds learns at N = 48, and all at N = 6."""
    return lambda rng, point: (
        rng.normal(0, 0.02) + (2.8 if point.depth == 6 or rng.random() < share else CHANCE)
    )


def learning_to(depth: int, share: float = 1.0) -> Loss:
    """Losses of which this share of the seeds learns down to a depth, and the rest deeper."""

    def loss(rng: np.random.Generator, point: Point) -> float:
        learns = (rng.random() < share) == (point.depth <= depth)
        return rng.normal(0, 0.02) + (2.8 if learns else CHANCE + 0.2)

    return loss


RATES = (1e-3, 2e-3, 4e-3, 8e-3, 16e-3)
# Losses with known truth, the words that a right answer has or '' for none, the study's axes, and
# the number of simulated studies.
TRUTHS = [
    (settings_apart(0), "", {}, 50),
    (settings_apart(0.8), "A is better than B", {}, 20),
    (settings_apart(1.2), "A is better than B", {"depths": (6, 48)}, 20),
    (settings_apart(4), "A is better than B", {"seeds": 1}, 10),
    (settings_apart(0), "", {"depths": (6, 48)}, 32),
    (settings_apart(0), "", {"settings": "ACD"}, 15),
    (rate_moves(0), "", {"rates": RATES}, 10),
    (rate_moves(0), "", {"settings": "A", "depths": (6, 24), "rates": RATES}, 4),
    (rate_moves(-0.5), "falls with", {"settings": "A", "depths": (6, 24), "rates": RATES}, 4),
    (learning(0.05), "loss rises", {"settings": "A", "depths": (6, 48)}, 20),
    (learning(0.98), "", {"settings": "A", "depths": (6, 48)}, 15),
]


@pytest.mark.slow
def test_at_most_7_percent_of_200_growing_studies_are_wrong() -> None:
    """5 % by the rule; 7 % with the noise of 200 studies."""
    wrong: list[str] = []
    number = 0
    for kind, (loss, right, axes, studies) in enumerate(TRUTHS):
        decided = 0
        for study in range(studies):
            number += 1
            measure = measured(loss, random=1000 * kind + study, **axes)  # type: ignore[arg-type]
            found = grow(measure, growing()).found
            decided += found.decided
            if found.decided and not (right and right in found.sentence):
                wrong.append(f"{kind}: {found.sentence}")
        assert decided >= 0.7 * studies or not right, kind  # an effect is mostly found
    assert number == 200 and len(wrong) <= 0.07 * number, wrong


@pytest.mark.slow
def test_all_looks_together_spend_the_error() -> None:
    """Half a million studies without a difference; 3 standard errors above the error."""
    rng = np.random.default_rng(1)
    least = []
    for _ in range(5):
        draws = rng.standard_normal((100_000, COMPARED[-1]))
        sums, squares = np.cumsum(draws, 1), np.cumsum(draws**2, 1)
        levels = []
        for n in COMPARED:
            mean = sums[:, n - 1] / n
            variance = (squares[:, n - 1] - n * mean**2) / (n - 1)
            levels.append(2 * stdtr(n - 1, -np.abs(mean / np.sqrt(variance / n))))
        least.append(np.min(levels, axis=0))
    smallest = np.concatenate(least)
    for error in (0.1, 0.05, 0.025, 0.01, 0.001):
        crossed = np.mean(smallest < error / counted_looks(error))
        assert crossed <= error + 3 * math.sqrt(error / len(smallest)), error
        assert crossed >= 0.8 * error, error  # and hardly less


def test_a_large_difference_takes_fewer_runs_than_a_small_one() -> None:
    ends = [grow(measured(settings_apart(d), random=3), growing()) for d in (10, 1.5)]
    assert [end.found.decided for end in ends] == [True, True]
    assert ends[0].runs < ends[1].runs < 64 and not ends[0].next
    assert "96 % interval over 6 looks" in ends[0].found.sentence
    how_sure = " ".join(ends[0].found.sure)
    assert "Pocock 1977" in how_sure and "a lead of 4 seeds" in how_sure


def test_a_limit_of_runs_leaves_the_question_open() -> None:
    end = grow(measured(settings_apart(0.3), random=1), growing(), most=12)
    assert not end.found.decided and end.runs <= 12 < end.runs + len(end.next)


def test_a_setting_with_too_few_seeds_is_counted_and_not_said_to_learn() -> None:
    one_seed = measured(learning_to(20), settings="A", depths=(6, 48), seeds=1)
    end = grow(one_seed, growing(), most=2)
    assert end.found.sentence.startswith(
        "A learns in 1 of 1 seed at N = 6 and in 0 of 1 seed at N = 48 "
        "(N = 6 and 48, 1 seed each); it is undecided whether "
    )
    assert end.found.details[:2] == [
        "It is open whether A learns at N = 6 (1 of 1 seed).",
        "It is open whether A learns at N = 48 (0 of 1 seed).",
    ]


def test_seeds_are_paired_over_settings() -> None:
    measure = measured(settings_apart(0.5), seeds=1)
    end = grow(measure, growing(), most=20)
    seeds = [{one.seed for one in measure([]) if one.setting == label} for label in "AB"]
    assert seeds[0] == seeds[1] == set(range(end.runs // 2))


@pytest.mark.parametrize(("center", "added"), [(16e-3, {8e-3, 16e-3}), (25e-5, {5e-4, 25e-5})])
def test_rates_are_added_beyond_the_edge(center: float, added: set[float]) -> None:
    axes = {"settings": "A", "depths": (6, 24), "rates": (1e-3, 2e-3, 4e-3), "seeds": 3}
    measure = measured(rate_moves(0, center=center), **axes)  # type: ignore[arg-type]
    end = grow(measure, growing(), most=60)
    assert added < {one.rate for one in measure([])}
    assert "edge" not in end.found.sentence and "has no exponent" not in end.found.sentence


def mostly_learns(measure: Measure) -> dict[int, bool]:
    """Return for each depth of a study of one setting whether most of its seeds learnt."""
    seeds: dict[int, list[bool]] = {}
    for one in measure([]):
        seeds.setdefault(one.depth, []).append(one.outcome == "trained")
    return {depth: 2 * sum(learns) > len(learns) for depth, learns in sorted(seeds.items())}


def test_depths_are_added_where_a_setting_ceases_to_learn() -> None:
    measure = measured(learning_to(20), settings="A", depths=(6, 48))
    found = grow(measure, growing(depths=True)).found
    assert mostly_learns(measure) == {6: True, 17: True, 29: False, 48: False}
    assert found.sentence.startswith("A learns at N = 6 and 17 and not at N = 29")
    for depths, looks in (((6, 48), growing()), ((6, 12), growing(depths=True))):
        measure = measured(learning_to(8), settings="A", depths=depths)
        grow(measure, looks)
        assert tuple(mostly_learns(measure)) == depths


@pytest.mark.slow
def test_the_depth_where_learning_ends_is_wrong_in_at_most_5_percent_of_studies() -> None:
    """Of 200 studies at 6, 48 and 1000 layers; 7 % with the noise of 200 studies."""
    wrong = 0
    for study in range(200):
        truth = int(6 * (1000 / 6) ** (study / 200))
        measure = measured(
            learning_to(truth, 0.8), settings="A", depths=(6, 48, 1000), seeds=1, random=study
        )
        assert grow(measure, growing(depths=True)).found.batch == []
        learns = mostly_learns(measure)
        last = max((depth for depth, does in learns.items() if does), default=0)
        beyond = [depth for depth in learns if depth > last]
        wrong += not (beyond and last <= truth < beyond[0] <= 2 * last + 1)
    assert wrong <= 14


def test_an_interrupted_study_asks_for_the_same_runs_again() -> None:
    def interrupted(measure: Measure, calls: int) -> Growth:
        """Look again from the first runs on, as a repeated command does; runs are kept."""
        known: dict[Point, Result] = {}
        asked: list[Point] = []

        def again(points: Sequence[Point]) -> list[Result]:
            nonlocal calls
            if not points:
                asked.clear()
            calls -= 1
            if calls == 0:
                raise KeyboardInterrupt
            if missing := [point for point in points if point not in known]:
                known.update({Point(r.setting, *r[2:5]): r for r in measure(missing)})
            elif not points:
                known.update({Point(r.setting, *r[2:5]): r for r in first})
            asked.extend(points)
            first_points = [Point(r.setting, *r[2:5]) for r in first]
            return [known[point] for point in [*first_points, *asked]]

        first = measure([])[:6]
        try:
            return grow(again, growing())
        except KeyboardInterrupt:
            return grow(again, growing())

    whole = grow(measured(settings_apart(1.2), random=5), growing())
    assert whole.runs > 12
    for calls in (2, 3):
        assert interrupted(measured(settings_apart(1.2), random=5), calls) == whole


def test_a_broken_record_of_a_growing_study_is_refused(tmp_path: Path) -> None:
    assert not looks_at([tmp_path]).repeated
    for text in (
        '{"error": 2}',
        "[" * 100_000,
        '{"error": 0.05, "interpolated": 3}',
        '{"error": []}',
    ):
        (tmp_path / "until.json").write_text(text)
        with pytest.raises(
            ResourceError, match=r"until\.json: found no error between 0 and 1; rep"
        ):
            looks_at([tmp_path])


def test_wrong_options_of_a_growing_study_are_refused() -> None:
    words = ["sweep", "quick", *TINY, "--seeds", "0,1"]
    assert "--until" in refusal(2, *words, "--until", "known")
    assert "allowed 2 or more" in refusal(2, *words, "--until", "decided", "--max-runs", 1)
    alone = refusal(2, *words, "--max-runs", 9)
    assert "--max-runs: found without --" in alone and "--until" in alone
    assert "--error: found 0" in refusal(2, *words, "--until", "decided", "--error", 0)


def test_settings_by_seed_say_nothing_of_added_seeds(tmp_path: Path) -> None:
    path = tmp_path / "study.yaml"
    path.write_text(
        "model: {depth: 2, d_model: 16, n_heads: 2}\nsweep:\n  grid: {seed: [0, 1, 2]}\n"
        "  overrides: [{where: {seed: [1]}, set: {train.steps: 3}}]\n"
    )
    error = refusal(2, "sweep", path, "--until", "decided", "--out", tmp_path / "results")
    assert "--until: found seed in sweep.overrides, which say nothing of added seeds" in error
    assert not (tmp_path / "results").exists()


@pytest.mark.slow
def test_a_killed_study_continues_and_does_not_look_anew(tmp_path: Path) -> None:
    """Two steps teach nothing, which the counts of four seeds show; losses do not differ."""
    words = ["sweep", "quick", *TINY, "--until", "decided", "--out", str(tmp_path)]
    words += ["--study", "s", "--schemes", "post_ln,deepnorm", "--max-runs", "12"]
    process = subprocess.Popen(
        [sys.executable, "-m", "deepstack", *words],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"COLUMNS": "200"},
    )
    assert process.stderr is not None
    done = 0
    for line in process.stderr:
        if (done := done + line.startswith("done")) == 3:  # in the second batch
            break
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stderr.close()
    deadline = time.monotonic() + 60
    while True:  # the runs notice that their sweep is gone
        states = [json.loads(p.read_text())["state"] for p in tmp_path.glob("s/*/status.json")]
        if "running" not in states or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    again = typed(*words)
    assert again.exit_code == 0, again.stderr
    last = [line for line in again.stderr.splitlines() if line.startswith(("decided", "undecided"))]
    (sentence,) = last
    runs = int(sentence.split()[2])
    assert runs == 12 and len(list(tmp_path.glob("s/*/status.json"))) == runs
    assert json.loads((tmp_path / "s/until.json").read_text())["error"] == 0.05
    third = typed(*words)
    assert sentence in third.stderr and "step 0/2" not in third.stderr
    page = json.loads(succeed("answer", tmp_path / "s", "--json", "--to", tmp_path / "page"))
    assert page["sentence"] == sentence.split(": ", 1)[1]
    assert "hold at all of these looks" in " ".join(page["how_sure"])
    plan = typed(*words, "--dry-run", "--json")
    assert {row["state"] for row in json.loads(plan.stdout)} == {"done"}
    assert "at most 12 runs" in plan.stderr, shlex.join(words)
